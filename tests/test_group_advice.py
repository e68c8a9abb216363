"""`Config.advice`: refused where it does not fit, the same on all ranks, and its vetoes obeyed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from launcher import run_threads
from worlds import LIMIT_S, build_each, small

from pcie_comm import CommWarning, Config, InvalidArgumentError, MismatchError, meeting
from pcie_comm.crossovers import Crossovers
from pcie_comm.rank_facts import RankFacts
from pcie_comm.topology.advice import Advice, Veto
from pcie_comm.topology.model import Gpu, Host, System

ONE = "GPU-11111111-1111-1111-1111-111111111111"
TWO = "GPU-22222222-2222-2222-2222-222222222222"
THREE = "GPU-33333333-3333-3333-3333-333333333333"


def host(driver: str = "595.58.03") -> Host:
    unknown = {"*": "of no interest"}
    gpus = tuple(
        Gpu(f"GPU{at}", address=f"0000:0{at}:00.0", uuid=uuid, unknown=unknown)
        for at, uuid in enumerate((ONE, TWO, THREE))
    )
    system = System(driver=driver, unknown=unknown)
    return Host(("a test",), system, gpus=gpus, unknown=unknown)


def advice(*vetoes: tuple[str, str]) -> Advice:
    from pcie_comm.topology.advice import advise

    found = tuple(Veto(source, target, "writes were dropped") for source, target in vetoes)
    return replace(advise(host()), vetoes=found)


@pytest.fixture
def write(tmp_path):
    def write(name, *vetoes):
        path = tmp_path / name
        path.write_text(advice(*vetoes).to_json())
        return path

    return write


def test_the_variable_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PCIE_COMM_ADVICE", str(tmp_path))
    assert Config().advice == tmp_path
    assert "advice" not in Config().contract()


def test_a_file_of_a_changed_machine_fails_on_all_ranks(write, monkeypatch):
    monkeypatch.setattr(meeting, "collect", lambda: host(driver="1.2.3"))
    path = write("advice.json")
    for error in build_each([{"config": small(advice=path)}, {}]):
        assert "changed=driver" in str(error)
        assert "pcie-comm advise --out FILE" in str(error)


def test_a_file_of_another_machine_is_refused(write):
    path = write("advice.json")
    errors = build_each([{"config": small(advice=path)}] * 2)
    assert any(isinstance(error, InvalidArgumentError) for error in errors)
    assert all("changed=" in str(error) for error in errors)


def test_ranks_with_other_vetoes_refuse_each_other(write, monkeypatch):
    monkeypatch.setattr(meeting, "collect", host)
    paths = [write("a", (ONE, TWO)), write("b")]
    for error in build_each([{"config": small(advice=path)} for path in paths]):
        assert isinstance(error, MismatchError)
        assert "vetoes" in str(error)


def test_a_group_that_the_advice_fits_works(write, monkeypatch):
    monkeypatch.setattr(meeting, "collect", host)
    path = write("advice.json", (ONE, TWO))
    groups = build_each([{"config": small(advice=path)}] * 2)
    transports = {group.describe()["transport"] for group in groups}
    run_threads(lambda rank: groups[rank].close(), 2, timeout_s=LIMIT_S)
    assert transports == {"host_shm"}  # no GPU takes part, so no veto concerns it


def transport_of(known: Advice | None, *uuids: str, pins: bool = True) -> tuple[str, str]:
    devices = [uuid.removeprefix("GPU-").replace("-", "") for uuid in uuids]
    facts = [RankFacts(device, 8, tuple(devices), {}, pins) for device in devices]
    own = (torch.device("cuda", 0), Crossovers(), known)
    return meeting._transport_for("auto", facts, (False, 1, 0), own)


def test_a_veto_without_pinned_memory_is_the_last_resort_and_said_once(monkeypatch):
    monkeypatch.setattr(meeting, "_warned", set())
    vetoed = advice((TWO, ONE))
    with pytest.warns(CommWarning, match="torch_dist is slow.*pinned host memory") as caught:
        chosen = [transport_of(vetoed, ONE, TWO, pins=False) for _ in range(3)]
    assert len(caught) == 1
    assert {name for name, _ in chosen} == {"torch_dist"}
    assert "writes were dropped" in chosen[0][1]
    assert transport_of(None, ONE, TWO, pins=False)[0] == "cuda_ipc"


def test_a_veto_moves_the_group_and_says_why():
    name, reason = transport_of(advice((TWO, ONE)), ONE, TWO)
    assert name == "host_pinned"
    assert TWO in reason and "writes were dropped" in reason


def test_a_veto_of_other_gpus_changes_nothing():
    """Negative control."""
    assert transport_of(advice((TWO, THREE)), ONE, TWO)[0] == "cuda_ipc"
    assert transport_of(None, ONE, TWO)[0] == "cuda_ipc"


def limits_of(advised: Advice | None, **config) -> Crossovers:
    return meeting._crossovers(small(**config), advised)


def test_measured_limits_are_obeyed_and_named():
    limits = {"vram": {"tagged_nbytes": 100, "push_nbytes": 2000}}
    found = limits_of(replace(advice(), crossovers=limits, source="a.json"))
    assert (found.vram.tagged_nbytes, found.vram.push_nbytes) == (100, 2000)
    assert found.pinned == Crossovers().pinned
    assert found.source == "advice a.json"


def test_a_policy_file_comes_first_and_without_limits_nothing_changes(tmp_path):
    report = {
        "format": "pcie_comm bench 1",
        "correct": True,
        "crossovers": {"vram": {"tagged_nbytes": 7, "push_nbytes": None}},
    }
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(report))
    limits = {"vram": {"tagged_nbytes": 100, "push_nbytes": 2000}}
    found = limits_of(replace(advice(), crossovers=limits), policy_file=path)
    assert found.vram.tagged_nbytes == 7
    assert limits_of(advice()) == limits_of(None) == Crossovers()


def test_ranks_with_other_measured_limits_refuse_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "collect", host)
    paths = []
    for name, nbytes in (("a", 100), ("b", 200)):
        limits = {"vram": {"tagged_nbytes": nbytes, "push_nbytes": None}}
        paths.append(tmp_path / name)
        paths[-1].write_text(replace(advice(), crossovers=limits).to_json())
    for error in build_each([{"config": small(advice=path)} for path in paths]):
        assert isinstance(error, MismatchError)
        assert "crossovers" in str(error)

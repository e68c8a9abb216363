"""The topology tool on a real GPU: every level runs, broken ways are found, groups obey advice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import harness
import pytest
import torch

from pcie_comm import CompileError, Config, InvalidArgumentError, driver, local_world
from pcie_comm.kernels.store import KernelStore
from pcie_comm.probe import checks, figures, plan, works
from pcie_comm.probe.kernels import PROBES
from pcie_comm.probe.lab import Lab, Memory
from pcie_comm.probe.plan import QUICK, Scale
from pcie_comm.probe.task import Figure, Task, blank_check
from pcie_comm.topology import codec
from pcie_comm.topology.advice import Veto, advise
from pcie_comm.topology.collect import collect
from pcie_comm.topology.doctor import Case, examine
from pcie_comm.topology.model import ANY, Gpu
from pcie_comm.topology.probed import Check, Exchange, Pattern
from pcie_comm.topology.redact import redact
from pcie_comm.topology.render import to_html, to_text
from pcie_comm.transport.cuda_memory import dashed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

ROOT = Path(__file__).resolve().parents[2]
SMALL = Scale(2000, 500, 100, 0.01, 1 << 22)
QUICK_S = 30.0


@pytest.fixture(scope="module")
def store():
    config = Config()
    found = KernelStore(config.kernels_dir, config.cache_dir)
    try:
        for one in PROBES.values():
            for key in one.variants():
                found.get(one, key, torch.cuda.get_device_capability(0))
    except CompileError as error:
        pytest.skip(f"the probes' kernels are not built: {error}")
    return found


@pytest.fixture(scope="module")
def report(store, tmp_path_factory):
    """Run the tool from the checkout: all levels, quickly; return report, seconds, and its text."""
    path = tmp_path_factory.mktemp("probe") / "report.json"
    command = [sys.executable, "tools/probe_topology.py", "--quick", "--json", str(path)]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    seconds = time.monotonic() - started
    assert done.returncode in (0, 1), done.stderr[-2000:]
    return codec.from_json(path.read_text(), "x"), seconds, done.stdout


def test_every_check_is_right(report, figures):
    host, seconds, text = report
    figures(seconds=round(seconds, 1), report=json.loads(codec.to_json(redact(host))))
    assert "litmus pull" in text
    bad = [check for check in host.checks if check.verdict != "OK"]
    assert bad == []
    count = torch.cuda.device_count()
    places = {(check.source, check.target) for check in host.checks}
    assert len(places) == count * count + count
    assert {check.rounds for check in host.checks if "litmus" in check.name} == {
        QUICK.litmus_rounds
    }


def test_every_figure_is_there_or_has_its_reason(report, figures):
    host, _, _ = report
    figures(matrices={matrix.title: matrix.cells for matrix in host.measurements})
    gaps = [gap for matrix in host.measurements for gap in matrix.gaps]
    assert [gap for gap in gaps if "NUMA" not in gap.reason] == []
    assert len(host.measurements) >= 16
    assert all(one.points for one in (*host.exchanges, *host.ladders))
    if torch.cuda.device_count() == 1:
        assert {one.why("flows") for one in host.patterns} == {"there is one GPU"}


def test_figures_are_of_this_world(report):
    """Bounds that no working machine leaves: a wrong unit or an empty loop would."""
    host, _, _ = report
    by_title = {matrix.title: matrix.cells[0][0] for matrix in host.measurements}

    def of(start: str) -> float:
        return next(value for title, value in by_title.items() if title.startswith(start))

    for start in ("copy engine, GPU to host memory", "SMs write to host memory"):
        assert 1 < of(start) < 130
    assert 50 < of("SMs of the row write to the column") < 10_000
    assert 0.1 < of("dependent load of the row") < 20
    assert of("dependent load of the row") < of("dependent load from host memory") < 100
    assert 0.1 < of("flag between resident kernels") < 50
    for one in host.exchanges:
        first, last = one.points[0], one.points[-1]
        assert 0.5 < first.push_us < last.push_us < 100_000


def test_links_were_seen_under_load(report, figures):
    host, _, _ = report
    figures(loads=[codec.plain(one) for one in host.loads])
    for one in host.loads:
        assert one.driver is not None or one.sysfs is not None or one.why("driver")
        assert "ended before" not in one.why("driver")


def test_quick_is_quick(report):
    if torch.cuda.device_count() == 1:
        assert report[1] < QUICK_S


def test_the_record_goes_round_and_is_shown(report):
    host, _, _ = report
    assert codec.from_json(codec.to_json(host), "x") == host
    assert "litmus tagged" in to_text(host) and "<svg" in to_html(host)
    findings, _ = examine(Case(host))
    assert not {"data-fault", "false-access"} & {finding.id for finding in findings}
    advice = advise(host)
    assert advice.vetoes == () or torch.cuda.device_count() > 1
    assert set(advice.crossovers) == {"vram", "pinned"}


@pytest.fixture
def lab(store):
    """Two names of one GPU, so that the ways between GPUs run where there is one."""
    return Lab({"GPU0": 0, "GPU1": 0}, store)


NAMES = {"GPU0": 0, "GPU1": 0}


def test_ways_between_two_names_of_a_gpu(lab):
    for task in plan.verify(NAMES, SMALL):
        if task.work not in ("visit", "collective"):
            answer = works.perform(lab, task)
            assert [r.verdict for r in answer.records] == ["OK"] * len(task.blanks), answer


def test_measures_between_two_names_of_a_gpu(lab):
    gpus = tuple(Gpu(name, unknown={ANY: "a test"}) for name in NAMES)
    host = replace(collect(), gpus=gpus, nodes=None, unknown={ANY: "a test"})
    for task in plan.measure(host, NAMES, SMALL):
        if not task.work or task.work == "links":
            continue
        answer = works.perform(lab, task)
        for record in answer.records:
            if isinstance(record, Figure):
                assert record.value is not None or "NUMA" in record.why("value"), record
            elif isinstance(record, Pattern):
                assert record.gbps, record
            elif isinstance(record, Exchange):
                assert all(point.tagged_us for point in record.points), record


@pytest.fixture
def mirrored(lab, monkeypatch):
    """Let GPU0 address other memory than GPU1's own: what it writes never arrives."""
    usual = Memory.of

    def of(self, place, nbytes, *users):
        region = usual(self, place, nbytes, *users)
        if place == "GPU1" and any(user.name == "GPU0" for user in users):
            shadow = usual(self, "GPU0", nbytes, *users)
            address = shadow.addresses["GPU0"]
            return replace(region, addresses={**region.addresses, "GPU0": address})
        return region

    monkeypatch.setattr(Memory, "of", of)
    monkeypatch.setattr(checks, "LITMUS_LIMIT_S", 0.5)
    monkeypatch.setattr(figures, "TRIAL_LIMIT_S", 0.5)
    return lab


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("store", "MIRRORED"),
        ("load", "CORRUPT"),
        ("litmus push", "HANG"),
        ("litmus pull", "CORRUPT"),  # rank 1's flag arrives, and rank 0 reads other memory
        ("litmus tagged", "HANG"),
        ("all at once", "MIRRORED"),
    ],
)
def test_control_a_mirrored_way_is_found(mirrored, name, verdict):
    task = next(
        task
        for task in plan.verify(NAMES, SMALL)
        if isinstance(task.blanks[0], Check)
        and (task.blanks[0].source, task.blanks[0].target) == ("GPU0", "GPU1")
        and task.blanks[0].name == name
    )
    started = time.monotonic()
    found = works.perform(mirrored, task).records[0]
    assert found.verdict == verdict, found
    assert time.monotonic() - started < 10
    task = Task("store", NAMES, (blank_check("GPU1", "GPU0", "store"),))
    assert works.perform(mirrored, task).records[0].verdict == "OK", "the device still works"


def test_control_wrong_bytes_are_no_figure(mirrored):
    blank = Figure("sm-write", "GPU0", "GPU1", unknown={ANY: "open"})
    answer = works.perform(mirrored, Task("bandwidth", NAMES, (blank,), SMALL.transfer))
    assert answer.records[0].value is None and answer.wrong


# ---- groups and advice


@pytest.fixture
def advised(tmp_path):
    """Return a function that writes advice for this machine, and its path."""

    def write(name, vetoes=(), **changes):
        path = tmp_path / name
        advice = replace(advise(collect()), vetoes=tuple(vetoes), **changes)
        path.write_text(advice.to_json())
        return path

    return write


def gathered(config) -> dict:
    """Run a real group under a config; return what it says of itself."""
    first = torch.randn(2, 4, 8, device=harness.DEVICE)
    second = torch.randn(2, 4, 4, device=harness.DEVICE)
    with local_world(2, harness.DEVICE, config=config) as world:
        for got, _ in world.run(lambda g: g.all_gather_pair(first[g.rank], second[g.rank])):
            assert torch.equal(got, torch.cat([*first], dim=1))
        return world.groups[0].describe()


def test_a_veto_moves_a_real_group(advised):
    uuid = f"GPU-{dashed(driver.device_uuid(0))}"
    veto = Veto(uuid, uuid, "writes were dropped, says a test")
    facts = gathered(Config(advice=advised("vetoed", [veto])))
    assert facts["transport"] == "host_pinned"
    assert "writes were dropped, says a test" in facts["transport_reason"]
    assert uuid in facts["transport_reason"]


def test_control_advice_without_a_veto_moves_nothing(advised):
    assert gathered(Config(advice=advised("plain")))["transport"] == "cuda_local"


def test_a_stale_file_is_refused_with_the_part(advised):
    known = {name: digest for name, digest in advise(collect()).fingerprint.items() if digest}
    part = "driver" if "driver" in known else sorted(known)[0]
    path = advised("stale", fingerprint={**known, part: "0" * 16})
    with pytest.raises(InvalidArgumentError, match=f"changed={part};"):
        gathered(Config(advice=path))


def test_a_group_goes_by_measured_limits(advised):
    limits = {"vram": {"tagged_nbytes": 0, "push_nbytes": 0}}
    facts = gathered(Config(advice=advised("limits", crossovers=limits)))
    assert "advice" in json.dumps(facts)
    assert "pull" in json.dumps(facts["channel default"])

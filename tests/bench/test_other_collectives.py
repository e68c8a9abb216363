"""Any registered collective is timed with inputs of its own, and checked against its reference."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from example_plugin import load_example
from made import row

from pcie_comm import InvalidArgumentError, UnsupportedError, register
from pcie_comm.bench import contenders, workload, worlds
from pcie_comm.bench.options import OPERATIONS, SHARED, VRAM, Options, parse
from pcie_comm.bench.program import main
from pcie_comm.bench.report import crossovers
from pcie_comm.kernels import registry
from pcie_comm.kernels.collective import Collective, PlanInfo
from pcie_comm.kernels.registry import find

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--ranks", "2", "--rows", "1", "--samples", "3", "--ops", "1"]
OWN = ("all_reduce", "reduce_scatter", "lse_reduce_scatter", "all_reduce_rms_norm", "vocab_argmax")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    return register(load_example())


def test_a_plugin_is_timed_and_checked(example, tmp_path, capsys):
    out = tmp_path / "report.json"
    assert main([*TINY, "--op", example.name, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["correct"] is True
    assert [(one["contender"], one["protocol"]) for one in report["rows"]] == [
        ("ours", "push"),
        ("ours", "pull"),
    ]
    assert report["rows"][0]["received_nbytes"] == 2 * 7 * 4
    assert "every output was right" in capsys.readouterr().out


def test_control_a_wrong_result_is_found(example):
    """Poisoned outputs, and one number that is off by a little, are not right."""
    work = workload.make(example.name, 1, [CPU] * 2)
    with worlds.opened(2, SHARED, "cpu", options(example.name)) as entered:
        for side in contenders.of_case(work, entered, None):
            assert work.faults(side.outputs, side.ours), "poisoned outputs pass for right ones"
            entered.any.run(lambda group, side=side: side.enqueue(group.rank))
            assert work.faults(side.outputs, side.ours) == []
            side.outputs[1][0][0, 3] += 1e-6
            assert "rank 1: output 0: " in work.faults(side.outputs, side.ours)[0]


def options(*operations: str) -> Options:
    return Options(operations=operations, rows=(3,)).settled(on_gpu=False)


@pytest.mark.parametrize("op", OWN)
def test_ours_have_inputs_too_and_ranks_their_own_results(op):
    work = workload.make(op, 3, [CPU] * 4)
    scatters = op in ("reduce_scatter", "lse_reduce_scatter")
    assert torch.equal(work.wanted(0)[0], work.wanted(3)[0]) != scatters
    assert work.faults([work.wanted(rank) for rank in range(4)], ours=True) == []
    if scatters:
        assert work.faults([work.wanted(0)] * 4, ours=True)


def test_a_protocol_that_a_plugin_does_not_speak_is_not_shown_as_measured(example):
    def world(protocol):
        channel = SimpleNamespace(info=PlanInfo(0, 2, protocol, 1 << 20, 64, 32))
        return SimpleNamespace(groups=[SimpleNamespace(_channels={"default": channel})])

    worlds = {name: world(name) for name in ("tagged", "push", "pull", "auto")}
    work = workload.make(example.name, 1, [CPU] * 2)
    assert list(contenders.spoken(work, worlds)) == ["push", "pull", "auto"]
    alone = {"tagged": worlds["tagged"]}
    assert contenders.spoken(work, alone) == alone
    assert contenders.spoken(dataclasses.replace(work, op=OPERATIONS[1]), worlds) is worlds


def test_numbers_within_the_tolerance_pass():
    work = workload.make("all_reduce_rms_norm", 1, [CPU])
    (norm, updated) = work.wanted(0)
    nearly = (norm * (1 + 2.0**-8), updated)
    assert not torch.equal(nearly[0], norm)
    assert work.faults([nearly], ours=True) == []
    assert dataclasses.replace(work, tolerance=0.0).faults([nearly], ours=True)
    assert work.faults([(norm * 1.1, updated)], ours=True)


def test_slots_hold_the_largest_call(example):
    assert workload.slot_needed(OPERATIONS[0], 8, 2) == 0
    assert workload.slot_needed(example.name, 100, 2) == 2 * 2816  # 2800 bytes, on a line
    wide = workload.slot_needed("reduce_scatter", 64, 4)
    assert wide == 4 * (64 * 256 * 4 * 2)  # pull: a part for each rank
    with worlds.opened(2, SHARED, "cpu", dataclasses.replace(options("all_reduce"), rows=(64,))):
        pass


def test_what_cannot_be_timed_says_why(example, monkeypatch, capsys):
    with pytest.raises(InvalidArgumentError, match="or another registered collective"):
        parse(["--op", "gossip"])
    monkeypatch.setattr(type(example), "example_inputs", Collective.example_inputs)
    assert main([*TINY, "--op", example.name]) == 2
    assert "the plugin has no example_inputs" in capsys.readouterr().err
    monkeypatch.setattr(type(example), "example_inputs", lambda self, *_: 1 / 0)
    assert main([*TINY, "--op", example.name]) == 2
    assert "nothing could be measured" in capsys.readouterr().err
    with pytest.raises(UnsupportedError, match="failed to make example inputs: ZeroDivision"):
        workload.make(example.name, 1, [CPU])
    assert find(example.name) is example


def test_the_limits_of_auto_come_from_our_operations_alone():
    rows = [
        row(op=op, protocol=protocol, us=us, memory=VRAM)
        for op in ("all_gather_pair", "all_reduce_max")
        for protocol, us in (("tagged", 1.0), ("push", 2.0))
    ]
    assert crossovers(rows) == crossovers(rows[:2]) != {}
    assert crossovers(rows[2:]) == {}

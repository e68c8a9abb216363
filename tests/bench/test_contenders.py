"""Every way to do a thing gives the right bytes; floors that cannot be built are left out."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pcie_comm import CompileError
from pcie_comm.bench import contenders, torch_group, workload, worlds
from pcie_comm.bench.contenders import (
    DISTRIBUTED,
    NO_PROTOCOL,
    OURS,
    OVERLAPPING,
    PLAIN,
    TORCH,
    UNFUSED,
)
from pcie_comm.bench.options import FUSED, HEADS, PAIR, ROUTER, SHARED, Options
from pcie_comm.kernels.registry import collectives

CPU = torch.device("cpu")
OPTIONS = Options(rows=(1, 3)).settled(on_gpu=False)


@pytest.fixture(scope="module", params=[2, 4])
def opened(request):
    with worlds.opened(request.param, SHARED, "cpu", OPTIONS) as entered:
        groups, why = torch_group.open_groups(entered.devices)
        assert why == ""
        yield entered, groups


def run(entered, side):
    entered.any.run(lambda group: side.enqueue(group.rank))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("op", [FUSED, PAIR, HEADS])
def test_every_contender_returns_what_is_right(opened, op, rows):
    entered, groups = opened
    work = workload.make(op, rows, entered.devices)
    sides = contenders.of_case(work, entered, groups)
    named = [(side.name, side.protocol) for side in sides]
    ways = [OURS, UNFUSED, PLAIN] if op == FUSED else [OURS]
    expected = [(way, protocol) for protocol in ("push", "pull") for way in ways]
    assert named == [*expected, (DISTRIBUTED, NO_PROTOCOL)]
    for side in sides:
        assert work.faults(side.outputs, side.ours), "poisoned outputs pass for right ones"
        run(entered, side)
        assert work.faults(side.outputs, side.ours) == [], side.name
        assert side.ours == (side.name not in (PLAIN, DISTRIBUTED))


def test_the_router_alone():
    work = workload.make(ROUTER, 3, [CPU])
    with worlds.opened(1, SHARED, "cpu", OPTIONS) as entered:
        sides = contenders.of_case(work, entered, None)
        assert [(side.name, side.ours) for side in sides] == [(OURS, True), (TORCH, False)]
        for side in sides:
            side.enqueue(0)
            assert work.faults(side.outputs, side.ours) == []


@pytest.mark.parametrize("op", [FUSED, PAIR])
def test_with_overlap_there_is_one_more_contender_for_each_protocol(opened, op):
    entered, _ = opened
    both = worlds.Worlds(SHARED, entered.plain)
    both.overlapping = dict(entered.plain)
    sides = contenders.of_case(workload.make(op, 1, entered.devices), both, None)
    overlapping = [side.protocol for side in sides if side.name == OVERLAPPING]
    assert overlapping == ["push", "pull"]


def test_floors_without_a_compiler_are_left_out_with_the_reason(opened, monkeypatch):
    entered, _ = opened
    work = workload.make(PAIR, 1, entered.devices)

    def missing(collective, *rest):
        raise CompileError(f"{collective.name} is not built")

    for group in entered.any.groups:
        monkeypatch.setattr(group, "prepare", missing)
    assert contenders.floors(entered.any, work) == ([], "bench_empty is not built")


def test_floors_are_two_where_ranks_communicate(opened):
    entered, _ = opened
    for op, count in ((FUSED, 2), (PAIR, 2)):
        work = workload.make(op, 1, entered.devices)
        found, why = contenders.floors(entered.any, work)
        assert (len(found), why) == (count, "")
        for side in found:
            run(entered, side)
            assert side.outputs == []
    assert not {name for name in collectives() if name.startswith("bench_")}


# --- torch.distributed ---------------------------------------------------------------------------

GPUS = [torch.device("cuda", index) for index in (0, 0, 1, 1)]


@pytest.mark.parametrize(
    ("missing", "devices", "why"),
    [
        ("is_available", [CPU], "without torch.distributed"),
        ("is_gloo_available", [CPU], "without gloo"),
        ("is_nccl_available", GPUS, "without NCCL"),
    ],
)
def test_what_torch_lacks_is_named(monkeypatch, missing, devices, why):
    monkeypatch.setattr(torch_group.dist, missing, lambda: False)
    assert why in torch_group.why_not(devices)
    assert torch_group.open_groups(devices)[0] is None


def test_ranks_that_share_a_gpu_are_not_for_nccl(monkeypatch):
    monkeypatch.setattr(torch_group.dist, "is_nccl_available", lambda: True)
    assert "a GPU for each rank (ranks=4, GPUs=2)" in torch_group.why_not(GPUS)
    assert torch_group.why_not([GPUS[0], GPUS[2]]) == ""


def test_a_backend_that_refuses_is_a_reason(monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("no network")

    monkeypatch.setattr(torch_group.distributed, "ProcessGroupGloo", refuse)
    assert torch_group.open_groups([CPU] * 2) == (None, "RuntimeError: no network")


def test_worlds_know_their_ranks(opened):
    entered, _ = opened
    ranks = len(entered.devices)
    assert entered.sharers == ranks
    assert set(entered.plain) == {"push", "pull"}
    assert entered.overlapping == {}
    entered.check()
    assert dataclasses.asdict(OPTIONS)["rows"] == (1, 3)

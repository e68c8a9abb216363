"""Calls larger than a slot: how they are cut, and that CPU ranks return what smaller calls do."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import pytest
import torch
from collective_cases import CASES, gather, lse, norm, reduce, wrong
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher import run_threads
from worlds import small

from pcie_comm import InvalidArgumentError, MismatchError, UnsupportedError, local_world
from pcie_comm.crossovers import Limits
from pcie_comm.kernels import pieces as module
from pcie_comm.kernels.all_gather_pair import AllGatherPair
from pcie_comm.kernels.collective import Collective, PlanInfo, TensorMeta
from pcie_comm.kernels.pieces import plan_call
from pcie_comm.kernels.registry import find
from pcie_comm.tensors import meta_of

PROTOCOLS = ("push", "pull", "tagged", "auto")
LARGE = (
    gather(1),
    gather(3),
    reduce("all_reduce", torch.bfloat16, 40),
    reduce("reduce_scatter", torch.float16, 24),
    lse(torch.bfloat16, 16),
    norm(torch.float32, 40),
)


def info_of(world: int, protocol: str, segment: int, rank: int = 0) -> PlanInfo:
    return PlanInfo(rank, world, protocol, segment, 64, 8)


def as_tuple(results):
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


@pytest.mark.parametrize("protocol", ["push", "pull"])
def test_ranks_on_a_cpu_take_any_number_of_rows(protocol):
    """A slot that holds a row of some and not of others; rows beyond `max_rows`."""
    generator = torch.Generator().manual_seed(5)
    config = small(protocol=protocol, slot_nbytes=4096, max_rows=2)
    with local_world(2, "cpu", config=config) as world:
        for case in (*LARGE, *CASES[-2:]):
            inputs = case.make(2, 90, generator)
            got = world.run(lambda g, c=case, i=inputs: as_tuple(g.run(c.plugin, *i[g.rank])))
            assert wrong(case, inputs, got) == []


@pytest.mark.parametrize("slot_nbytes", [4096, 1 << 22])
def test_ranks_that_disagree_about_rows_are_told_at_once(slot_nbytes):
    """Whether they are cut into as many pieces or not."""
    config = small(slot_nbytes=slot_nbytes, timeout_s=20.0)
    for rows in ((100, 101), (1, 1000), (1000, 2000)):
        with local_world(2, "cpu", config=config) as world:
            started = time.monotonic()
            errors = run_threads(
                lambda r, w=world, n=rows: w.groups[r].run("all_reduce", torch.ones(n[r], 64)), 2
            )
            assert [type(error) for error in errors] == [MismatchError] * 2
            assert time.monotonic() - started < 10


def test_rows_of_a_plugin_that_is_not_cut_are_limited():
    with local_world(1, "cpu", config=small(max_rows=8)) as world:
        (group,) = world.groups
        group.prepare("all_gather_pair", rows=1 << 20)
        group.prepare("kimi_topk16", rows=1 << 20)  # it sends nothing: there is nothing to cut
        with pytest.raises(InvalidArgumentError, match="never cut"):
            group.prepare("barrier", rows=9)
        with pytest.raises(InvalidArgumentError, match="give 0 or more"):
            group.prepare("all_gather_pair", rows=-1)


# --- how calls are cut ----------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_pieces_fit_and_cover_every_byte_once(protocol):
    generator = torch.Generator().manual_seed(6)
    for case, world, segment in itertools.product(LARGE, (2, 3, 8), (1280, 1536)):
        inputs = case.make(world, 150, generator)[0]
        info = info_of(world, protocol, segment)
        if case.plugin.made_of and world > 2:
            continue  # see test_two_shots.py
        plan, pieces = plan_call(case.plugin, info, [meta_of(t) for t in inputs])
        assert len(pieces) > 1, case.name
        check_pieces(case.plugin, plan, pieces, inputs, segment)


def check_pieces(plugin, plan, pieces, inputs, segment) -> None:
    assert all(0 < piece.plan.staged_nbytes <= segment for piece in pieces)
    assert all(piece.plan.kernel in plugin.variants() for piece in pieces)
    assert len({piece.plan.signature for piece in pieces} & {plan.signature}) == 0
    first = plugin.row_inputs[0]
    row = inputs[first].stride(0) * inputs[first].itemsize
    begins = [piece.offsets[first] for piece in pieces]
    ends = [
        begin + piece.plan.scalars[0] * row for begin, piece in zip(begins, pieces, strict=True)
    ]
    assert begins == [0, *ends[:-1]]
    assert ends[-1] == len(inputs[first]) * row


def test_a_call_that_fits_is_one_launch_with_the_plan_of_before():
    inputs = [torch.zeros(64, 8), torch.zeros(64, 4)]
    metas = [meta_of(one) for one in inputs]
    info = info_of(2, "auto", 1 << 16)
    plugin = find("all_gather_pair")
    plan, pieces = plan_call(plugin, info, metas)
    assert pieces == ()
    assert plan == plugin.plan(info, *metas)
    many = [replace(meta, shape=(1000, *meta.shape[1:])) for meta in metas]
    assert plan_call(plugin, info, many)[1] == (), "rows alone are no reason"


def test_all_ranks_cut_alike_whatever_their_alignment():
    """Where rows lie decides the width of a pack and nothing else."""
    for op, dtype, size in (("all_reduce", "bfloat16", 2), ("all_gather", "float32", 4)):
        cut = []
        for alignment, stride in ((16, 1000), (4, 1002)):
            meta = TensorMeta((100, 1000), dtype, (stride, 1), size, alignment)
            _, pieces = plan_call(find(op), info_of(2, "auto", 8192), [meta])
            cut.append([(one.plan.scalars[0], one.plan.signature) for one in pieces])
        assert cut[0] == cut[1]
        assert len(cut[0]) > 10


@st.composite
def wide_calls(draw):
    """A gather, and perhaps a reduction, of rows that may be wider than a slot."""
    op = draw(st.sampled_from(["all_gather", "all_gather_pair", "all_reduce", "reduce_scatter"]))
    world = draw(st.integers(1, 2 if op == "all_reduce" else 16))
    count = 2 if op == "all_gather_pair" else 1
    rows = draw(st.integers(1, 5))
    metas = []
    for _ in range(count):
        width = (
            2 * world * draw(st.integers(1, 3000))
            if op != "all_gather"
            else draw(st.integers(1, 50_000))
        )
        stride = width + draw(st.integers(0, 9)) * (2 if "reduce" in op else 1)
        alignment = draw(st.sampled_from([4, 8, 16]))
        metas.append(TensorMeta((rows, width), "float16", (stride, 1), 2, alignment))
    segment = 128 * draw(st.integers(2, 40))
    return op, metas, info_of(world, draw(st.sampled_from(PROTOCOLS)), segment)


@settings(max_examples=80, deadline=None)
@given(wide_calls())
def test_any_gather_or_sum_is_cut_to_fit(call):
    op, metas, info = call
    plugin = find(op)
    try:
        _, pieces = plan_call(plugin, info, metas)
    except UnsupportedError:
        assert op == "reduce_scatter"
        assert info.protocol == "pull", "which stages a part for each rank"
        assert 64 * info.world_size > info.segment_nbytes
        return
    for piece in pieces:
        assert piece.plan.staged_nbytes <= info.segment_nbytes
        assert piece.plan.kernel in plugin.variants()
        assert len(piece.plan.scalars) == plugin.num_scalars(piece.plan.kernel)
        pack = piece.plan.kernel.variant[1]
        for meta, offset in zip(metas, piece.offsets, strict=False):
            assert (meta.alignment + offset) % min(pack, 16) == 0 or meta.alignment % pack
        outs = piece.offsets[len(metas) :]
        assert all(offset % pack == 0 for offset in outs), "outputs begin on a multiple of 16"
    if pieces:
        rows = metas[0].shape[0]
        sent = sum(one.plan.scalars[0] * one.plan.scalars[2] for one in pieces)
        whole = metas[0].shape[1] * 2 // (info.world_size if op == "reduce_scatter" else 1)
        assert sent == rows * whole, "every byte of the first tensor, once"


def test_heads_that_fit_one_by_one_are_cut():
    """Also where the number of parts that is tried next is more than there are heads."""
    for local, dim in itertools.product(range(1, 40), (40, 900, 952)):
        info = info_of(2, "push", 2048)
        shapes = (1, 2 * local, dim), (1, 2 * local)
        metas = [
            meta_of(torch.empty(shapes[0], dtype=torch.bfloat16)),
            meta_of(torch.empty(shapes[1])),
        ]
        _, pieces = plan_call(find("lse_reduce_scatter"), info, metas)
        assert all(piece.plan.staged_nbytes <= 2048 for piece in pieces)
    metas = [meta_of(torch.empty(1, 36, 1100, dtype=torch.bfloat16)), meta_of(torch.empty(1, 36))]
    with pytest.raises(InvalidArgumentError, match="capacity=2048"):
        plan_call(find("lse_reduce_scatter"), info_of(2, "push", 2048), metas)


def test_what_cannot_be_cut_says_what_a_slot_must_hold():
    norm_rows = [TensorMeta((4, 4096), "float32", (4096, 1), 4)] * 2
    weight = TensorMeta((4096,), "float32", (1,), 4)
    info = info_of(2, "push", 8192)
    with pytest.raises(InvalidArgumentError, match=r"nbytes=16384 .* capacity=8192"):
        plan_call(find("all_reduce_rms_norm"), info, [*norm_rows, weight])

    class Whole(AllGatherPair):
        row_inputs = ()

    metas = [TensorMeta((100, 100), "float32", (100, 1), 4)] * 2
    with pytest.raises(InvalidArgumentError, match="more than max_rows=64"):
        plan_call(Whole(), info, metas)
    metas = [TensorMeta((60, 100), "float32", (100, 1), 4)] * 2
    with pytest.raises(InvalidArgumentError, match="capacity=8192"):
        plan_call(Whole(), info, metas)


def test_control_pieces_without_the_whole_call_in_their_facts_would_match(monkeypatch):
    """Calls of 100 and of 101 rows begin with the same piece but for what it says of the call."""

    def first(rows: int) -> int:
        meta = TensorMeta((rows, 1000), "float32", (1000, 1), 4)
        return plan_call(find("all_reduce"), info_of(2, "push", 8192), [meta])[1][0].plan.signature

    assert first(100) != first(101)
    monkeypatch.setattr(module, "_named", lambda plan, whole: plan)
    assert first(100) == first(101)


def test_control_a_piece_that_moves_on_by_less_than_a_pack_is_planned_for_less():
    meta = TensorMeta((2, 4096), "float16", (4097, 1), 2)
    _, pieces = plan_call(find("all_gather"), info_of(2, "push", 8192), [meta])
    assert [one.offsets[0] for one in pieces] == [0, 8194]
    assert {one.plan.kernel.variant[1] for one in pieces} == {1}
    even = replace(meta, strides=(4104, 1))
    _, pieces = plan_call(find("all_gather"), info_of(2, "push", 8192), [even])
    assert {one.plan.kernel.variant[1] for one in pieces} == {16}


def test_a_model_of_a_prefill_takes_few_launches():
    """8192 tokens of 7168 bf16 over 8 ranks, with the default slots: 14 MB per rank."""
    meta = TensorMeta((8192, 896), "bfloat16", (896, 1), 2)
    info = PlanInfo(0, 8, "auto", (4 << 20) // 8, 64, 16)
    _, pieces = plan_call(find("all_gather"), info, [meta])
    assert len(pieces) == math.ceil(8192 * 1792 / (512 << 10)) + 1
    assert isinstance(find("all_gather"), Collective)


def test_a_row_of_fewer_packs_than_parts_is_cut():
    """Then some parts are empty."""
    info = replace(info_of(16, "auto", 128), max_blocks=16, limits=Limits(4000, 1000))
    for width in (32 * 35, 2272, 32 * 100):
        metas = [meta_of(torch.empty(1, width).half())]
        for op in ("reduce_scatter", "all_reduce"):
            _, pieces = plan_call(find(op), info, metas)
            assert all(piece.plan.staged_nbytes <= 128 for piece in pieces)

"""Sums in two shots: their launches followed on numbers, without a kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcie_comm.kernels import two_shots as module
from pcie_comm.kernels.collective import PlanInfo, TensorMeta
from pcie_comm.kernels.pieces import owner_of, plan_call
from pcie_comm.kernels.registry import find
from pcie_comm.policy import shots_of_sum

ITEM = 4
SUM = find("all_reduce")


def info_of(rank: int, world: int, protocol: str, segment: int) -> PlanInfo:
    return PlanInfo(rank, world, protocol, segment, 64, 8)


def meta_of(rows: int, width: int, stride: int, alignment: int = 16) -> TensorMeta:
    return TensorMeta((rows, width), "float32", (stride, 1), ITEM, alignment)


def part(memory: np.ndarray, address: int, rows: int, nbytes: int, stride: int) -> np.ndarray:
    """Return what a launch reads of a tensor, a view."""
    assert address % ITEM == nbytes % ITEM == stride % ITEM == 0
    begin, width, step = address // ITEM, nbytes // ITEM, stride // ITEM
    return np.stack([memory[begin + row * step :][:width] for row in range(rows)])


def follow(infos, metas, inputs):
    """Run every launch of every rank as its scalars say; return outputs, and bytes received."""
    world, plans = len(infos), []
    for info, meta in zip(infos, metas, strict=True):
        plans.append(plan_call(SUM, info, [meta])[1])
    assert len({tuple(one.plan.signature for one in pieces) for pieces in plans}) == 1
    rows, width = metas[0].shape
    outputs = [np.full(rows * width, np.nan) for _ in range(world)]
    received = 0
    for launches in zip(*plans, strict=True):
        op = launches[0].plan.kernel.op
        found = []
        for rank, piece in enumerate(launches):
            plan, memory = piece.plan, [inputs[rank], outputs[rank]]
            check(plan, infos[rank], metas[rank], piece)
            source, target = (memory[index] for index in piece.tensors or (0, 1))
            count, nbytes, stride = plan.scalars[0], plan.scalars[2], plan.scalars[3]
            apart = plan.scalars[7] if op == "reduce_scatter" else 0
            wanted = range(world) if op == "reduce_scatter" else (0,)
            parts = [
                part(source, piece.offsets[0] + one * apart, count, nbytes, stride)
                for one in wanted
            ]
            found.append((parts, target, piece.offsets[1] // ITEM))
        received += found[0][0][0].size * ITEM * (world - 1)
        for rank, (_, target, begin) in enumerate(found):
            if op == "all_gather":
                result = np.concatenate([parts[0] for parts, _, _ in found], axis=1)
            else:
                own = rank if op == "reduce_scatter" else 0
                result = sum(parts[own] for parts, _, _ in found)
            target[begin : begin + result.size] = result.ravel()
    return outputs, received


def check(plan, info, meta, piece) -> None:
    assert 0 < plan.staged_nbytes <= info.segment_nbytes
    owner, pack = owner_of(SUM, plan), plan.kernel.variant[1]
    assert owner.name in (SUM.name, *SUM.made_of)
    assert plan.kernel in owner.variants()
    assert len(plan.scalars) == owner.num_scalars(plan.kernel)
    assert plan.op == "all_reduce", "what a user called"
    for index, offset in zip(piece.tensors or (0, 1), piece.offsets, strict=True):
        alignment = meta.alignment if index == 0 else info.output_alignment
        assert (alignment + offset) % pack == 0


@st.composite
def calls(draw):
    world = draw(st.integers(3, 16))
    rows, width = draw(st.integers(1, 60)), draw(st.integers(1, 400))
    segment = 128 * draw(st.integers(2, 30))
    infos, metas = [], []
    protocol = draw(st.sampled_from(["push", "pull", "tagged", "auto"]))
    layouts = st.tuples(st.integers(0, 5), st.sampled_from([4, 8, 16]))
    for rank in range(world):
        layout = draw(layouts)
        stride, alignment = width + layout[0], layout[1]
        infos.append(replace(info_of(rank, world, protocol, segment), output_alignment=alignment))
        metas.append(meta_of(rows, width, stride, alignment))
    return infos, metas


@settings(max_examples=120, deadline=None)
@given(calls())
def test_every_number_is_the_sum_of_all_ranks(call):
    infos, metas = call
    rows, width = metas[0].shape
    if not plan_call(SUM, infos[0], [metas[0]])[1]:
        return  # it fits a slot
    dice = np.random.default_rng(7)
    inputs = [dice.integers(-9, 9, rows * one.strides[0]).astype(float) for one in metas]
    wanted = sum(
        part(one, 0, rows, width * ITEM, meta.strides[0] * ITEM)
        for one, meta in zip(inputs, metas, strict=True)
    )
    outputs, _ = follow(infos, metas, inputs)
    for output in outputs:
        assert np.array_equal(output, wanted.ravel())


@pytest.mark.parametrize("shape", [(4096, 64), (1, 1 << 18), (5, 50_000)])
@pytest.mark.parametrize("world", [3, 4, 8, 16])
def test_a_rank_receives_two_tensors_instead_of_one_from_each(world, shape):
    infos = [info_of(rank, world, "auto", 1 << 16) for rank in range(world)]
    metas = [meta_of(*shape, shape[1])] * world
    _, received = follow(infos, metas, [np.ones(shape[0] * shape[1])] * world)
    tensor = shape[0] * shape[1] * ITEM
    least = 2 * tensor * (world - 1) / world
    assert least <= received < 1.02 * least + 16 * world * (world - 1)


@pytest.mark.parametrize(
    ("nbytes", "world", "segment", "shots"),
    [
        (1 << 30, 1, 1 << 20, 1),
        (1 << 30, 2, 1 << 20, 1),
        ((1 << 20) + 4, 3, 1 << 20, 2),
        (1 << 20, 3, 1 << 20, 1),
        (512 << 10, 4, 1 << 20, 1),
        (700 << 10, 4, 1 << 20, 2),
        (128 << 10, 8, 1 << 20, 1),
        (256 << 10, 8, 1 << 20, 2),
        (64 << 10, 16, 1 << 20, 1),
        (256 << 10, 16, 1 << 20, 2),
        (1 << 20, 16, 1 << 10, 2),
        (1 << 20, 16, 1 << 9, 1),
    ],
)
def test_sums_take_two_shots_where_one_does_not_fit_or_that_spares_a_megabyte(
    nbytes, world, segment, shots
):
    assert shots_of_sum(nbytes, world, segment) == shots


def test_two_ranks_take_one_shot():
    _, pieces = plan_call(SUM, info_of(0, 2, "auto", 4096), [meta_of(100, 64, 64)])
    assert {one.plan.kernel.op for one in pieces} == {"all_reduce"}


def test_pairs_of_one_size_share_their_plans():
    _, pieces = plan_call(SUM, info_of(0, 4, "push", 4096), [meta_of(6400, 16, 16)])
    assert len(pieces) == 2 * 6400 // (4 * 64)
    assert len({id(one.plan) for one in pieces}) == 2


def test_control_a_second_launch_that_reads_another_ranks_part_is_noticed(monkeypatch):
    infos = [info_of(rank, 3, "push", 1024) for rank in range(3)]
    metas, inputs = [meta_of(96, 16, 16)] * 3, [np.arange(96.0 * 16)] * 3
    plain = module._Pairs.of

    def of(self, part, apart):
        first, second = plain(self, part, apart)
        yield first
        yield replace(second, offsets=(0, 0))

    monkeypatch.setattr(module._Pairs, "of", of)
    outputs, _ = follow(infos, metas, inputs)
    assert not np.array_equal(outputs[1], 3 * inputs[0])

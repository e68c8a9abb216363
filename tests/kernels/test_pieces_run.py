"""Calls that are cut, their launches run as PTX on the CPU: the bytes of a call that is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

import torch
from collective_cases import CASES, gather, lse, norm, reduce, wrong
from ptx_world import World
from router_rows import SPECS, hard_rows

from pcie_comm.calls import router_collective
from pcie_comm.kernels.registry import find

pytestmark = pytest.mark.timeout(300)

PROTOCOLS = ("push", "pull", "tagged")
BY_ROWS = (
    gather(3),
    reduce("all_reduce", torch.bfloat16, 24),
    reduce("reduce_scatter", torch.float16, 24),
    lse(torch.bfloat16, 16),
    norm(torch.float32, 20),
)
BY_COLUMNS = (
    gather(1),
    reduce("all_reduce", torch.bfloat16, 700),
    reduce("reduce_scatter", torch.float32, 200),
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", BY_ROWS, ids=[case.name for case in BY_ROWS])
def test_rows_are_those_of_one_launch(case, protocol):
    generator = torch.Generator().manual_seed(9)
    inputs = case.make(2, 14, generator)
    cut = World(2, protocol, blocks=2, slot_nbytes=1024, order=1, hosted=True)
    got = cut.call(case.plugin, inputs)
    assert cut.launched > 1
    assert wrong(case, inputs, got) == []
    whole = World(2, protocol, blocks=2, slot_nbytes=1 << 17)
    for one, other in zip(got, whole.call(case.plugin, inputs), strict=True):
        assert all(map(torch.equal, map(_raw, one), map(_raw, other)))
    assert whole.launched == 1


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("protocol", ["pull", "tagged"])
@pytest.mark.parametrize("case", BY_COLUMNS, ids=[case.name for case in BY_COLUMNS])
def test_rows_wider_than_a_slot_are_right(case, protocol):
    generator = torch.Generator().manual_seed(10)
    for rows in (1, 2):
        if case.plugin.name == "all_gather":
            inputs = [[torch.randn(rows, 303, generator=generator)] for _ in range(3)]
        else:
            inputs = case.make(3, rows, generator)
        world = World(3, protocol, blocks=3, slot_nbytes=3072)
        got = world.call(case.plugin, inputs)
        assert world.launched >= 2 * rows
        assert wrong(case, inputs, got) == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("world", "rows", "slot_nbytes"), [(3, 14, 1536), (4, 2, 2048)])
def test_sums_in_two_shots_are_those_of_one_launch(protocol, world, rows, slot_nbytes):
    """By rows, with some left over; by columns, with some left over. Strided on one rank."""
    case = reduce("all_reduce", torch.bfloat16, 24 if rows > world else 700)
    inputs = case.make(world, rows, torch.Generator().manual_seed(14))
    width = inputs[1][0].shape[1]
    wide = torch.zeros(rows, width + 2, dtype=torch.bfloat16)
    wide[:, :width] = inputs[1][0]
    inputs[1] = (wide[:, :width],)
    cut = World(world, protocol, blocks=2, slot_nbytes=slot_nbytes, order=1, hosted=True)
    got = cut.call(case.plugin, inputs)
    assert cut.launched > 2
    assert wrong(case, inputs, got) == []
    whole = World(world, protocol, blocks=2, slot_nbytes=1 << 17).call(case.plugin, inputs)
    for one, other in zip(got, whole, strict=True):
        assert all(map(torch.equal, map(_raw, one), map(_raw, other)))


def test_heads_wider_than_a_slot_are_merged_in_parts():
    case = lse(torch.bfloat16, 300)
    inputs = case.make(2, 2, torch.Generator().manual_seed(11))
    for protocol, slot_nbytes in (("push", 2048), ("pull", 4096)):
        world = World(2, protocol, blocks=2, slot_nbytes=slot_nbytes)
        assert wrong(case, inputs, world.call(case.plugin, inputs)) == []
        assert world.launched == 4


def test_the_fused_operation_is_cut_by_rows():
    spec = SPECS["kimi-k3"]
    logits, bias = hard_rows(spec)
    logits = logits[:4]
    down = torch.randn(4, 3584).to(torch.bfloat16)
    ((weights, ids),) = World(1).call(router_collective(spec), [[logits, bias]])
    inputs = [[a, b, bias] for a, b in zip(down.chunk(2, 1), logits.chunk(2, 1), strict=True)]
    world = World(2, "push", slot_nbytes=3 << 13)
    for got in world.call(find("all_gather_pair_kimi_topk"), inputs):
        assert all(map(torch.equal, got, (down, weights, ids)))
    assert world.launched == 2


def test_strides_and_odd_addresses_stay_right_from_piece_to_piece():
    """Rows 5 elements apart from each other: pieces begin where no wide pack may."""
    generator = torch.Generator().manual_seed(12)
    wide = [torch.randn(40, 69, generator=generator).half() for _ in range(2)]
    inputs = [[one[:, :64]] for one in wide]
    world = World(2, "push", slot_nbytes=2048)
    for (got,) in world.call(find("all_gather"), inputs):
        assert torch.equal(got, torch.cat([one[:, :64] for one in wide], 1))
    assert world.launched > 4


def test_control_pieces_that_do_not_move_on_are_noticed(monkeypatch):
    import ptx_world

    def stuck(plugin, info, metas):
        plan, pieces = plan_call(plugin, info, metas)
        return plan, tuple(replace(one, offsets=pieces[0].offsets) for one in pieces)

    plan_call = ptx_world.plan_call
    monkeypatch.setattr(ptx_world, "plan_call", stuck)
    case = CASES[5]
    inputs = case.make(2, 60, torch.Generator().manual_seed(13))
    assert wrong(case, inputs, World(2, "push", slot_nbytes=2048).call(case.plugin, inputs)) != []

"""Shards that do not divide, on CPU ranks: exact, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher import run_threads
from worlds import small

from pcie_comm import (
    InvalidArgumentError,
    MismatchError,
    UnsupportedError,
    kimi_topk16,
    local_world,
    router_topk,
)
from pcie_comm.kernels.all_gathers import AllGather
from pcie_comm.kernels.collective import PlanInfo
from pcie_comm.kernels.pieces import plan_call
from pcie_comm.kernels.registry import find
from pcie_comm.kernels.router_presets import DEEPSEEK_V3, GPT_OSS_20B
from pcie_comm.kernels.uneven import UNEVEN, Shares
from pcie_comm.tensors import meta_of

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

KIMI = "all_gather_pair_kimi_topk"
BIAS = torch.randn(896)


def kimi_rows(rows: int, world: int):
    down, logits = torch.randn(rows, 3584).bfloat16(), torch.randn(rows, 896)
    return down, logits, down.tensor_split(world, 1), logits.tensor_split(world, 1)


@pytest.mark.parametrize("protocol", ["push", "pull"])
@pytest.mark.parametrize("size", [3, 6, 9, 10, 12])
def test_kimi_is_stand_alone_at_every_world_size(size, protocol):
    """Through slots that hold the call, and that do not."""
    for slot_nbytes in (1 << 18, 4096):
        config = small(protocol=protocol, slot_nbytes=slot_nbytes)
        with local_world(size, "cpu", config=config) as world:
            for rows in (0, 1, 5):
                down, logits, downs, routers = kimi_rows(rows, size)
                wanted = (down, *kimi_topk16(logits, BIAS))
                for group in world.groups:
                    group.prepare(KIMI, rows=rows)
                results = world.run(
                    lambda g, d=downs, r=routers: g.all_gather_pair_kimi_topk(
                        d[g.rank], r[g.rank], BIAS
                    )
                )
                for result in results:
                    assert all(map(torch.equal, result, wanted))


@pytest.mark.parametrize("transport", ["auto", "torch_dist"])
def test_gathers_of_tensors_that_torch_split(transport):
    if transport == "torch_dist":
        pytest.importorskip("torch.distributed")
    first, second = torch.randn(4, 23), torch.randn(4, 50).half()
    heads = torch.randn(4, 11, 8).bfloat16()
    with local_world(3, "cpu", transport, small()) as world:

        def call(group):
            one, two, three = (t.tensor_split(3, 1)[group.rank] for t in (first, second, heads))
            pair = group.all_gather_pair(one, two, widths=(23, 50))
            out = torch.empty_like(heads)
            assert group.all_gather_heads(three, heads=11, out=out) is out
            single = group.run(AllGather(1, (50,)), two)
            down, *chosen = group.all_gather_pair_topk(
                two,
                torch.randn(4, 32).tensor_split(3, 1)[group.rank],
                None,
                spec=GPT_OSS_20B,
                width=50,
            )
            assert len(chosen) == 2
            return (*pair, out, single, down)

        for results in world.run(call):
            assert all(map(torch.equal, results, (first, second, heads, second, second)))


def test_a_router_of_groups_is_the_same_from_uneven_shards():
    logits, bias, down = torch.randn(3, 256), torch.randn(256), torch.randn(3, 30)
    with local_world(3, "cpu", config=small()) as world:
        results = world.run(
            lambda g: g.all_gather_pair_topk(
                down.chunk(3, 1)[g.rank],
                logits.tensor_split(3, 1)[g.rank],
                bias,
                spec=DEEPSEEK_V3,
            )
        )
    for result in results:
        assert all(map(torch.equal, result, (down, *router_topk(logits, bias, DEEPSEEK_V3))))


HEADS = torch.randn(2, 3, 8).half()
REFUSED = {
    "a share of another rank": lambda g: g.all_gather_heads(HEADS, heads=11),
    "fewer heads than ranks": lambda g: g.all_gather_heads(HEADS[:, :1], heads=2),
    "heads of text": lambda g: g.all_gather_heads(HEADS, heads="11"),
    "no heads": lambda g: g.all_gather_heads(HEADS, heads=0),
    "half a head": lambda g: g.all_gather_heads(HEADS, heads=11.0),
    "one width": lambda g: g.all_gather_pair(HEADS[0], HEADS[0], widths=(24,)),
    "a number of widths": lambda g: g.all_gather_pair(HEADS[0], HEADS[0], widths=24),
    "a wrong width": lambda g: g.all_gather_pair(HEADS[0], HEADS[0], widths=(24, 27)),
    "an equal share": lambda g: g.all_gather_pair_kimi_topk(
        torch.zeros(1, 1194).bfloat16(), torch.zeros(1, 298), BIAS
    ),
    "a width of text": lambda g: g.all_gather_pair_topk(
        HEADS[0], torch.zeros(3, 10), None, spec=GPT_OSS_20B, width="24"
    ),
}


@pytest.fixture(scope="module")
def world():
    with local_world(3, "cpu", config=small(timeout_s=2.0)) as world:
        yield world


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_is_no_share_is_refused(call, world):
    with pytest.raises(InvalidArgumentError):
        call(world.groups[0])
    whole = torch.randn(2, 11, 4).half()
    results = world.run(lambda g: g.all_gather_heads(whole.tensor_split(3, 1)[g.rank], heads=11))
    assert all(torch.equal(one, whole) for one in results)


def test_fewer_experts_than_ranks_are_refused():
    from pcie_comm import RouterSpec

    spec = RouterSpec(4, 2)
    with local_world(5, "cpu", config=small()) as world, pytest.raises(UnsupportedError):
        world.groups[0].prepare(spec)


def test_ranks_that_name_other_totals_do_not_match():
    with local_world(3, "cpu", config=small()) as world:
        totals = (11, 10, 10)  # 4, 3 and 3 heads: right for each rank by itself
        errors = run_threads(
            lambda r: world.groups[r].all_gather_heads(
                torch.zeros(2, 4 if r == 0 else 3, 8).half(), heads=totals[r]
            ),
            3,
        )
        assert MismatchError in [type(error) for error in errors]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 16),
    st.integers(0, 300),
    st.integers(1, 40),
    st.sampled_from(["push", "pull", "tagged", "auto"]),
    st.integers(2, 64),
)
def test_plans_of_all_ranks_are_alike(world, more, rows, protocol, lines):
    """Whatever a rank's share: as many launches, bytes, blocks, and the same signature."""
    total = world + more
    whole = torch.zeros(rows, total, dtype=torch.bfloat16)
    plugin, seen = AllGather(1, (total,)), []
    for rank, shard in enumerate(whole.tensor_split(world, 1)):
        info = PlanInfo(rank, world, protocol, 128 * lines, 64, 8)
        plan, pieces = plan_call(plugin, info, [meta_of(shard.contiguous())])
        plans = [piece.plan for piece in pieces] or [plan]
        seen.append([(one.signature, one.grid, one.staged_nbytes) for one in plans])
        assert all(one.kernel in plugin.variants() for one in plans)
        assert plan.shards[rank] == (tuple(shard.shape),)
        assert sum(Shares(total, 2, world).columns_of(r) for r in range(world)) == total
    assert seen.count(seen[0]) == world


def test_even_worlds_keep_their_kernels():
    """No variant for uneven shards is asked for, and none prepared."""
    plugin = find(KIMI)
    for world in (1, 2, 4, 7, 8, 14, 16):
        assert not any(UNEVEN in key.variant for key in plugin.needed(world))
    for world in (3, 5, 6, 9, 10, 11, 12, 13, 15):
        assert all(UNEVEN in key.variant for key in plugin.needed(world))
    _, _, downs, routers = kimi_rows(2, 8)
    metas = [meta_of(one.contiguous()) for one in (downs[0], routers[0], BIAS)]
    plan = plugin.plan(PlanInfo(0, 8, "auto", 1 << 19, 64, 16), *metas)
    assert UNEVEN not in plan.kernel.variant
    assert plan.shards == ()

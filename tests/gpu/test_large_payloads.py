"""Calls larger than a slot on one GPU: exact, eager and captured, and told apart at once."""

from __future__ import annotations

import time

import harness
import pytest
import torch
from collective_cases import Case, argmax, gather, lse, norm, reduce, wrong

from pcie_comm import Config, MismatchError, local_world
from pcie_comm.kernels.registry import find

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MEMORIES = {"VRAM": "cuda_local", "pinned host": "host_pinned"}
PROTOCOLS = ("push", "pull", "tagged", "auto")
CASES = (
    gather(1),
    gather(3),
    reduce("all_reduce", torch.bfloat16, 24),
    reduce("all_reduce", torch.float32, 30_000),
    reduce("all_reduce", torch.bfloat16, 2048),
    reduce("reduce_scatter", torch.float16, 24_000),
    lse(torch.bfloat16, 64),
    norm(torch.bfloat16, 512),
    argmax(torch.float32, 320),
)
ROWS = 1500


def open_world(size: int, memory: str = "VRAM", **settings):
    config = Config(**{"timeout_s": 10.0, "slot_nbytes": 1 << 18, **settings})
    return local_world(size, harness.DEVICE, MEMORIES[memory], config)


def rows_of(case: Case) -> int:
    return 40 if any(word in case.name for word in ("30000", "24000")) else ROWS


def as_tuple(results) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_collective_is_right(protocol, memory, figures):
    started = time.monotonic()
    generator = torch.Generator(device="cuda").manual_seed(1)
    with open_world(3, memory, protocol=protocol) as world:
        for case in CASES:
            for group in world.groups:
                group.prepare(case.plugin, rows=ROWS)
            inputs = case.make(3, rows_of(case), generator)
            got = world.run(lambda g, c=case, i=inputs: as_tuple(g.run(c.plugin, *i[g.rank])))
            assert wrong(case, inputs, got) == []
            outputs = [tuple(torch.empty_like(one) for one in each) for each in got]
            harness.replay_twice(
                world, lambda g, o, c=case, i=inputs: g.run(c.plugin, *i[g.rank], out=o), outputs
            )
            assert wrong(case, inputs, outputs) == []
    figures(protocol=protocol, memory=memory, seconds=round(time.monotonic() - started, 2))


@pytest.mark.parametrize("size", [2, 8])
def test_kimi_is_stand_alone_with_many_rows(size):
    from pcie_comm import kimi_topk16

    rows = 2000
    down = torch.randn(rows, 3584, device="cuda").bfloat16()
    logits, bias = torch.randn(rows, 896, device="cuda"), torch.randn(896, device="cuda")
    weights, ids = kimi_topk16(logits, bias)
    torch.cuda.synchronize()
    with open_world(size, slot_nbytes=4 << 20) as world:
        for group in world.groups:
            group.prepare("all_gather_pair_kimi_topk", rows=rows)

        def call(group, out=None):
            shards = (one.chunk(size, 1)[group.rank] for one in (down, logits))
            return group.all_gather_pair_kimi_topk(*shards, bias, out=out)

        results = world.run(call)
        assert all(all(map(torch.equal, one, (down, weights, ids))) for one in results)
        harness.replay_twice(world, call, results)
        assert all(all(map(torch.equal, one, (down, weights, ids))) for one in results)


def test_64_mib_of_every_rank_arrive():
    """As one row, as rows of a model, and with the default slots."""
    for shape in ((1, 32 << 20), (8192, 4096)):
        shards = [
            torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda")
            for _ in range(4)
        ]
        torch.cuda.synchronize()
        with open_world(4, slot_nbytes=4 << 20) as world:
            for group in world.groups:
                group.prepare("all_gather", rows=shape[0])
            for gathered in world.run(lambda g, s=shards: g.run("all_gather", s[g.rank])):
                assert torch.equal(gathered, torch.cat(shards, 1))


def test_ranks_that_disagree_about_rows_are_told_at_once():
    for rows in ((4000, 8000), (1, 8000)):
        with open_world(2) as world:
            for group in world.groups:
                group.prepare("all_reduce")
            inputs = [torch.ones(count, 64, device="cuda") for count in rows]
            torch.cuda.synchronize()
            started = time.monotonic()
            with pytest.raises(MismatchError, match="all_reduce"):
                world.run(lambda g, i=inputs: g.run("all_reduce", i[g.rank]))
            assert time.monotonic() - started < 5


def test_small_calls_go_on_between_large_ones():
    """Epochs agree, whatever number of launches a call takes."""
    generator = torch.Generator(device="cuda").manual_seed(2)
    small, large = gather(1), reduce("all_reduce", torch.float32, 64)
    with open_world(4) as world:
        for case in (small, large):
            for group in world.groups:
                group.prepare(case.plugin)
        for turn in range(10):
            for case, rows in ((small, 1), (large, 700 + 100 * turn), (small, 3)):
                inputs = case.make(4, rows, generator)
                got = world.run(lambda g, c=case, i=inputs: as_tuple(g.run(c.plugin, *i[g.rank])))
                assert wrong(case, inputs, got) == []


def test_the_channel_says_what_it_chose():
    with open_world(2, slot_nbytes=1 << 16) as world:
        local = torch.ones(2000, 64, device="cuda")
        world.run(lambda group: group.run("all_gather", local))
        told = world.groups[0].describe()["channel default"]["calls"][find("all_gather").name]
        assert any(reason.startswith("push: ") for reason in told)

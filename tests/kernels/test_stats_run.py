"""Kernels that count, run as PTX on the CPU: every launch and wait, and whom it was for."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

import torch
from ptx_world import World

from pcie_comm.kernels import waits
from pcie_comm.kernels.registry import find

pytestmark = pytest.mark.timeout(300)

PROTOCOLS = ("push", "pull", "tagged")
SIZE = 3
NAME = "all_gather_pair"


def counting(world: World) -> World:
    world.stats = True
    return world


def inputs_of(size: int = SIZE, rows: int = 2) -> list[list[torch.Tensor]]:
    return [[torch.randn(rows, 8).half(), torch.randn(rows, 4).half()] for _ in range(size)]


def same(results, inputs) -> bool:
    want = find(NAME).reference(inputs)
    return all(torch.equal(a, b) for got in results for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("hosted", [False, True])
def test_launches_waits_and_bytes_are_counted(protocol, hosted):
    world = counting(World(SIZE, protocol, order=5, hosted=hosted))
    for rows in (1, 1, 5):
        inputs = inputs_of(rows=rows)
        assert same(world.call(find(NAME), inputs), inputs)
    units = {"push": 1, "pull": 1, "tagged": 2}[protocol]
    staged = sum(64 + 64 if rows < 5 else 128 + 64 for rows in (1, 1, 5))
    for rank in range(SIZE):
        stats = world.read_stats(rank)
        assert stats.ops == 3
        assert stats.sent_nbytes == staged * units * (SIZE - 1)
        assert [one.peer for one in stats.peers] == [r for r in range(SIZE) if r != rank]
        for one in stats.peers:
            assert one.waits.count == 3
            assert one.waits.longest_ns <= one.waits.total_ns <= 3 * one.waits.longest_ns
            assert sum(one.waits.histogram) == 3
        assert stats.waits.count == 3 * (SIZE - 1)


def test_the_fused_kernel_counts():
    world = counting(World(2, "tagged"))
    bias = torch.randn(896)
    down, logits = torch.randn(1, 3584).bfloat16(), torch.randn(1, 896)
    shards = zip(down.chunk(2, 1), logits.chunk(2, 1), strict=True)
    inputs = [[a.contiguous(), b.contiguous(), bias] for a, b in shards]
    for got in world.call(find("all_gather_pair_kimi_topk"), inputs):
        assert torch.equal(got[0], down)
    assert [world.read_stats(rank).ops for rank in range(2)] == [1, 1]
    assert world.read_stats(0).peers[0].waits.count == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_late_rank_is_the_slowest(protocol):
    """Rank 2 starts when the others have polled for long: the clock goes on with each look."""
    world = counting(World(SIZE, protocol))
    inputs = inputs_of()
    world.machine.run = lambda launches, threads: run_late(world, launches, threads)
    world.call(find(NAME), inputs)
    stats = world.read_stats(0)
    assert stats.slowest_peer == 2
    assert stats.peers[1].waits.longest_ns > 10 * stats.peers[0].waits.longest_ns


def run_late(world, launches, threads):
    """Run launches, the last one's threads held back for many turns of the others."""
    machine = world.machine
    advance, turns = machine._advance, [0]

    def held(thread):
        if thread.block.launch is launches[-1] and thread.at == 0 and turns[0] < 30_000:
            turns[0] += 1
            machine.time += 100
            thread.wait = ("poll",)
            return True
        return advance(thread)

    machine._advance = held
    try:
        type(machine).run(machine, launches, threads)
    finally:
        del machine._advance


def test_ranks_with_and_without_counters_match():
    world = counting(World(2, "push"))
    world.call(find(NAME), inputs_of(2))
    world.stats = False
    inputs = inputs_of(2)
    assert same(world.call(find(NAME), inputs), inputs)
    assert world.read_stats(0).ops == 1, "the second one was not counted"


def test_control_a_count_that_is_left_out_is_missed(monkeypatch):
    """What the tests above would see of a kernel that forgets a counter."""
    from ptx_world import program_of

    reduce = waits.prim.reduce_u64

    def forgetful(how, address, value, **at):
        if how == "max":
            reduce(how, address, value, **at)

    program_of.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(waits.prim, "reduce_u64", forgetful)
        world = counting(World(2, "push"))
        world.call(find(NAME), inputs_of(2))
    program_of.cache_clear()
    assert world.read_stats(0).ops == 0

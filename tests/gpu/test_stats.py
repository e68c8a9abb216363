"""Counters of kernels: eager calls and replays exactly, the late rank by name, read at any time.

Kernels come with `pcie-comm compile --stats`, or from the compiler.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import harness
import pytest
import torch
from lifetimes import HEADS, PAIR, SMALL, capture_all, enqueue, prepare

from pcie_comm import PeerTimeoutError, cuda_engine, local_world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

COUNTING = replace(SMALL, stats=True)
PROTOCOLS = ("tagged", "push", "pull")
MOST_READ_S = 0.5


def numbers(world) -> list[int]:
    return [group.stats()["default"].ops for group in world.groups]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_and_replays_are_counted_exactly(protocol, figures):
    with local_world(4, harness.DEVICE, config=replace(COUNTING, protocol=protocol)) as world:
        prepare(world)
        batches = [harness.make_batch(op, 10, 4, rows) for op, rows in ((PAIR, 2), (HEADS, 5))]
        for batch in batches:
            harness.run_eager(world, batch)
            assert batch.mismatches() == 0
        assert numbers(world) == [20] * 4
        captured = [harness.make_batch(PAIR, 1, 4, 1) for _ in range(3)]
        graphs = capture_all(captured, world)
        assert numbers(world) == [20] * 4, "recording is no operation"
        for _ in range(7):
            for graph, stream in zip(graphs, world.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        harness.settle(world)
        assert [batch.mismatches() for batch in captured] == [0] * 3
        for group in world.groups:
            stats = group.stats()["default"]
            assert stats.ops == 20 + 7 * 3
            assert stats.sent_nbytes > 0
            assert [one.waits.count for one in stats.peers] == [stats.ops] * 3
            assert all(one.waits.longest_ns <= one.waits.total_ns for one in stats.peers)
            assert all(sum(one.waits.histogram) == stats.ops for one in stats.peers)
        figures(protocol=protocol, histogram=world.groups[0].stats()["default"].waits.histogram)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_late_rank_is_the_slowest_peer(protocol):
    with local_world(3, harness.DEVICE, config=replace(COUNTING, protocol=protocol)) as world:
        prepare(world)
        batch = harness.make_batch(PAIR, 1, 3, 1)
        torch.cuda.synchronize()
        for rank in (0, 2):
            with torch.cuda.stream(world.streams[rank]):
                enqueue(batch, world.groups[rank], rank)
        time.sleep(0.05)
        with torch.cuda.stream(world.streams[1]):
            enqueue(batch, world.groups[1], 1)
        harness.settle(world)
        for rank in (0, 2):
            stats = world.groups[rank].stats()["default"]
            waited = {one.peer: one.waits.longest_ns for one in stats.peers}
            assert stats.slowest_peer == 1
            assert 0.03e9 < waited[1] < 4e9
            assert waited[2 - rank] < 0.03e9
        waits = world.groups[1].stats()["default"].waits
        assert waits.longest_ns < 0.03e9, "the others were there"


def test_a_reading_does_not_wait_for_a_kernel_that_spins():
    """Rank 1 does not come for now; what came before is counted, and a reading takes no time."""
    with local_world(2, harness.DEVICE, config=COUNTING) as world:
        prepare(world)
        batch = harness.make_batch(PAIR, 4, 2, 1)
        harness.run_eager(world, batch)
        with torch.cuda.stream(world.streams[0]):
            enqueue(batch, world.groups[0], 0)
        time.sleep(0.02)
        started = time.monotonic()
        found = numbers(world)
        elapsed_s = time.monotonic() - started
        waiting = not world.streams[0].query()
        with torch.cuda.stream(world.streams[1]):
            enqueue(batch, world.groups[1], 1)
        harness.settle(world)
        assert waiting, "the kernel was to spin while its counters were read"
        assert found == [4, 4]
        assert elapsed_s < MOST_READ_S
        assert numbers(world) == [5, 5]


def test_a_reading_does_not_spoil_a_capture():
    with local_world(1, harness.DEVICE, config=COUNTING) as world:
        prepare(world)
        batch = harness.make_batch(PAIR, 1, 1, 1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=world.streams[0]):  # in the default, strictest mode
            enqueue(batch, world.groups[0], 0)
            assert numbers(world) == [0]
        with torch.cuda.stream(world.streams[0]):
            graph.replay()
        harness.settle(world)
        assert numbers(world) == [1]


def test_a_broken_channel_names_whom_it_waited_for():
    config = replace(COUNTING, timeout_s=0.2)
    with local_world(2, harness.DEVICE, config=config) as world:
        prepare(world)
        batch = harness.make_batch(PAIR, 1, 2, 1)
        torch.cuda.synchronize()
        for _ in range(2):  # the second one returns at once, and is no operation
            with torch.cuda.stream(world.streams[0]):
                enqueue(batch, world.groups[0], 0)
        torch.cuda.synchronize()
        with pytest.raises(PeerTimeoutError):
            world.groups[0].check()
        stats = world.groups[0].stats()["default"]
        assert (stats.ops, stats.slowest_peer) == (1, 1)
        assert stats.waits.longest_ns > 0.15e9


def test_a_rank_that_counts_matches_one_that_does_not(monkeypatch):
    """Kernels differ, what they exchange does not."""
    opened, numbers_of_engines = cuda_engine.DeviceCounters, itertools.count()

    def for_the_first(device, address):
        return None if next(numbers_of_engines) else opened(device, address)

    monkeypatch.setattr(cuda_engine, "DeviceCounters", for_the_first)
    with local_world(2, harness.DEVICE, config=COUNTING) as world:
        counting = [g for g in world.groups if g.channel("default").engine.counters is not None]
        assert len(counting) == 1
        prepare(world)
        batch = harness.make_batch(PAIR, 20, 2, 3)
        harness.run_eager(world, batch)
        assert batch.mismatches() == 0
        assert counting[0].stats()["default"].ops == 20

"""B07: one channel on two streams, in two threads, in two graphs; put in order, or told."""

from __future__ import annotations

import time

import harness
import pytest
import torch
from launcher import run_threads, succeeded
from lifetimes import (
    HEADS,
    PAIR,
    SMALL,
    assert_eager,
    capture,
    capturing,
    enqueue,
    epoch_of,
    new_streams,
    prepare,
)

from pcie_comm import BrokenError, BusyError, Config, PeerTimeoutError, local_world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]


@pytest.fixture(autouse=True)
def _default_stream():
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())


def test_b07_calls_on_two_streams_are_put_in_order():
    """Two operations of one group, each on a stream of its own, and nothing between them."""
    with local_world(2, harness.DEVICE, config=SMALL) as world:
        prepare(world)
        batches = [harness.make_batch(op, 100, 2, rows) for op, rows in ((PAIR, 2), (HEADS, 9))]
        aside = new_streams(2, world.streams)
        torch.cuda.synchronize()
        for index in range(100):
            for rank, group in enumerate(world.groups):
                for batch, streams in zip(batches, (world.streams, aside), strict=True):
                    with torch.cuda.stream(streams[rank]):
                        enqueue(batch, group, rank, index)
        harness.settle(world)
        assert [batch.mismatches() for batch in batches] == [0, 0]


def test_b07_two_groups_are_independent_of_each_other():
    """Rank 0 calls A, B, rank 1 calls B, A; every rank has a stream for each group."""
    with (
        local_world(2, harness.DEVICE, config=SMALL) as one,
        local_world(2, harness.DEVICE, config=SMALL) as two,
    ):
        prepare(one)
        prepare(two)
        batches = [harness.make_batch(PAIR, 50, 2, 2) for _ in range(2)]
        aside = new_streams(2, one.streams)
        torch.cuda.synchronize()
        for index in range(50):
            for rank in range(2):
                sides = [(one, one.streams, batches[0]), (two, aside, batches[1])]
                for world, streams, batch in sides if rank == 0 else sides[::-1]:
                    with torch.cuda.stream(streams[rank]):
                        enqueue(batch, world.groups[rank], rank, index)
        harness.settle(one)
        harness.settle(two)
        assert [batch.mismatches() for batch in batches] == [0, 0]


def test_b07_two_threads_of_a_rank_take_turns():
    """Each thread has a stream of its own; whose call comes first does not matter here."""
    with local_world(2, harness.DEVICE, config=SMALL) as world:
        prepare(world)
        batch = harness.make_batch(PAIR, 2, 2, 3)
        batch.flat_inputs[1] = batch.flat_inputs[0]
        batch.expected = [torch.stack([one[0], one[0]]) for one in batch.expected]
        streams = new_streams(4, [])
        torch.cuda.synchronize()

        def call(number: int) -> None:
            rank, which = divmod(number, 2)
            with torch.cuda.stream(streams[number]):
                for _ in range(300):
                    enqueue(batch, world.groups[rank], rank, which)

        succeeded(run_threads(call, 4, timeout_s=30))
        harness.settle(world)
        assert batch.mismatches() == 0
        assert {epoch_of(group.channel("default")) for group in world.groups} == {600}


def enqueue_two_at_once(kind: str, world, batches, streams) -> list[torch.cuda.CUDAGraph]:
    """Let rank 0 make two calls on two streams that do not wait for each other."""
    group = world.groups[0]
    if kind == "branches":
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, streams[0]):
            streams[1].wait_stream(streams[0])
            enqueue(batches[0], group, 0)
            with torch.cuda.stream(streams[1]):
                enqueue(batches[1], group, 0)
            streams[0].wait_stream(streams[1])
        graphs = [graph]
    else:
        graphs = [capture([one], group, 0, s) for one, s in zip(batches, streams, strict=True)]
    for place, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            if place == 1 and kind == "call":
                enqueue(batches[1], group, 0)
            elif place < len(graphs):
                graphs[place].replay()
    return graphs


KINDS = [(kind, "tagged") for kind in ("replays", "call", "branches")]
KINDS += [("replays", protocol) for protocol in ("push", "pull")]


@pytest.mark.parametrize(("kind", "protocol"), KINDS)
def test_b07_launches_that_overlap_are_told_and_do_not_hang(kind, protocol):
    """Both wait for rank 1, so both run: with one epoch, and one slot. Rank 1 does all rightly."""
    config = Config(timeout_s=0.5, slot_nbytes=1 << 18, protocol=protocol)
    with local_world(2, harness.DEVICE, config=config) as world:
        prepare(world)
        batches = [harness.make_batch(PAIR, 1, 2, 2) for _ in range(2)]
        right = capture(batches, world.groups[1], 1, world.streams[1])
        streams = new_streams(2, world.streams)
        torch.cuda.synchronize()
        started = time.monotonic()
        graphs = enqueue_two_at_once(kind, world, batches, streams)
        time.sleep(0.05)
        with torch.cuda.stream(world.streams[1]):
            right.replay()
        torch.cuda.synchronize()
        assert time.monotonic() - started < 3.0
        with pytest.raises(BusyError, match="at the same time") as caught:
            world.groups[0].check()
        assert (caught.value.op, caught.value.epoch) == (PAIR, 1)
        with pytest.raises(PeerTimeoutError) as late:
            world.groups[1].check()
        assert (late.value.peer, late.value.wanted) == (0, 2)
        with pytest.raises(BrokenError), torch.cuda.stream(streams[0]):
            enqueue(batches[0], world.groups[0], 0)
        del graphs
    with local_world(2, harness.DEVICE, config=config) as anew:
        prepare(anew)
        assert_eager(anew.groups, anew.streams, harness.make_batch(PAIR, 5, 2, 2))

"""Graphs that outlive what they were captured from, move, nest, fail half-way, or are many.

What may leave torch or the context unusable runs in a process of its own, alone.py.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import harness
import pytest
import torch
from lifetimes import (
    HEADS,
    PAIR,
    SMALL,
    assert_eager,
    assert_replays,
    capture,
    capture_all,
    capturing,
    enqueue,
    epoch_of,
    new_streams,
    prepare,
)

from pcie_comm import BusyError, ClosedError, CommWarning, Config, closing, local_world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]

TRANSPORTS = ["cuda_local", "host_pinned"]
PAUSE = 20_000_000
"""Cycles; 10 ms or so."""


@pytest.fixture(autouse=True)
def _default_stream():
    """Load the pause's kernel before any rank waits; leave torch on its default stream."""
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_b18_graphs_replay_during_and_after_close(transport):
    """What a graph addresses is kept; only calls are refused."""
    kept = len(closing._kept)
    with local_world(2, harness.DEVICE, transport, SMALL) as world:
        prepare(world)
        batch = harness.make_batch(PAIR, 1, 2, 4)
        graphs = capture_all([batch], world)
        assert_replays(graphs, world.streams, [batch])
        batch.refresh()
        torch.cuda.synchronize()
        for rank, (graph, stream) in enumerate(zip(graphs, world.streams, strict=True)):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1 + rank * PAUSE)
                graph.replay()
        world.close()
        torch.cuda.synchronize()
        assert batch.mismatches() == 0
        assert len(closing._kept) == kept + 2
        with pytest.raises(ClosedError):
            enqueue(batch, world.groups[0], 0)
        assert_replays(graphs, world.streams, [batch])
    del graphs
    torch.cuda.synchronize()


def forget(holders: list) -> None:
    holders.clear()
    gc.collect()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_b18_graphs_outlive_groups_that_were_collected(transport):
    batch = harness.make_batch(PAIR, 1, 2, 4)
    opening = local_world(2, harness.DEVICE, transport, SMALL)
    world = opening.__enter__()
    prepare(world)
    graphs, streams = capture_all([batch], world), world.streams
    assert_replays(graphs, streams, [batch])
    groups = [weakref.ref(group) for group in world.groups]
    holders = [world, opening]
    del world, opening
    with pytest.warns(CommWarning, match="was never closed"):
        forget(holders)
    assert [group() for group in groups] == [None, None]
    assert_replays(graphs, streams, [batch])


def test_b18_a_graph_replays_on_any_stream():
    """Captured on one stream, replayed on three in turn, ordered by events; rank 0 on torch's
    default stream as well."""
    with local_world(2, harness.DEVICE, config=SMALL) as world:
        prepare(world)
        batch = harness.make_batch(HEADS, 30, 2, 3)
        replayed = harness.Replayed(world, [batch])
        batch.refresh()
        torch.cuda.synchronize()
        others = new_streams(3, world.streams)
        places = [
            [world.streams[0], others[0], torch.cuda.default_stream()],
            [others[1], world.streams[1], others[2]],
        ]
        for index in range(batch.rounds):
            for rank, (graph, fresh, result, _) in enumerate(replayed.graphs):
                stream = places[rank][index % 3]
                stream.wait_stream(places[rank][(index - 1) % 3])
                with torch.cuda.stream(stream):
                    fresh.copy_(replayed.inputs[index, rank])
                    graph.replay()
                    replayed.outputs[index, rank].copy_(result)
        harness.settle(world)
        assert batch.mismatches() == 0


def test_calls_on_a_stream_that_was_forked_inside_the_capture():
    with local_world(2, harness.DEVICE, config=SMALL) as world:
        prepare(world)
        batches = [harness.make_batch(op, 1, 2, rows) for op, rows in ((PAIR, 1), (HEADS, 3))]
        inner = new_streams(2, world.streams)
        graphs = []
        for rank, (group, stream) in enumerate(zip(world.groups, world.streams, strict=True)):
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, stream):
                enqueue(batches[0], group, rank)
                inner[rank].wait_stream(stream)
                with torch.cuda.stream(inner[rank]):
                    enqueue(batches[1], group, rank)
                stream.wait_stream(inner[rank])
            graphs.append(graph)
        assert_replays(graphs, world.streams, batches)


def test_b30_streams_of_captures_lead_to_no_channel():
    """Two scopes with a lane and an inner stream each; later the streams' handles come again."""
    with local_world(2, harness.DEVICE, config=SMALL) as world:
        names = ("target", "draft")
        lanes = world.run(lambda group: [group.channel(name) for name in names])
        prepare(world)
        batches = [harness.make_batch(PAIR, 1, 2, rows) for rows in (1, 5)]
        inner = new_streams(4, world.streams)
        graphs = []
        for scope, batch in enumerate(batches):
            for rank, stream in enumerate(world.streams):
                graph, own = torch.cuda.CUDAGraph(), inner[2 * scope + rank]
                with capturing(graph, stream):
                    own.wait_stream(stream)
                    with torch.cuda.stream(own):
                        enqueue(batch, lanes[rank][scope], rank)
                    stream.wait_stream(own)
                graphs.append(graph)
        assert_replays(graphs[:2], world.streams, batches[:1], times=2)
        assert_replays(graphs[2:], world.streams, batches[1:], times=3)
        again = [torch.cuda.Stream() for _ in range(64)]
        wanted = [stream.cuda_stream for stream in inner[:2]]
        recycled = [next(s for s in again if s.cuda_stream == handle) for handle in wanted]
        assert_eager(world.groups, recycled, harness.make_batch(PAIR, 5, 2, 2))
        for group, (target, draft) in zip(world.groups, lanes, strict=True):
            assert [epoch_of(c) for c in (target, draft, group.channel("default"))] == [2, 3, 5]


def test_an_eager_call_does_not_slip_into_a_capture():
    """It would have to wait for its predecessor's stream, which is being captured."""
    with local_world(1, harness.DEVICE, config=SMALL) as world:
        prepare(world)
        group, stream = world.groups[0], world.streams[0]
        batch, other = (harness.make_batch(PAIR, 1, 1, 2) for _ in range(2))
        assert_eager(world.groups, world.streams, batch)
        (aside,) = new_streams(1, world.streams)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream):
            enqueue(batch, group, 0)
            with torch.cuda.stream(aside), pytest.raises(BusyError, match="captured"):
                enqueue(other, group, 0)
        assert_replays([graph], [stream], [batch])
        assert_eager(world.groups, [aside], other)


def test_a_capture_that_an_exception_ends_costs_nothing():
    """Rank 0's is abandoned after a call, rank 1's is not. All go on, and capture anew."""
    with local_world(2, harness.DEVICE, config=SMALL) as world:
        prepare(world)
        group, stream = world.groups[0], world.streams[0]
        batches = [harness.make_batch(op, 1, 2, rows) for op, rows in ((PAIR, 2), (HEADS, 1))]
        graph = torch.cuda.CUDAGraph()

        def give_up_half_way() -> None:
            with capturing(graph, stream):
                enqueue(batches[0], group, 0)
                raise LookupError("half-way")

        with pytest.raises(LookupError, match="half-way"):
            give_up_half_way()
        whole = capture(batches, world.groups[1], 1, world.streams[1])
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert_eager(world.groups, world.streams, harness.make_batch(PAIR, 6, 2, 2))
        new = capture(batches, group, 0, stream)
        assert_replays([new, whole], world.streams, batches)
        graph.reset()
        assert_replays([new, whole], world.streams, batches)
        assert_eager(world.groups, world.streams, harness.make_batch(HEADS, 6, 2, 2))


def test_ranks_may_capture_in_different_orders():
    with local_world(3, harness.DEVICE, config=SMALL) as world:
        prepare(world)
        batches = [harness.make_batch(op, 1, 3, rows) for op, rows in ((PAIR, 2), (HEADS, 1))]
        graphs = {}
        for which, rank in ((1, 2), (0, 0), (0, 1), (1, 0), (0, 2), (1, 1)):
            group, stream = world.groups[rank], world.streams[rank]
            graphs[which, rank] = capture([batches[which]], group, rank, stream)
        for which in (0, 1, 1, 0):
            own = [graphs[which, rank] for rank in range(3)]
            assert_replays(own, world.streams, [batches[which]], times=1)


def test_a_replay_pairs_with_the_calls_it_holds():
    """Rank 0 replays two calls where rank 1 makes them eagerly, and the other way round."""
    with local_world(2, harness.DEVICE, config=SMALL) as world:
        prepare(world)
        batches = [harness.make_batch(op, 1, 2, rows) for op, rows in ((PAIR, 2), (HEADS, 4))]
        graphs = capture_all(batches, world)
        for turn in range(8):
            for batch in batches:
                batch.refresh()
            torch.cuda.synchronize()
            for rank, (group, stream) in enumerate(zip(world.groups, world.streams, strict=True)):
                with torch.cuda.stream(stream):
                    if (turn + rank) % 2:
                        graphs[rank].replay()
                    else:
                        for batch in batches:
                            enqueue(batch, group, rank)
            harness.settle(world)
            assert [batch.mismatches() for batch in batches] == [0, 0]
        assert {epoch_of(group.channel("default")) for group in world.groups} == {16}


def held(world) -> dict[str, int]:
    """Return what captures could leave behind, in this process and on the device."""
    channels = [group.channel("default") for group in world.groups]
    return {
        "reserved": torch.cuda.memory_reserved(),
        "free": torch.cuda.mem_get_info()[0],
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "planned": sum(len(channel._planned) for channel in channels),
        "bound": sum(len(channel._bound) for channel in channels),
        "kernels": sum(len(channel.engine._kernels) for channel in channels),
        "kept": len(closing._kept),
    }


@pytest.fixture
def quick_collections():
    """Some versions of torch collect garbage before every capture: leave it little to look at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick_collections")
def test_b19_a_hundred_captures_cost_nothing(figures):
    """Steady after the first few: device memory, mappings, and what a channel remembers.

    A slab or a block of torch's for each capture would be a hundred times what is let pass.
    """
    with local_world(2, harness.DEVICE, config=Config(timeout_s=5.0)) as world:
        prepare(world)
        batch = harness.make_batch(PAIR, 1, 2, 2)
        states = {}
        for count in range(100):
            graphs, fresh = capture_all([batch], world), []
            for rank, (group, stream) in enumerate(zip(world.groups, world.streams, strict=True)):
                inputs, _ = batch.views[0][rank]
                graph = torch.cuda.CUDAGraph()
                with capturing(graph, stream):
                    fresh.append((graph, group.all_gather_pair(*inputs)))
            assert_replays(graphs, world.streams, [batch], times=1)
            assert_replays([graph for graph, _ in fresh], world.streams, [], times=1)
            for _, outputs in fresh:
                for output, right in zip(outputs, batch.expected, strict=True):
                    assert torch.equal(output.view(torch.uint8), right[0])
            del graphs, graph, fresh, output, outputs
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            states[count] = held(world)
    first, last = states[19], states[99]
    figures(first=first, last=last)
    for exact in ("planned", "bound", "kernels", "kept"):
        assert first[exact] == last[exact], exact
    assert last["reserved"] - first["reserved"] < 16 << 20
    assert first["free"] - last["free"] < 16 << 20
    assert last["maps"] - first["maps"] < 20

"""Scenes that may leave torch or a context unusable; test_alone.py plays each in a process.

Usage: python alone.py SCENE [ARGUMENT]; the last line of its output is JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before any context exists
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import harness
import torch
from lifetimes import PAIR, assert_eager, capture, capturing, enqueue, new_streams, prepare

from pcie_comm import Config, local_world
from pcie_comm.local import LocalWorld

QUICK = Config(timeout_s=1.0, slot_nbytes=1 << 18)
alive: list = []
"""What is still there when the interpreter ends."""


def open_world(transport: str = "auto") -> LocalWorld:
    """Open a world of two that nothing closes."""
    harness.warm_up()
    torch.cuda._sleep(1)
    opening = local_world(2, harness.DEVICE, transport, QUICK)
    world = opening.__enter__()
    alive.extend([opening, world])
    prepare(world)
    return world


def make_batches(count: int) -> list[harness.Batch]:
    """Return batches of one round; torch may not allocate once a capture went wrong."""
    batches = [harness.make_batch(PAIR, 1, 2, 1 + rows) for rows in range(count)]
    for batch in batches:
        batch.mismatches()
    torch.cuda.synchronize()
    return batches


def call_eagerly(world: LocalWorld, batch: harness.Batch, streams) -> int:
    """Make a call of every rank on streams of its own; return the wrong outputs."""
    for rank, group in enumerate(world.groups):
        torch.cuda.set_stream(streams[rank])
        enqueue(batch, group, rank)
    harness.settle(world)
    return batch.mismatches()


def nested_blocks() -> dict[str, object]:
    """Begin torch.cuda.graph inside torch.cuda.graph, then go on eagerly."""
    world = open_world()
    first, second, last = make_batches(3)
    inner, *fresh = new_streams(3, world.streams)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    error = ""
    try:
        with capturing(graphs[0], world.streams[0]):
            enqueue(first, world.groups[0], 0)
            with capturing(graphs[1], inner):
                enqueue(second, world.groups[0], 0)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}".partition("\n")[0]
    alive.append(graphs)
    return {"error": error, "wrong": call_eagerly(world, last, fresh)}


@contextmanager
def capturing_at_once(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture on a stream without waiting for the device first, as torch.cuda.graph does."""
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


def nested_captures() -> dict[str, object]:
    """Capture on a second stream while the first one's capture is open; replay both."""
    world = open_world()
    first, second, third, last = make_batches(4)
    inner = new_streams(4, world.streams)
    error, wrong, graphs = "", 0, []
    try:
        for rank, group in enumerate(world.groups):
            graphs.append((torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()))
            with capturing_at_once(graphs[rank][0], world.streams[rank]):
                enqueue(first, group, rank)
                with capturing_at_once(graphs[rank][1], inner[rank]):
                    enqueue(second, group, rank)
                enqueue(third, group, rank)
        for rank, pair in enumerate(graphs):
            torch.cuda.set_stream(world.streams[rank])
            for graph in pair:
                graph.replay()
        harness.settle(world)
        wrong = sum(batch.mismatches() for batch in (first, second, third))
    except RuntimeError as caught:  # torch's
        error = f"{type(caught).__name__}: {caught}".partition("\n")[0]
    alive.append(graphs)
    return {"error": error, "wrong": wrong + call_eagerly(world, last, inner[2:])}


def ends_with_everything_alive(transport: str) -> dict[str, object]:
    """Leave groups, channels and graphs as they are, and a replay that waits for a peer."""
    world = open_world(transport)
    lanes = world.run(lambda group: group.channel("draft"))
    prepare(world)
    batches = make_batches(2)
    graphs = []
    for rank, (group, stream) in enumerate(zip(world.groups, world.streams, strict=True)):
        graphs.append(capture(batches[:1], group, rank, stream))
        graphs.append(capture(batches[1:], lanes[rank], rank, stream))
    alive.extend([lanes, batches, graphs])
    assert_eager(world.groups, world.streams, batches[0])
    for rank, stream in enumerate(world.streams):
        torch.cuda.set_stream(stream)
        for graph in graphs[2 * rank : 2 * rank + 2]:
            graph.replay()
    harness.settle(world)
    torch.cuda.set_stream(world.streams[0])
    graphs[0].replay()  # rank 1 does not
    return {"wrong": sum(batch.mismatches() for batch in batches), "pid": os.getpid()}


SCENES = {
    scene.__name__: scene for scene in (nested_blocks, nested_captures, ends_with_everything_alive)
}

if __name__ == "__main__":
    print(json.dumps(SCENES[sys.argv[1]](*sys.argv[2:])), flush=True)

"""What the tests of graph lifetimes share: captures, replays that are checked, streams, epochs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import harness
import torch

from pcie_comm import Config, driver
from pcie_comm.layout import ControlLayout
from pcie_comm.local import LocalWorld

PAIR, HEADS = "all_gather_pair", "all_gather_heads"
OPS = (PAIR, HEADS)
SMALL = Config(timeout_s=5.0, slot_nbytes=1 << 18)
"""Slabs that captured graphs address stay until the process ends."""


def prepare(world: LocalWorld) -> None:
    for group in world.groups:
        for op in OPS:
            group.prepare(op)
    torch.cuda.synchronize()


def new_streams(count: int, taken: Iterable[torch.cuda.Stream]) -> list[torch.cuda.Stream]:
    """Return streams that differ from each other and from those taken.

    torch deals 32 of them out in turn, and ranks that shared one would wait for each other.
    """
    handles = {stream.cuda_stream for stream in taken}
    found: list[torch.cuda.Stream] = []
    while len(found) < count:
        stream = torch.cuda.Stream()
        if stream.cuda_stream not in handles:
            handles.add(stream.cuda_stream)
            found.append(stream)
    return found


def enqueue(batch: harness.Batch, caller, rank: int, index: int = 0) -> None:
    """Enqueue a round of a rank on the current stream; `caller` is its group or a channel."""
    inputs, outputs = batch.views[index][rank]
    batch.enqueue(caller, inputs, outputs)


def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> torch.cuda.graph:
    """Capture on a stream. Only calls of this thread could spoil it."""
    return torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")


def capture(
    batches: Sequence[harness.Batch], caller, rank: int, stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    """Return a graph of one call of a rank for each batch."""
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, stream):
        for batch in batches:
            enqueue(batch, caller, rank)
    return graph


def capture_all(batches: Sequence[harness.Batch], world: LocalWorld) -> list[torch.cuda.CUDAGraph]:
    """Return a graph of every rank, captured on the ranks' own streams."""
    return [
        capture(batches, group, rank, world.streams[rank])
        for rank, group in enumerate(world.groups)
    ]


def assert_replays(
    graphs: Sequence[torch.cuda.CUDAGraph],
    streams: Sequence[torch.cuda.Stream],
    batches: Sequence[harness.Batch],
    times: int = 3,
) -> None:
    """Replay the ranks' graphs side by side, every time with new bytes; check every output."""
    for _ in range(times):
        for batch in batches:
            batch.refresh()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert [batch.mismatches() for batch in batches] == [0] * len(batches)


def assert_eager(
    callers: Sequence, streams: Sequence[torch.cuda.Stream], batch: harness.Batch
) -> None:
    """Make every round of a batch eagerly, without waiting between; check every output."""
    batch.refresh()
    torch.cuda.synchronize()
    for index in range(batch.rounds):
        for rank, caller in enumerate(callers):
            with torch.cuda.stream(streams[rank]):
                enqueue(batch, caller, rank, index)
    torch.cuda.synchronize()
    for caller in callers:
        caller.check()
    assert batch.mismatches() == 0


def epoch_of(channel) -> int:
    """Return the counter of a channel, out of its control block."""
    buffer = ctypes.create_string_buffer(4)
    engine = channel.engine
    with engine._cuda.current():
        source = engine._control + ControlLayout.EPOCHS
        driver.call("cuMemcpyDtoH", ctypes.addressof(buffer), source, 4)
    return int.from_bytes(buffer.raw, "little")

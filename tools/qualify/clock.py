"""Takes samples of one rank: graphs on a GPU, eager calls on a CPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from pcie_comm import PcieDcpGroup
from pcie_comm.bench.measure import Take
from pcie_comm.kernels.registry import find

PAUSE_CYCLES = 1_000_000
"""Some 500 us: longer than the host takes to enqueue a graph."""

BARRIER = "barrier"


class Clock:
    """Times contenders on this rank.

    Args:
        group: A group of its own for the barrier.
        ops: Operations of a sample.
    """

    def __init__(self, group: PcieDcpGroup, ops: int) -> None:
        self.group, self.ops = group, ops
        self.on_gpu = group.device.type == "cuda"
        self._stream: Any = torch.cuda.Stream() if self.on_gpu else None  # type: ignore[no-untyped-call]
        self._barrier, size = find(BARRIER), group.world_size
        self._word = torch.ones(1, 1, dtype=torch.int32, device=group.device)
        self._words = (torch.empty(1, size, dtype=torch.int32, device=group.device),)
        group.prepare(self._barrier)

    def run(self, work: Callable[[], object]) -> None:
        """Run something on the stream, and wait for it."""
        with torch.cuda.stream(self._stream) if self.on_gpu else contextlib.nullcontext():
            work()
        self.settle()

    def settle(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def _align(self) -> None:
        self.group.run(self._barrier, self._word, out=self._words)

    def take_of(self, enqueue: Callable[[int], object]) -> Take:
        """Return what takes a sample, in nanoseconds of an operation."""
        rank = self.group.rank

        def chain() -> None:
            for _ in range(self.ops):
                enqueue(rank)

        if not self.on_gpu:
            return lambda: self._eager_ns(chain) / self.ops
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            chain()
        return lambda: self._replay_ns(graph) / self.ops

    def _eager_ns(self, chain: Callable[[], None]) -> float:
        self._align()
        started = time.perf_counter_ns()
        chain()
        return time.perf_counter_ns() - started

    def _replay_ns(self, graph: torch.cuda.CUDAGraph) -> float:
        start, stop = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        with torch.cuda.stream(self._stream):
            self._align()
            torch.cuda._sleep(PAUSE_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e6

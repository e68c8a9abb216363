"""How time is taken: captured graphs on a GPU, wall time on a CPU; contenders take turns.

On a GPU all ranks of a contender lie in one graph: it forks into a stream per rank, runs its
operation `ops` times in each, and joins. So ranks start together, and the time of a replay over
`ops` is that of one operation. Sample i starts with contender i mod n, so that a drift of clocks or
a disturbance hits all alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..group import PcieDcpGroup
from ..local import LocalWorld

WARM_UPS = 3
"""Rounds of all contenders before the first sample."""

START_S = 30.0
"""Longest wait of ranks that are threads for one another, before a sample."""

SPIN_S = 0.3
"""Work before a measurement: an idle GPU sits at a fraction of its clocks."""

Take = Callable[[], float]
"""Runs a contender once and returns the time of one operation, in nanoseconds."""


def turn(count: int, sample: int) -> list[int]:
    """Return the order in which `count` contenders run in a sample: it starts one further on."""
    return [(sample + place) % count for place in range(count)]


def take_turns(takes: Sequence[Take], samples: int, warm_ups: int = WARM_UPS) -> list[list[float]]:
    """Return the samples of every contender, taken alternately; nanoseconds."""
    taken: list[list[float]] = [[] for _ in takes]
    for sample in range(-warm_ups, samples):
        for place in turn(len(takes), sample):
            elapsed_ns = takes[place]()
            if sample >= 0:
                taken[place].append(elapsed_ns)
    return taken


class Lanes:
    """A root stream, and a stream for each rank.

    Args:
        devices: Of the ranks. Streams come from torch's pool, 32 for each device: consecutive ones
            differ, and so the root is never a rank's stream.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.root = torch.cuda.Stream(devices[0])  # type: ignore[no-untyped-call]
        self.streams = [
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for device in devices
        ]

    def fork_join(self, body: Callable[[int], object]) -> None:
        """Let every rank's stream follow the root stream, run `body(rank)`, and rejoin it."""
        start = self.root.record_event()
        for stream in self.streams:
            stream.wait_event(start)
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                body(rank)
        for stream in self.streams:
            self.root.wait_stream(stream)

    def run(self, body: Callable[[int], object]) -> None:
        """Run `body(rank)` on every rank's stream, and wait for all of them."""
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                body(rank)
        self.synchronize()

    def capture(self, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Return a graph of what `body` enqueues on the root stream, and forks from there."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.root.device),
            torch.cuda.graph(graph, stream=self.root, capture_error_mode="thread_local"),
        ):
            body()
        return graph

    def capture_ops(self, enqueue: Callable[[int], object], ops: int) -> torch.cuda.CUDAGraph:
        """Return a graph in which every rank runs `enqueue(rank)` `ops` times."""

        def chain(rank: int) -> None:
            for _ in range(ops):
                enqueue(rank)

        return self.capture(lambda: self.fork_join(chain))

    def time_ns(self, graph: torch.cuda.CUDAGraph) -> float:
        """Replay a graph and return how long it took on the device."""
        start, stop = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        with torch.cuda.stream(self.root):
            start.record()
            graph.replay()
            stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e6

    def synchronize(self) -> None:
        """Wait for the devices of all ranks."""
        for device in {stream.device for stream in self.streams}:
            torch.cuda.synchronize(device)


def spin(device: torch.device, seconds: float = SPIN_S) -> None:
    """Keep a GPU busy, so that its clocks are up.

    With little work: matrix products draw so much power that the clocks fall again (an H200 went
    from 1.94 to 1.57 GHz).
    """
    values = torch.ones(1 << 20, device=device)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(50):
            values.mul_(1.0)
        torch.cuda.synchronize(device)


class Stage(Protocol):
    """Where contenders are timed."""

    def take_of(self, enqueue: Callable[[int], object]) -> Take:
        """Return what runs `enqueue` on every rank, and times one operation."""

    def warm_up(self, local: Callable[[int], object]) -> None:
        """Run `local` once for every rank, before anything waits for a peer."""

    def settle(self) -> None:
        """Wait until nothing runs."""

    def spin(self) -> None:
        """Bring clocks up."""


class GraphStage:
    """Ranks on GPUs: a take replays a graph of `ops` operations of each rank."""

    def __init__(self, lanes: Lanes, ops: int) -> None:
        self.lanes = lanes
        self.ops = ops

    def take_of(self, enqueue: Callable[[int], object]) -> Take:
        """See Stage."""
        graph = self.lanes.capture_ops(enqueue, self.ops)
        return lambda: self.lanes.time_ns(graph) / self.ops

    def warm_up(self, local: Callable[[int], object]) -> None:
        """See Stage."""
        self.lanes.run(local)

    def settle(self) -> None:
        """See Stage."""
        self.lanes.synchronize()

    def spin(self) -> None:
        """See Stage."""
        for device in {stream.device for stream in self.lanes.streams}:
            spin(device)


class ThreadStage:
    """Ranks that are threads on a CPU: a take is the wall time of the slowest, over `ops`."""

    def __init__(self, world: LocalWorld, ops: int) -> None:
        self.world = world
        self.ops = ops

    def take_of(self, enqueue: Callable[[int], object]) -> Take:
        """See Stage."""
        together = threading.Barrier(len(self.world.groups), timeout=START_S)

        def on_rank(group: PcieDcpGroup) -> int:
            together.wait()
            started = time.perf_counter_ns()
            for _ in range(self.ops):
                enqueue(group.rank)
            return time.perf_counter_ns() - started

        return lambda: max(self.world.run(on_rank)) / self.ops

    def warm_up(self, local: Callable[[int], object]) -> None:
        """See Stage."""
        for group in self.world.groups:
            local(group.rank)

    def settle(self) -> None:
        """Calls are synchronous."""

    def spin(self) -> None:
        """Nothing: warm-up rounds do."""

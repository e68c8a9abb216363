"""Latency of the decode operations, one process per rank, beside torch's ways to do the same.

A sample is a graph of `ops` operations of this rank (on the CPU: eager calls). Before each a
barrier lets the ranks start together, and a pause behind it gives the host time to enqueue the
graph. The time of a sample is that of the slowest rank.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pcie_comm import Config, PcieDcpGroup
from pcie_comm.bench import workload
from pcie_comm.bench.contenders import OURS, OVERLAPPING, Contender
from pcie_comm.bench.measure import Take, spin, take_turns
from pcie_comm.bench.options import FUSED, HEADS, PAIR
from pcie_comm.bench.workload import Workload, poison
from pcie_comm.kernels.registry import find

from . import rivals
from .ranks import PREPARE_S, TRANSPORTS, PROCESSES, device_of
from .rivals import SYMMETRIC, ProcessGroup, Symmetric

OPERATIONS = (FUSED, PAIR, HEADS)
SAMPLES = 11
PAUSE_CYCLES = 200_000
"""Some 100 us: longer than the host takes to enqueue a graph."""

BUFFER_NBYTES = 4 << 20
BARRIER = "barrier"


@dataclass(frozen=True)
class Timing:
    """What is timed.

    Attributes:
        device: `cuda` or `cpu`.
        rows: Of the calls.
        ops: Operations of a sample; an even number, see rivals.BUFFERS.
        shared: Ranks share a GPU.
        meeting: File through which torch's ranks meet.
        control: As in ranks.Check.
    """

    device: str
    rows: tuple[int, ...]
    ops: int
    shared: bool
    meeting: str
    control: str = ""


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


class Bench:
    """Measures the cases of one rank.

    Args:
        timing: What to measure.
        groups: Plain, and overlapping where launches can.
        left_out: Says why contenders are missing; added to here.
    """

    def __init__(
        self, timing: Timing, groups: Sequence[PcieDcpGroup], left_out: dict[str, str]
    ) -> None:
        self.timing, self.group, self.left_out = timing, groups[0], left_out
        self.clock = Clock(groups[0], timing.ops)
        self._groups = groups
        torch_group = self._opened("torch.distributed", self._process_group)
        memory = None
        if timing.device == "cpu":
            left_out[SYMMETRIC] = "it is for GPUs"
        elif torch_group is None:
            left_out[SYMMETRIC] = "it needs a group of torch.distributed"
        else:
            memory = self._opened(SYMMETRIC, self._symmetric)
        plain, overlapping = groups[1], groups[2] if len(groups) > 2 else None
        self._makers = rivals.makers(plain, overlapping, torch_group, memory)

    def _opened(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what every rank could make; None, and a reason, if one could not."""
        try:
            made, why = make(), ""
        except Exception as error:  # whatever torch raises: it is then left out
            made, why = None, f"{type(error).__name__}: {error}"
        reasons = self.group._bootstrap.all_gather(why[:500].encode(), PREPARE_S)
        for rank, reason in enumerate(reasons):
            if reason:
                self.left_out[name] = f"rank {rank}: {reason.decode()}"
                return None
        return made

    def _process_group(self) -> ProcessGroup:
        group = self.group
        why = rivals.why_no_process_group(group.device, self.timing.shared)
        if why:
            raise RuntimeError(why)
        return ProcessGroup(group.rank, group.world_size, group.device, self.timing.meeting)

    def _symmetric(self) -> Symmetric:
        group = self.group
        memory = Symmetric(group.rank, group.world_size, group.device, BUFFER_NBYTES)
        self.clock.run(lambda: memory.barrier(0))
        return memory

    def case(self, op: str, rows: int) -> dict[str, Any]:
        """Measure a case; return what this rank found."""
        group, clock = self.group, self.clock
        work = workload.make(op, rows, [group.device] * group.world_size)
        sides = [make(work) for make in self._makers]
        clock.settle()
        for side in sides:
            clock.run(lambda side=side: side.local(group.rank))  # type: ignore[misc]
        group._bootstrap.all_gather(b"prepared", PREPARE_S)
        for side in sides:
            clock.run(lambda side=side: side.enqueue(group.rank))  # type: ignore[misc]
        takes = [clock.take_of(side.enqueue) for side in sides]
        before = [self._checked(work, side, take) for side, take in zip(sides, takes, strict=True)]
        for side in sides:
            poison([side.outputs[group.rank]])
        if clock.on_gpu:
            spin(group.device)
        taken = take_turns(takes, SAMPLES)
        clock.settle()
        found = []
        for side, samples, faults in zip(sides, taken, before, strict=True):
            for one in side.groups:
                one.check()
            faults += self._faults(work, side)
            found.append({"name": side.name, "samples_ns": samples, "faults": faults})
        return {"op": op, "rows": rows, "rank": group.rank, "contenders": found}

    def _checked(self, work: Workload, side: Contender, take: Take) -> list[str]:
        poison([side.outputs[self.group.rank]])
        self.clock.settle()
        take()
        self.clock.settle()
        return self._faults(work, side)

    def _faults(self, work: Workload, side: Contender) -> list[str]:
        outputs = side.outputs[self.group.rank]
        if self.timing.control == "wrong_byte" and self.group.rank == 0 and side.name == OURS:
            outputs[0].reshape(-1).view(torch.uint8)[-1:] ^= 1
        return work.faults([outputs], side.ours)  # which are the same on every rank


def serve(rank: int, world_size: int, timing: Timing, notes: str) -> dict[str, Any]:
    """Be one rank; each case goes to a file of its own as soon as it is measured."""
    device = device_of(timing.device, rank)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    left_out: dict[str, str] = {}
    overlaps = (False, False)  # the first is for barriers
    if device.type == "cpu":
        left_out[OVERLAPPING] = "a CPU has no launches"
    elif torch.cuda.get_device_capability(device) < (9, 0):
        left_out[OVERLAPPING] = "launches overlap from compute capability 9.0 on"
    else:
        overlaps += (True,)  # type: ignore[assignment]
    with contextlib.ExitStack() as stack, open(f"{notes}.{rank}", "w") as file:
        groups = [
            stack.enter_context(
                PcieDcpGroup(
                    world_size,
                    device,
                    transport=TRANSPORTS[timing.device, PROCESSES],
                    config=Config(overlap=overlap, timeout_s=20.0),
                )
            )
            for overlap in overlaps
        ]
        bench = Bench(timing, groups, left_out)
        for op in OPERATIONS:
            for rows in timing.rows:
                print(json.dumps(bench.case(op, rows)), file=file, flush=True)
        calls: Any = groups[1].describe()["channel default"]
        del bench
    gc.collect()  # graphs go before the communicators that they use
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    return {"left_out": left_out, "protocols": calls["calls"]}


def add_up(lines: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Return the cases that all ranks have measured, with medians, ratios and samples in us."""
    by_case: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in lines:
        by_case.setdefault((line["op"], line["rows"]), []).append(line)
    found = []
    for (op, rows), parts in by_case.items():
        if len(parts) < world_size:
            continue
        sides = [_side(places) for places in zip(*(part["contenders"] for part in parts), strict=True)]
        ours = sides[0]["median_us"]
        for side in sides[1:]:
            side["ratio"] = {"of": side["name"], "to": OURS, "time": round(side["median_us"] / ours, 3)}
        found.append({"op": op, "rows": rows, "contenders": sides})
    return found


def _side(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one contender of a case over all ranks."""
    by_rank = [[round(value / 1000, 3) for value in part["samples_ns"]] for part in parts]
    slowest = [max(values) for values in zip(*by_rank, strict=True)]
    faults = [fault for part in parts for fault in part["faults"]]
    return {
        "name": parts[0]["name"],
        "median_us": round(statistics.median(slowest), 3),
        "min_us": min(slowest),
        "max_us": max(slowest),
        "correct": not faults,
        "faults": faults[:4],
        "samples_us": slowest,
        "samples_by_rank_us": by_rank,
    }

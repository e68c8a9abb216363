"""Latency of the decode operations, one process per rank, beside torch's ways to do the same.

A sample is a graph of `ops` operations of this rank (on the CPU: eager calls). Before each a
barrier lets the ranks start together, and a pause behind it gives the host time to enqueue the
graph. The time of a sample is that of the slowest rank.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pcie_comm import Config, PcieDcpGroup, UnsupportedError
from pcie_comm.bench import workload
from pcie_comm.bench.contenders import OURS, OVERLAPPING, Contender
from pcie_comm.bench.measure import Take, spin, take_turns
from pcie_comm.bench.options import FUSED, HEADS, PAIR
from pcie_comm.bench.workload import Workload, poison

from . import rivals
from .clock import Clock
from .ranks import PREPARE_S, PROCESSES, TRANSPORTS, device_of
from .rivals import SYMMETRIC, ProcessGroup, Symmetric

OPERATIONS = (FUSED, PAIR, HEADS)
SAMPLES = 11
BUFFER_NBYTES = 4 << 20


@dataclass(frozen=True)
class Timing:
    """What is timed.

    Attributes:
        device: `cuda` or `cpu`.
        rows: Of the calls.
        ops: Operations of a sample; an even number, see rivals.BUFFERS.
        shared: Ranks share a GPU.
        alone: Nothing of torch's stands beside this library.
        meeting: File through which torch's ranks meet.
        control: As in ranks.Check.
    """

    device: str
    rows: tuple[int, ...]
    ops: int
    shared: bool
    alone: bool
    meeting: str
    control: str = ""


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
        torch_group, memory = None, None
        if timing.alone:
            left_out["torch.distributed"] = "--alone"
        else:
            torch_group = self._opened("torch.distributed", self._process_group)
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
        try:
            work = workload.make(op, rows, [group.device] * group.world_size)
        except UnsupportedError as error:
            self.left_out[op] = error.reason
            return {"op": op, "rows": rows, "rank": group.rank, "contenders": []}
        sides, takes = self._ready(op, [make(work) for make in self._makers])
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

    def _ready(self, op: str, sides: Sequence[Contender]) -> tuple[list[Contender], list[Take]]:
        """Load and capture contenders; leave out those of torch's that refuse on any rank."""
        clock, rank = self.clock, self.group.rank
        clock.settle()
        for side in sides:
            clock.run(lambda side=side: side.local(rank))  # type: ignore[misc]
        self.group._bootstrap.all_gather(b"prepared", PREPARE_S)
        ready, takes = [], []
        for side in sides:

            def make(side: Contender = side) -> Take:
                clock.run(lambda: side.enqueue(rank))
                return clock.take_of(side.enqueue)

            take = make() if side.groups else self._opened(f"{side.name}, {op}", make)
            if take is not None:
                ready.append(side)
                takes.append(take)
        return ready, takes

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


def serve(rank: int, world_size: int, timing: Timing, notes: str) -> None:
    """Be one rank; each case goes to a file of its own as soon as it is measured."""
    device = device_of(timing.device, rank)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    left_out: dict[str, str] = {}
    overlaps = [False, False]  # the first is for barriers
    if device.type == "cpu":
        left_out[OVERLAPPING] = "a CPU has no launches"
    elif torch.cuda.get_device_capability(device) < (9, 0):
        left_out[OVERLAPPING] = "launches overlap from compute capability 9.0 on"
    else:
        overlaps.append(True)
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
        facts = {"left_out": left_out, "protocols": calls["calls"]}
        print(json.dumps({"facts": facts}), file=file, flush=True)
        del bench
    gc.collect()  # graphs go before the communicators that they use
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()

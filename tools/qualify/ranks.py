"""Checked calls of all operations, eager and captured: by ranks as processes, or as threads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pcie_comm import Config, PcieDcpGroup, local_world
from pcie_comm.local import LocalWorld

from . import cases
from .cases import RING, Rounds

TIMEOUT_S, PREPARE_S = 30.0, 300.0
PROTOCOLS = {"cuda": ("tagged", "push", "pull"), "cpu": ("push", "pull")}
MODES = {"cuda": ("eager", "captured"), "cpu": ("eager",)}
LEFT_OUT: dict[str, dict[str, str]] = {
    "cuda": {},
    "cpu": {"captured": "a CPU has no graphs", "tagged": "a CPU pushes instead"},
}
PROCESSES, THREADS = "processes", "threads"
TRANSPORTS = {
    ("cuda", PROCESSES): "cuda_ipc",
    ("cuda", THREADS): "cuda_local",
    ("cpu", PROCESSES): "host_shm",
    ("cpu", THREADS): "host_shm",
}

Note = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Check:
    """What is checked, by ranks of one world.

    Attributes:
        device: `cuda` or `cpu`.
        world_size: Number of ranks.
        rounds: Of each case; 0: as many as make CALLS calls in all.
        rows: Of the calls.
        control: `wrong_byte`: an output is spoilt, to see that it is found; else empty.
    """

    device: str
    world_size: int
    rounds: int
    rows: tuple[int, ...]
    control: str = ""

    def config(self, protocol: str) -> Config:
        """Return the settings of a group."""
        return Config(protocol=protocol, timeout_s=TIMEOUT_S, setup_timeout_s=60.0)

    def settled(self, calls: int) -> int:
        """Return the rounds of each case; above RING a multiple of it."""
        count = len(cases.operations(self.world_size, self.rows)) * self.world_size
        count *= len(PROTOCOLS[self.device]) * len(MODES[self.device])
        rounds = self.rounds or -(-calls // count)
        return rounds if rounds <= RING else -(-rounds // RING) * RING


def device_of(kind: str, rank: int) -> torch.device:
    """Return a rank's device: GPUs in turn."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


class Lane:
    """One rank's part in a case.

    Args:
        group: Of the rank.
        stream: It enqueues on; None on a CPU.
        rounds: Of the case.
    """

    def __init__(self, group: PcieDcpGroup, stream: Any, rounds: Rounds) -> None:
        self.group, self.stream, self.rounds = group, stream, rounds
        self._graph: Any = None

    def capture(self) -> None:
        """Capture a call with tensors of its own. Nobody else may enqueue meanwhile."""
        inputs, outputs = self.rounds.tensors(0)
        self._fresh = [one.clone() for one in inputs]
        self._result = tuple(torch.empty_like(one) for one in outputs)
        self._copy(self._fresh, inputs)
        self._copy(outputs, self._result)  # what replays need is loaded now
        torch.cuda.synchronize(self.group.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.group.device), torch.cuda.stream(self.stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            self.rounds.call(self.group, self._fresh, self._result)
            self._graph.capture_end()

    @staticmethod
    def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def play(self, count: int) -> None:
        """Make the calls of some rounds, one right behind the other, on the current stream."""
        for index in range(count):
            inputs, outputs = self.rounds.tensors(index)
            if self._graph is None:
                self.rounds.call(self.group, inputs, outputs)
            else:
                self._copy(self._fresh, inputs)
                self._graph.replay()
                self._copy(outputs, self._result)

    def settle(self) -> None:
        """Wait for the device."""
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)


class Checker:
    """Runs cases on the lanes of this process: one, or those of all ranks.

    Args:
        check: What is run.
        groups, streams: Of these lanes.
        together: Runs a function of a rank's place on all of them, and waits for it.
        note: Told of every case of every rank.
    """

    def __init__(
        self,
        check: Check,
        groups: Sequence[PcieDcpGroup],
        streams: Sequence[Any],
        together: Callable[[Callable[[int], None]], None],
        note: Note,
    ) -> None:
        self.check, self.groups, self.streams = check, groups, streams
        self._together, self._note = together, note

    def run(self, protocol: str, rounds: int) -> None:
        """Run every case under a protocol."""
        chosen = cases.operations(self.check.world_size, self.check.rows)
        for op in dict(chosen):
            for group in self.groups:
                group.prepare(op, rows=max(self.check.rows) if op != "barrier" else None)
        if len(self.groups) < self.check.world_size:
            # Nobody waits in a call while another rank still compiles.
            self.groups[0]._bootstrap.all_gather(b"prepared", PREPARE_S)
        for op, rows in chosen:
            ring = [cases.rounds_of(op, rows, min(rounds, RING), one) for one in self.groups]
            for mode in MODES[self.check.device]:
                facts = {"op": op, "rows": rows, "protocol": protocol, "mode": mode}
                self._case(facts, ring, rounds)

    def _case(self, facts: dict[str, Any], ring: Sequence[Rounds], rounds: int) -> None:
        lanes = [Lane(*parts) for parts in zip(self.groups, self.streams, ring, strict=True)]
        for lane in lanes:
            lane.rounds.refresh(0)
            lane.settle()
        digests = [lane.rounds.digest() for lane in lanes]
        if facts["mode"] == "captured":
            for lane in lanes:
                lane.capture()
        wrong = [0] * len(lanes)
        size = min(rounds, RING)
        laps = rounds // size
        for lap in range(laps):
            for lane in lanes if lap else ():
                lane.rounds.refresh(lap)
                lane.settle()
            self._together(lambda place: lanes[place].play(size))
            for place, lane in enumerate(lanes):
                self._spoil(lane)
                wrong[place] += lane.rounds.mismatches()
        for lane, mismatches, digest in zip(lanes, wrong, digests, strict=True):
            found = {"calls": laps * size, "mismatches": mismatches, "digest": digest}
            self._note({**facts, **found, "rank": lane.group.rank})

    def _spoil(self, lane: Lane) -> None:
        """Change one byte of an output, if the control asks for it."""
        if self.check.control == "wrong_byte" and lane.group.rank == 0:
            _, outputs = lane.rounds.tensors(0)
            outputs[-1].reshape(-1).view(torch.uint8)[-1:] ^= 1


def serve(rank: int, world_size: int, check: Check, calls: int, notes: str) -> dict[str, Any]:
    """Be one rank that is a process; what it finds goes line by line to a file of its own."""
    device = device_of(check.device, rank)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    cases.warm_up(device)
    rounds, transport = check.settled(calls), TRANSPORTS[check.device, PROCESSES]
    stream: Any = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    sources: set[str] = set()
    with open(f"{notes}.{rank}", "w") as file:

        def note(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=file, flush=True)

        for protocol in PROTOCOLS[check.device]:
            config = check.config(protocol)
            with PcieDcpGroup(world_size, device, transport=transport, config=config) as group:
                checker = Checker(check, [group], [stream], _alone(group, stream), note)
                checker.run(protocol, rounds)
                sources |= kernel_sources(group)
    return _facts(check, rounds, transport, sources)


def _facts(check: Check, rounds: int, transport: str, sources: set[str]) -> dict[str, Any]:
    return {
        "rounds_of_each_case": rounds,
        "transport": transport,
        "kernels_from": sorted(sources),
        "left_out": LEFT_OUT[check.device],
    }


def _alone(group: PcieDcpGroup, stream: Any) -> Callable[[Callable[[int], None]], None]:
    """Return what runs a function on the one lane of a process."""

    def together(work: Callable[[int], None]) -> None:
        if stream is None:
            work(0)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(0)
        stream.synchronize()
        group.check()

    return together


def _all_of(world: LocalWorld) -> Callable[[Callable[[int], None]], None]:
    """Return what runs a function on all ranks of a world, each in its thread."""

    def together(work: Callable[[int], None]) -> None:
        world.run(lambda group: work(group.rank))

    return together


def run_threads(check: Check, calls: int, note: Note) -> dict[str, Any]:
    """Check ranks that are threads of this process, on all GPUs in turn."""
    if check.device == "cuda":
        for index in range(torch.cuda.device_count()):
            cases.warm_up(torch.device("cuda", index))
    rounds, transport = check.settled(calls), TRANSPORTS[check.device, THREADS]
    sources: set[str] = set()
    for protocol in PROTOCOLS[check.device]:
        config = check.config(protocol)
        with local_world(check.world_size, check.device, transport, config) as world:
            streams: list[Any] = list(world.streams) or [None] * check.world_size
            together = _all_of(world)
            Checker(check, world.groups, streams, together, note).run(protocol, rounds)
            sources |= kernel_sources(world.groups[0])
    return _facts(check, rounds, transport, sources)


def kernel_sources(group: PcieDcpGroup) -> set[str]:
    """Return where kernels came from, without names of files."""
    kernels: Any = group.describe()["kernels"]
    return {str(source).partition(",")[0] for source in kernels.values()}


def read_notes(notes: str, world_size: int) -> list[dict[str, Any]]:
    """Return what ranks have written, as far as they came."""
    lines = []
    for rank in range(world_size):
        with contextlib.suppress(OSError):
            for line in Path(f"{notes}.{rank}").read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last line of a rank that was killed
                    lines.append(json.loads(line))
    return lines

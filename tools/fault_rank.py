"""One rank of tools/faults.py: plays its part in a round, then tells what it saw.

A round: build a group, make a few calls, let the fault happen, leave, and build a new group of the
ranks that remain, in the same process.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from pcie_comm import BrokenError, CommError, Config, PcieDcpGroup, closing
from pcie_comm.bootstrap import Bootstrap, open_bootstrap
from pcie_comm.watch import watchdog

WIDTHS = (24, 10)
HEAD_START_S = 0.1
"""How long the other ranks wait in their call before the fault happens."""


@dataclass(frozen=True)
class Round:
    """What happens to whom.

    Attributes:
        kind: kill, stop, exit, mismatch or abort.
        stage: setup, call, idle, replay or close.
        members: Global ranks of the group, in group-rank order.
        victims: Those of them to whom it happens.
        survivors: Global ranks of the group that comes next.
        exit_code: Of a victim that exits.
        orderly: It runs its exit handlers, as an interpreter that comes to its end does.
        step: Exchange of the set-up at which a victim falls, 1 to 5.
        ballast_nbytes: Memory that a rank touches first: it makes its end a long one.
        clock: File to which a victim writes the time of the fault.
    """

    number: int
    kind: str
    stage: str
    members: tuple[int, ...]
    victims: tuple[int, ...]
    survivors: tuple[int, ...]
    timeout_s: float
    setup_timeout_s: float
    device: str
    transport: str
    exit_code: int = 0
    orderly: bool = False
    step: int = 0
    ballast_nbytes: int = 0
    clock: str = ""


@dataclass
class Report:
    """What a rank saw.

    Attributes:
        error, peer, exit_code, text: Of the error that ended the group; `error` is empty if none.
        at_ns: When it was raised, or what led to no error returned, by the monotonic clock.
        close_s: How long `close` took.
        next_group: Empty if the next group worked, else what went wrong.
        lost: What torch said of a GPU context that is lost, or empty.
        left: How much more there is after it of mappings, kept groups, watches, threads and
            descriptors.
    """

    rank: int
    error: str = ""
    peer: int | None = None
    exit_code: int | None = None
    text: str = ""
    at_ns: int = 0
    close_s: float = 0.0
    next_group: str = ""
    lost: str = ""
    left: dict[str, int] = field(default_factory=dict)


class Player:
    """This process's part in one round."""

    def __init__(self, rank: int, plan: Round) -> None:
        self.rank = rank
        self.plan = plan
        self.is_victim = rank in plan.victims
        self.on_gpu = plan.device == "cuda"
        self.device = plan.device
        if self.on_gpu:
            self.device = f"cuda:{rank % torch.cuda.device_count()}"
            torch.cuda.set_device(self.device)
        self.config = Config(
            timeout_s=plan.timeout_s, setup_timeout_s=plan.setup_timeout_s, slot_nbytes=1 << 16
        )
        self.graph: Any = None
        self.lost = ""

    def build(self, members: tuple[int, ...], falls_at: int = 0) -> PcieDcpGroup:
        """Build a group; let it happen at exchange `falls_at` of the set-up, if not 0."""
        bootstrap = open_bootstrap(members, None, self.config)
        if falls_at:
            self._fall_at(bootstrap, falls_at)
        group = PcieDcpGroup.from_bootstrap(
            bootstrap, self.device, self.plan.transport, self.config
        )
        group.prepare("all_gather_pair")
        # Nobody waits in a call while another one still compiles.
        bootstrap.all_gather(b"prepared", self.config.setup_timeout_s)
        return group

    def _fall_at(self, bootstrap: Bootstrap, step: int) -> None:
        exchange, seen = bootstrap._exchange, iter(range(1, 100))

        def falling(payload: bytes, timeout_s: float) -> list[bytes]:
            if next(seen) == step:
                time.sleep(HEAD_START_S)
                self.fall(None)
            return exchange(payload, timeout_s)

        bootstrap._exchange = falling  # type: ignore[method-assign]

    def inputs(self, rank: int, turn: int, wider: int = 0) -> list[torch.Tensor]:
        """Return what a rank brings to a call: bytes that everybody can compute, on the CPU.

        Nothing here runs a kernel of torch's: loading one waits for kernels that wait for peers.
        """
        draw = torch.Generator().manual_seed(1000 * self.plan.number + 10 * turn + rank)
        return [
            torch.randint(0, 256, (2, 4 * (width + wider)), generator=draw, dtype=torch.uint8).view(
                torch.float32
            )
            for width in WIDTHS
        ]

    def call(self, group: PcieDcpGroup, turn: int, wider: int = 0) -> None:
        """Make a call, wait for it, and check every byte.

        Raises:
            CommError: The call failed.
        """
        first, second = (local.to(self.device) for local in self.inputs(group.rank, turn, wider))
        results = group.all_gather_pair(first, second)
        self.wait(group)
        shards = [self.inputs(rank, turn, wider) for rank in range(group.world_size)]
        for result, pieces in zip(results, zip(*shards, strict=True), strict=True):
            wanted = torch.cat(pieces, dim=1).view(torch.uint8)
            if not torch.equal(result.cpu().view(torch.uint8), wanted):
                raise AssertionError(f"rank {group.rank}: wrong bytes in call {turn}")

    def wait(self, group: PcieDcpGroup) -> None:
        """Wait for what was enqueued, and raise what it failed with."""
        self.synchronize()
        group.check()

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one; note it if the context is lost."""
        if not self.on_gpu:
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            self.lost = self.lost or str(error).partition("\n")[0]

    def capture(self, group: PcieDcpGroup) -> None:
        """Capture a call, where there are graphs. All go on together: captures take their time."""
        if not self.on_gpu:
            return
        first, second = (local.to(self.device) for local in self.inputs(group.rank, 9))
        self.inputs_of_graph = first, second
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs_of_graph = group.all_gather_pair(first, second)
        group._bootstrap.all_gather(b"captured", self.config.setup_timeout_s)

    def fall(self, group: PcieDcpGroup | None) -> None:
        """Do to this process what the round has in store for it."""
        with open(self.plan.clock, "a") as clock:
            print(time.monotonic_ns(), file=clock)
        kind = self.plan.kind
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "exit":
            if self.plan.orderly:
                atexit._run_exitfuncs()
            os._exit(self.plan.exit_code)
        if kind == "abort" and group is not None:
            group.abort()

    def last_act(self, group: PcieDcpGroup) -> None:
        """Do what ends in an error on every rank that lives."""
        stage, mismatch = self.plan.stage, self.plan.kind == "mismatch"
        if stage == "replay":
            self.capture(group)
        if self.is_victim:
            time.sleep(HEAD_START_S)
            self.fall(group)
            group.check()  # whoever aborts calls no more: that could complete the others' calls
        if stage == "idle" and not (self.is_victim and self.plan.kind == "stop"):
            deadline = time.monotonic() + 10.0
            while time.monotonic() < deadline:
                group.check()
                time.sleep(0.001)
        elif stage == "close":
            group.close()
        elif self.graph is not None:
            self.graph.replay()
            self.wait(group)
        else:
            self.call(group, 3, wider=8 if mismatch and self.is_victim else 0)

    def play(self) -> Report:
        """Play the round; return what this rank saw."""
        report, group, before = Report(self.rank), None, left_behind()
        try:
            group = self.build(self.plan.members, self.plan.step if self.is_victim else 0)
            for turn in range(3):
                self.call(group, turn)
            self.last_act(group)
        except CommError as error:
            note(report, error)
        report.at_ns = time.monotonic_ns()
        if self.graph is not None and not self.lost:  # it returns, whatever became of the peers
            self.graph.replay()
            self.synchronize()
        if group is not None:
            started = time.monotonic()
            try:
                group.close()
            except CommError as error:  # a stopped rank that goes on learns here what it missed
                note(report, error)
            report.close_s = time.monotonic() - started
        group = self.graph = None
        if self.rank in self.plan.survivors:
            report.next_group = self.next_group()
        report.lost = self.lost
        gc.collect()
        report.left = {what: count - before[what] for what, count in left_behind().items()}
        return report

    def next_group(self) -> str:
        """Build the group of the ranks that remain, and use it; return what went wrong."""
        try:
            with self.build(self.plan.survivors) as group:
                for turn in range(4, 8):
                    self.call(group, turn)
        except (CommError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
        except RuntimeError as error:  # torch's: the context is lost
            self.lost = self.lost or str(error).partition("\n")[0]
            return self.lost
        return ""


IDLE_S = 2.0
"""Longest time that a thread which nobody needs may take to end."""


def note(report: Report, error: CommError) -> None:
    """Write down an error; of a broken group, what broke it."""
    cause = error.__cause__
    if isinstance(error, BrokenError) and isinstance(cause, CommError):
        error = cause
    report.error, report.peer, report.text = type(error).__name__, error.peer, str(error)
    report.exit_code = getattr(error, "exit_code", None)


def _threads_left() -> int:
    """Return how many threads of ours there are after a moment: idle ones end by themselves."""
    deadline = time.monotonic() + IDLE_S
    while True:
        left = sum("pcie_comm" in thread.name for thread in threading.enumerate())
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def left_behind() -> dict[str, int]:
    """Return how much there is of what a closed group must not leave."""
    maps = Path("/proc/self/maps").read_text()
    return {
        "mappings": maps.count("/pcie_comm."),
        "kept": len(closing._kept),
        "watches": watchdog.watched(),
        "threads": _threads_left(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def serve(rank: int, environment: dict[str, str], pipe: Connection) -> None:
    """Play rounds until the pipe is closed."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    ballast = bytearray()
    while True:
        try:
            plan: Round = pipe.recv()
        except EOFError:
            return
        if len(ballast) < plan.ballast_nbytes:
            ballast = bytearray(b"\1") * plan.ballast_nbytes
        pipe.send(Player(rank, plan).play())

"""One rank of the demo, as a thread or as a process.

Every round has fresh rows. Ranks first draw, then call, then check, so that no other work of
theirs runs while a kernel of a peer waits for them.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..group import PcieDcpGroup
from .calls import Call, call_types

BATCH = 32
"""Rounds that are drawn at a time; each batch is headed by one more, which is not timed."""

Play = Callable[[Callable[["Player"], None]], None]


@dataclass(frozen=True)
class DemoOptions:
    """What to show.

    Attributes:
        ranks: World size, 1 to 16.
        device: `cpu`, `cuda` (the GPUs in turn), `cuda:K`, or None for what there is.
        transport: As for PcieDcpGroup.
        rows: Rows of every call.
        rounds: Timed rounds.
        processes: One process per rank instead of one thread.
        deadline_s: Longest life of rank processes, in seconds.
    """

    ranks: int = 4
    device: str | None = None
    transport: str = "auto"
    rows: int = 8
    rounds: int = 20
    processes: bool = False
    deadline_s: float = 300.0


@dataclass
class RankReport:
    """What one rank found.

    Attributes:
        call_us: Microseconds of wall time per call, the median over the rounds.
        digest: Of the weights of all rounds, which must be byte-equal on all ranks.
        faults: What was wrong.
    """

    rank: int
    device: str
    transport: str
    protocol: str
    call_us: float = 0.0
    digest: str = ""
    faults: list[str] = field(default_factory=list)


class Player:
    """One rank of the demo."""

    def __init__(self, group: PcieDcpGroup, options: DemoOptions) -> None:
        self.group = group
        self.options = options
        self._calls: list[list[Call]] = []
        self._digest = hashlib.sha256()
        self._times_us: list[float] = []
        facts = group.describe()
        lane = facts["channel default"]
        protocol = lane["protocol"] if isinstance(lane, dict) else "?"
        self.report = RankReport(
            group.rank, str(facts["device"]), str(facts["transport"]), str(protocol)
        )

    def prepare(self) -> None:
        """Load every kernel before any of them waits for a peer."""
        for kind in call_types(self.group.world_size):
            self.group.prepare(kind.method, rows=self.options.rows)

    def draw(self, rounds: Sequence[int]) -> None:
        """Make the inputs of some rounds, the same on every rank, and poisoned outputs."""
        group, rows = self.group, self.options.rows
        self._calls = [
            [
                kind(group.rank, group.world_size, rows, group.device, seed=2 * number + index)
                for index, kind in enumerate(call_types(group.world_size))
            ]
            for number in rounds
        ]

    def call(self) -> None:
        """Make the calls. The first round is not timed: it waits for ranks that still draw."""
        first, *timed = self._calls
        self._round(first)
        self._finish()
        started = time.perf_counter_ns()
        for calls in timed:
            self._round(calls)
            if self.group.device.type == "cpu":
                now = time.perf_counter_ns()
                self._times_us.append((now - started) / 1e3 / len(calls))
                started = now
        self._finish()
        if self.group.device.type == "cuda":
            elapsed_us = (time.perf_counter_ns() - started) / 1e3
            self._times_us.append(elapsed_us / sum(map(len, timed)))

    def _round(self, calls: Sequence[Call]) -> None:
        for call in calls:
            out = call.outputs if len(call.outputs) > 1 else call.outputs[0]
            getattr(self.group, call.method)(*call.inputs, out=out)

    def _finish(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.current_stream(self.group.device).synchronize()
            self.group.check()

    def check(self) -> None:
        """Compare the outputs with the right ones, and forget them."""
        for call in (call for calls in self._calls for call in calls):
            self.report.faults += [f"{call.method}: {fault}" for fault in call.faults()]
            if call.digested is not None:
                self._digest.update(call.digested.cpu().numpy().tobytes())
        self._calls = []

    def finish(self) -> RankReport:
        """Return the report."""
        self.report.call_us = statistics.median(self._times_us)
        self.report.digest = self._digest.hexdigest()
        return self.report


def play(players: Sequence[Player], together: Play, rounds: int) -> list[RankReport]:
    """Play all rounds.

    Args:
        players: The ranks of this process.
        together: Calls a function of a player for all of them at once, and waits for them.
        rounds: Timed rounds.
    """
    together(Player.prepare)
    for batch in _batches(rounds):
        for player in players:
            player.draw(batch)
        together(Player.call)
        for player in players:
            player.check()
    return [player.finish() for player in players]


def _batches(rounds: int) -> Iterator[range]:
    """Split into batches of one untimed and at most BATCH timed rounds."""
    first = 0
    while rounds > 0:
        timed = min(rounds, BATCH)
        yield range(first, first + 1 + timed)
        first += 1 + timed
        rounds -= timed

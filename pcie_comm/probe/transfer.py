"""Timed transfers, alone or several at once; what they moved is compared afterwards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CommError
from ..topology.probed import HOST
from .gpu import Gpu
from .lab import Lab, count_by_owner, fill_by_owner
from .pattern import Counts
from .region import Region

MOST_REPEATS = 400


class WrongBytes(CommError):
    """A timed transfer moved wrong bytes: its figure means nothing.

    Attributes:
        ends: The GPU that moved them, and the place at the other end.
    """

    def __init__(self, message: str, ends: tuple[str, str]) -> None:
        super().__init__(message)
        self.ends = ends


@dataclass(frozen=True)
class Transfer:
    """Bytes that a GPU moves.

    Attributes:
        gpu: Whose multiprocessors or copy engine it is.
        lane: Number of its stream.
        source, target: From where to where, of the same size.
        by_copy_engine: Else by the multiprocessors.
        seed: Of the pattern.
    """

    gpu: Gpu
    lane: int
    source: Region
    target: Region
    by_copy_engine: bool
    seed: int

    @property
    def stream(self) -> Any:
        return self.gpu.lane(self.lane)

    @property
    def ends(self) -> tuple[str, str]:
        """Names of the GPU and of the place at the other end."""
        far = self.source if self.target.owner is self.gpu else self.target
        return self.gpu.name, HOST if far.owner is None else far.owner.name

    def enqueue(self) -> None:
        """Start it."""
        move = self.gpu.copy if self.by_copy_engine else self.gpu.move
        move(self.source, self.target, self.stream)


@dataclass(frozen=True)
class Rate:
    """What was timed.

    Attributes:
        each: GB/s of each transfer, by its own GPU's clock.
        together: GB/s of all, by the host's clock.
        each_us: Microseconds of one transfer of each.
    """

    each: tuple[float, ...]
    together: float
    each_us: tuple[float, ...]


def run(lab: Lab, transfers: Sequence[Transfer], budget_s: float) -> Rate:
    """Time some transfers that run at the same time; waits.

    Args:
        lab: Gives seeds.
        transfers: On streams of their own.
        budget_s: Seconds that they may take, roughly.

    Raises:
        WrongBytes: What a transfer moved does not arrive.
        CudaError: A transfer failed.
    """
    stale = lab.seed()
    for one in transfers:
        fill_by_owner(one.source, one.seed)
        fill_by_owner(one.target, stale)
    _together(transfers, 1)
    repeats = max(1, min(MOST_REPEATS, int(budget_s / _together(transfers, 1))))
    begins = [one.gpu.mark(one.stream) for one in transfers]
    started = time.perf_counter()
    for _ in range(repeats):
        for one in transfers:
            one.enqueue()
    ends = [one.gpu.mark(one.stream) for one in transfers]
    for one in transfers:
        one.gpu.synchronize(one.stream)
    elapsed_s = time.perf_counter() - started
    marks = zip(transfers, begins, ends, strict=True)
    each_us = [one.gpu.elapsed_ms(first, last) * 1e3 / repeats for one, first, last in marks]
    _compare(transfers, stale)
    total = repeats * sum(one.source.nbytes for one in transfers)
    rates = zip(transfers, each_us, strict=True)
    each = tuple(one.source.nbytes / max(us, 1e-3) / 1e3 for one, us in rates)
    return Rate(each, total / elapsed_s / 1e9, tuple(each_us))


def _together(transfers: Sequence[Transfer], repeats: int) -> float:
    """Run all, and return the seconds that it took."""
    started = time.perf_counter()
    for _ in range(repeats):
        for one in transfers:
            one.enqueue()
    for one in transfers:
        one.gpu.synchronize(one.stream)
    return time.perf_counter() - started


def _compare(transfers: Sequence[Transfer], stale: int) -> None:
    for one in transfers:
        counts: Counts = count_by_owner(one.target, one.seed, stale)
        if counts.wrong:
            raise WrongBytes(
                f"{counts.wrong} of {counts.words} words are wrong at the target, "
                f"{counts.stale} of them as they were before; do not use this way",
                one.ends,
            )

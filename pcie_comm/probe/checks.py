"""Level 3, verify: each way of moving bytes is tried, and looked at from the owner's side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..topology.probed import HOST, PINNED, VRAM, Check, worst
from .gpu import Gpu
from .judge import Verdict, of_reads, of_trial, of_writes
from .lab import Lab, Memory, count_by_owner, fill_by_owner
from .pattern import Counts
from .region import Region
from .sizes import PACK_NBYTES
from .task import Answer, Task
from .trial import Game, exchange

STORE_NBYTES = 1 << 20
LITMUS_NBYTES = 4096
LITMUS_LIMIT_S = 30.0
ALL_NBYTES = 1 << 20
RANKS_OF_ONE = 4
"""Ranks of each GPU where all write to pinned host memory, or to the one GPU that there is."""


def _judged(task: Task, started: float, *verdicts: Verdict) -> Answer:
    """Return the task's checks with their verdicts, in order."""
    elapsed_s = round(time.monotonic() - started, 3)
    checks = (blank for blank in task.blanks if isinstance(blank, Check))
    rounds = int(task.options.get("rounds", 0))
    return Answer(
        tuple(
            replace(check, verdict=verdict, detail=detail, rounds=rounds, elapsed_s=elapsed_s)
            for check, (verdict, detail) in zip(checks, verdicts, strict=True)
        )
    )


def _ends(lab: Lab, task: Task) -> tuple[Gpu, str]:
    """Return who acts, and whose memory it is."""
    check = task.blanks[0]
    assert isinstance(check, Check)
    return lab.gpu(check.source), check.target


def store(lab: Lab, task: Task) -> Answer:
    """A GPU stores to a place; the owner looks, and the GPU reads back."""
    started = time.monotonic()
    gpu, place = _ends(lab, task)
    with lab.memory() as memory:
        region = memory.of(place, STORE_NBYTES, gpu)
        stale, seed = lab.seed(), lab.seed()
        fill_by_owner(region, stale)
        gpu.fill(region, seed)
        gpu.synchronize()
        owner = count_by_owner(region, seed, stale)
        return _judged(task, started, of_writes(owner, gpu.count(region, seed, stale)))


def load(lab: Lab, task: Task) -> Answer:
    """A GPU loads what the owner has just stored, twice: a line that was kept is stale then."""
    started = time.monotonic()
    gpu, place = _ends(lab, task)
    with lab.memory() as memory:
        region = memory.of(place, STORE_NBYTES, gpu)
        own = memory.of(gpu.name, STORE_NBYTES, gpu)
        own_seed, stale, seed = lab.seed(), lab.seed(), lab.seed()
        fill_by_owner(own, own_seed)
        for before, now in ((own_seed, stale), (stale, seed)):
            fill_by_owner(region, now)
            counts = gpu.count(region, now, before)
            if counts.wrong:
                mirrored = gpu.count(region, own_seed, now)
                return _judged(task, started, of_reads(counts, mirrored))
        return _judged(task, started, of_reads(counts, None))


def copy(lab: Lab, task: Task) -> Answer:
    """Copy engines move bytes to a place; with pinned host memory also back from it."""
    started = time.monotonic()
    gpu, place = _ends(lab, task)
    nbytes = int(task.options["nbytes"])
    padded = max(nbytes, PACK_NBYTES)
    with lab.memory() as memory:
        near, far = memory.of(gpu.name, padded, gpu), memory.of(place, padded, gpu)
        ways = [(near, far)] if place != HOST else [(near, far), (far, near)]
        found = [_copied(lab, gpu, source, target, nbytes) for source, target in ways]
    verdict = worst([name for name, _ in found])
    return _judged(task, started, next(one for one in found if one[0] == verdict))


def _copied(lab: Lab, gpu: Gpu, source: Region, target: Region, nbytes: int) -> Verdict:
    """Copy `nbytes` and look; what is behind them must stay as it was."""
    stale, seed = lab.seed(), lab.seed()
    fill_by_owner(target, stale)
    fill_by_owner(source, seed)
    gpu.copy(replace(source, nbytes=nbytes), target)
    gpu.synchronize()
    counts = count_by_owner(target, seed, stale)
    kept = (target.nbytes - nbytes) // 4
    return of_writes(Counts(counts.words - kept, counts.wrong - kept, counts.stale - kept), None)


def litmus(lab: Lab, task: Task) -> Answer:
    """Payload, then flag, again and again; both sides know what must come.

    Of two checks the first is about what its source wrote or read.
    """
    started = time.monotonic()
    gpu, place = _ends(lab, task)
    other = gpu.name if place == HOST else place
    memory = PINNED if place == HOST else VRAM
    game = Game((gpu.name, other), memory, int(task.options["rounds"]), LITMUS_LIMIT_S)
    protocol = str(task.options["protocol"])
    played = exchange(lab, game, protocol, LITMUS_NBYTES)
    verdicts = [of_trial(one.wrong, one.words, one.done, game.rounds) for one in played]
    if len(task.blanks) == 1:
        verdict = worst([name for name, _ in verdicts])
        return _judged(task, started, next(one for one in verdicts if one[0] == verdict))
    # What rank 1 finds wrong, rank 0 wrote under push; under pull rank 1 itself has read it.
    order = verdicts if protocol == "pull" else verdicts[::-1]
    return _judged(task, started, *order)


@dataclass(frozen=True)
class Part:
    """One of the ways that `all_at_once` uses at the same time.

    Attributes:
        number: Of the check.
        gpu: That acts, on its stream `lane`.
        region: That it writes to and reads from, and its own memory for what it read.
        stale, seed: What lies there before, and what it writes.
    """

    number: int
    gpu: Gpu
    lane: int
    region: Region
    read: Region
    stale: int
    seed: int

    @property
    def stream(self) -> Any:
        return self.gpu.lane(self.lane)


def all_at_once(lab: Lab, task: Task) -> Answer:
    """Every source stores to every target at the same time, then all load so; owners look."""
    started = time.monotonic()
    checks = [blank for blank in task.blanks if isinstance(blank, Check)]
    with lab.memory() as memory:
        parts = _parts(lab, memory, checks)
        for part in parts:
            fill_by_owner(part.region, part.stale)
            fill_by_owner(part.read, part.stale)
        for part in parts:
            part.gpu.fill(part.region, part.seed, part.stream)
        _finish(parts)
        for part in parts:
            part.gpu.move(part.region, part.read, part.stream)
        _finish(parts)
        verdicts: list[list[Verdict]] = [[] for _ in checks]
        for part in parts:
            owner = count_by_owner(part.region, part.seed, part.stale)
            reader = part.gpu.count(part.read, part.seed, part.stale)
            found = [of_writes(owner, reader), of_reads(reader, None)]
            verdicts[part.number].append(_worst(found[:1] if owner.wrong else found))
    return _judged(task, started, *map(_worst, verdicts))


def _finish(parts: Sequence[Part]) -> None:
    for part in parts:
        part.gpu.synchronize(part.stream)


def _parts(lab: Lab, memory: Memory, checks: Sequence[Check]) -> list[Part]:
    """Return what the checks write to; several parts of one check stand for several ranks."""
    parts: list[Part] = []
    for number, check in enumerate(checks):
        gpu = lab.gpu(check.source)
        for _ in range(RANKS_OF_ONE if check.target in (HOST, check.source) else 1):
            lane = 1 + sum(part.gpu is gpu for part in parts)
            far = memory.of(check.target, ALL_NBYTES, gpu)
            near = memory.of(gpu.name, ALL_NBYTES, gpu)
            parts.append(Part(number, gpu, lane, far, near, lab.seed(), lab.seed()))
    return parts


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    name = worst([name for name, _ in verdicts])
    return next(one for one in verdicts if one[0] == name)

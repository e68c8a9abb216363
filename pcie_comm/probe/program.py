"""Levels 2 to 4 of a host, from asking CUDA to the finished record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import Config
from ..errors import UnsupportedError
from ..topology.model import Host
from ..topology.probed import (
    CORRUPT,
    HANG,
    NO_ACCESS,
    SKIPPED,
    Check,
    Exchange,
    Ladder,
    LinkLoad,
    Pattern,
)
from ..topology.record import Record
from ..topology.under_load import read_counters, with_growth
from .capability import CudaHost, with_cuda
from .matrices import assemble
from .plan import FULL, QUICK, measure, pairs_of, verify
from .runner import Runner
from .task import Answer, Figure, Task, blank_check, failed

Advance = Callable[[str, str, float], None]
"""Is told of every task: its title, what came of it, and the seconds it was planned for."""


@dataclass(frozen=True)
class Options:
    """What to do beyond asking CUDA about pairs.

    Attributes:
        verify: Level 3.
        measure: Level 4.
        quick: Shorter: fewer rounds, smaller transfers.
    """

    verify: bool = False
    measure: bool = False
    quick: bool = False


class Probe:
    """Takes a host through the levels.

    Args:
        host: From level 1.
        options: What to do.
        runner: Has tasks done.
    """

    def __init__(self, host: Host, options: Options, runner: Runner) -> None:
        self.options = options
        self._runner = runner
        self._scale = QUICK if options.quick else FULL
        self.host, runner.ordinals = with_cuda(host, _ask(runner))

    def tasks(self) -> list[Task]:
        """Return the tasks of the levels that were asked for."""
        names = self._names()
        found: list[Task] = []
        if names and self.options.verify:
            found += verify(names, self._scale)
        if names and self.options.measure:
            found += measure(self.host, names, self._scale)
        return found

    def _names(self) -> dict[str, int]:
        """Return the GPUs that CUDA shows, in CUDA's order."""
        return dict(sorted(self._runner.ordinals.items(), key=lambda item: item[1]))

    def run(self, tasks: Sequence[Task], advance: Advance) -> Host:
        """Do the tasks and return the host with what they found."""
        before = read_counters(self.host)
        records: list[Record] = []
        refused: dict[tuple[str, str], str] = {}
        for task in tasks:
            answer = self._perform(task, refused)
            records += answer.records
            records += _faults(task, answer)
            for record in answer.records:
                if isinstance(record, Check) and record.verdict in (NO_ACCESS, HANG):
                    refused[record.source, record.target] = f"{record.name}: {record.verdict}"
            advance(task.title, _told(answer.records), task.seconds)
        return self._with(records, before)

    def _perform(self, task: Task, refused: dict[tuple[str, str], str]) -> Answer:
        if not task.work:  # left out when it was planned, with the reason
            return Answer(task.blanks)
        bad = sorted(pairs_of(task) & set(refused))
        if task.group == "measure" and bad:
            reason = f"not measured: {bad[0][0]} -> {bad[0][1]}, {refused[bad[0]]}"
            return Answer(failed(task.blanks, SKIPPED, reason))
        return self._runner.perform(task)

    def _with(self, records: Sequence[Record], before: Any) -> Host:
        after = read_counters(self.host)
        loads = [with_growth(one, self.host, before, after) for one in _of(records, LinkLoad)]
        return replace(
            self.host,
            sources=(*self.host.sources, *self._sources()),
            measurements=(*self.host.measurements, *assemble(_of(records, Figure))),
            checks=tuple(_of(records, Check)),
            exchanges=tuple(_of(records, Exchange)),
            ladders=tuple(_of(records, Ladder)),
            patterns=tuple(_of(records, Pattern)),
            loads=tuple(loads),
        )

    def _sources(self) -> list[str]:
        how = "quick" if self.options.quick else "full"
        levels = [name for name in ("verify", "measure") if getattr(self.options, name)]
        return [f"{name}: {how}" for name in levels]


def _of(records: Iterable[Record], kind: type[Any]) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


def _ask(runner: Runner) -> CudaHost:
    """Have CUDA asked.

    Raises:
        UnsupportedError: It has no answer; the message says why.
    """
    blank = blank_check("", "", "ask")
    answer = runner.perform(Task("ask", {}, (blank,), group="ask", deadline_s=60.0))
    if isinstance(answer.data, CudaHost):
        return answer.data
    (found,) = answer.records
    detail = found.detail if isinstance(found, Check) else ""
    raise UnsupportedError(
        f"CUDA cannot be asked: {detail or 'no answer'}", reason=detail or "no answer"
    )


def _faults(task: Task, answer: Answer) -> list[Check]:
    """Return checks for figures whose bytes were wrong: a fault that only traffic shows."""
    if answer.wrong is None:
        return []
    source, target, words = answer.wrong
    return [Check(source, target, "data under load", CORRUPT, f"{task.title}: {words}")]


def _told(records: Sequence[Record]) -> str:
    """Return what came of a task, in a few words."""
    words = []
    for record in records:
        if isinstance(record, Check):
            words.append(f"{record.verdict} {record.detail}".strip())
        elif isinstance(record, Figure) and record.value is not None:
            words.append(f"{record.value:g}")
        elif reasons := getattr(record, "unknown", {}):
            words.append(next(iter(reasons.values())))
    return "; ".join(dict.fromkeys(words))


def probe(host: Host, options: Options, progress: Any) -> Host:
    """Return a host with what its GPUs showed; everything happens in child processes.

    Args:
        host: The running one, from level 1.
        options: What to do.
        progress: Called with the planned seconds; yields, as a context manager, an Advance.

    Raises:
        UnsupportedError: There is no CUDA, or no GPU that it shows.
        InvalidArgumentError: A variable that sets a default is wrong.
    """
    Config()
    with Runner({}) as runner:
        one = Probe(host, options, runner)
        tasks = one.tasks()
        if not tasks and (options.verify or options.measure):
            raise UnsupportedError(
                "CUDA shows no GPU; see CUDA_VISIBLE_DEVICES", reason="CUDA shows no GPU"
            )
        with progress(sum(task.seconds for task in tasks)) as advance:
            return one.run(tasks, advance) if tasks else one.host

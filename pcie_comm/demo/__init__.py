"""`pcie-comm demo`: ranks that call collectives on random rows, and check what they got."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..local import local_world
from ..rank_order import group_order
from .calls import EXPERTS, FusedCall, call_types
from .player import DemoOptions, Player, RankReport, play

__all__ = ["DemoOptions", "Outcome", "RankReport", "run"]


@dataclass(frozen=True)
class Outcome:
    """What the demo found.

    Attributes:
        reports: Of the ranks, in order.
        remark: What is not as usual; empty if nothing is.
        summary: All of it in one line.
    """

    reports: list[RankReport]
    remark: str
    summary: str

    @property
    def right(self) -> bool:
        """Whether every rank got what it should."""
        return not any(report.faults for report in self.reports)


def run(options: DemoOptions) -> Outcome:
    """Start the ranks, let them play, and judge.

    Raises:
        CommError: A rank failed; that a result is wrong is no error, but in the outcome.
    """
    group_order(options.ranks)  # refuses a bad world size before anything starts
    if options.processes:
        from .processes import run_processes

        reports = run_processes(options)
    else:
        reports = _run_threads(options)
    _compare_ranks(reports)
    kinds = call_types(options.ranks)
    remark = ""
    if FusedCall not in kinds:
        remark = (
            f"{EXPERTS} experts do not divide by {options.ranks} ranks, so this shows "
            f"the plain gathers instead of {FusedCall.method}"
        )
    faults = sum(len(report.faults) for report in reports)
    verdict = f"DIFFERENT: {faults} differences" if faults else "right: bytes, ids and weights"
    if FusedCall not in kinds and not faults:
        verdict = "right: every byte"
    what = " and ".join(kind.method for kind in kinds)
    shape = f"ranks={options.ranks}, rows={options.rows}, rounds={options.rounds}"
    where = "one process per rank" if options.processes else "ranks are threads"
    summary = f"{verdict} ({what}; {shape}; {where})"
    return Outcome(reports, remark, summary)


def _run_threads(options: DemoOptions) -> list[RankReport]:
    with local_world(options.ranks, options.device, options.transport) as world:
        players = [Player(group, options) for group in world.groups]

        def together(step: Callable[[Player], None]) -> None:
            world.run(lambda group: step(players[group.rank]))

        return play(players, together, options.rounds)


def _compare_ranks(reports: Sequence[RankReport]) -> None:
    """Add a fault to every rank whose weights are not those of rank 0, byte for byte."""
    for report in reports[1:]:
        if report.digest != reports[0].digest:
            report.faults.append("the weights are not byte-equal to those of rank 0")

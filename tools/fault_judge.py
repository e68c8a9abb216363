"""What the rounds of tools/faults.py must come to, and the table of what they came to."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fault_rank import Report, Round

ERRORS = {
    "kill": "PeerDiedError",
    "exit": "PeerDiedError",
    "stop": "PeerTimeoutError",
    "mismatch": "MismatchError",
    "abort": "PeerAbortedError",
}
AT_ONCE_S = 0.1
"""What a death or an abort may take to reach a rank."""

MARGIN_S = 0.5
"""What a timeout may take beyond its limit, on a machine with other work."""


PATIENCE_S = 5.0
"""How long `close` waits for peers that may address device memory (closing.CLOSE_TIMEOUT_S)."""


@dataclass
class Outcome:
    """A round, and what was wrong with it.

    Attributes:
        delays_s: From the fault to the error, of every rank that reports the right one; to the
            end of `close`, where that is under way.
        faults: Deviations in words; empty if the round went as it must.
        hung: Ranks that did not report in time.
        late: How many errors were right, but came after their limit.
    """

    plan: Round
    reports: list[Report] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    hung: list[int] = field(default_factory=list)
    late: int = 0


def judge(outcome: Outcome) -> None:
    """Compare what the ranks report with what must be."""
    plan = outcome.plan
    outcome.faults += [f"rank {rank} hung" for rank in outcome.hung]
    times = [int(line) for line in Path(plan.clock).read_text().split()]
    if len(times) != len(plan.victims):
        outcome.faults.append(f"faults that happened: {len(times)} of {len(plan.victims)}")
    for report in outcome.reports:
        if report.rank not in plan.victims and times:
            judge_error(outcome, report, min(times))
        if report.next_group:
            outcome.faults.append(f"rank {report.rank}, next group: {report.next_group}")
        if report.lost:
            outcome.faults.append(f"rank {report.rank} lost its context: {report.lost}")
        for what in ("mappings", "kept", "watches", "threads"):
            if report.left[what] > 0 and not (what in ("mappings", "kept") and may_keep(plan)):
                outcome.faults.append(f"rank {report.rank} leaves {report.left[what]} {what}")


def may_keep(plan: Round) -> bool:
    """Tell whether memory may outlive a round.

    Graphs address it, or a peer that is stopped, or of which nobody can tell that it is gone.
    """
    if plan.device == "cuda" and plan.stage == "replay":
        return True
    return in_device_memory(plan) and (
        plan.kind == "stop" or (plan.kind in ("kill", "exit") and not ends_are_known())
    )


def in_device_memory(plan: Round) -> bool:
    """Tell whether peers' mappings do not keep the memory of a slab."""
    return plan.device == "cuda" and plan.transport != "host_pinned"


@cache
def ends_are_known() -> bool:
    """Tell whether this kernel has pidfds: without, neither end nor exit code may be known."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def judge_error(outcome: Outcome, report: Report, fault_ns: int) -> None:
    """Check the error of a rank that is no victim."""
    plan = outcome.plan
    wanted = ERRORS[plan.kind]
    if plan.step == 1:  # it fell before it said who it is: nobody can know that it died
        wanted = "PeerTimeoutError"
    if plan.stage == "close":  # whoever closes is not told, and closes alone
        wanted = ""
    guilty = [plan.members.index(rank) for rank in plan.victims]
    if report.error != wanted or (wanted and report.peer not in guilty):
        outcome.faults.append(
            f"rank {report.rank} reports {report.error or 'nothing'} about {report.peer}, wanted "
            f"{wanted or 'nothing'} about {guilty}: {report.text}"
        )
        return
    codes = {"kill": -9, "exit": plan.exit_code}
    code = codes.get(plan.kind) if wanted == "PeerDiedError" else None
    # Told before the process is gone, or no different then, or by nobody.
    late = plan.orderly or code == 0 or not ends_are_known()
    if report.exit_code != code and not (late and report.exit_code is None):
        outcome.faults.append(f"rank {report.rank} reports exit_code={report.exit_code}")
    delay_s = (report.at_ns - fault_ns) / 1e9
    outcome.delays_s.append(delay_s)
    outcome.late += delay_s > limit_of(plan)


def limit_of(plan: Round) -> float:
    """Return how long an error may take, in seconds after the fault."""
    if plan.step == 1:
        return plan.setup_timeout_s + MARGIN_S
    if plan.stage == "close" and in_device_memory(plan):
        return PATIENCE_S + MARGIN_S
    return plan.timeout_s + MARGIN_S if plan.kind == "stop" else AT_ONCE_S


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes by kind and stage, in Markdown."""
    lines = [
        "| fault | where | rounds | as it must be | hung | late | median ms | max ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        stage = outcome.plan.stage + (", nameless" if outcome.plan.step == 1 else "")
        groups.setdefault((outcome.plan.kind, stage), []).append(outcome)
    groups = dict(sorted(groups.items()))
    groups["all", ""] = list(outcomes)
    for (kind, stage), some in groups.items():
        delays = [1000 * delay for outcome in some for delay in outcome.delays_s]
        figures = [statistics.median(delays), max(delays)] if delays and stage else []
        cells = [f"{figure:.1f}" for figure in figures] or ["", ""]
        good, hung = sum(not o.faults for o in some), sum(len(o.hung) for o in some)
        late = sum(o.late for o in some)
        lines.append(
            f"| {kind} | {stage} | {len(some)} | {good} | {hung} | {late} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures that matter."""
    deaths = [d for o in outcomes if o.plan.kind == "kill" and o.plan.step != 1 for d in o.delays_s]
    reports = [report for outcome in outcomes for report in outcome.reports]
    return {
        "rounds": len(outcomes),
        "good": sum(not outcome.faults for outcome in outcomes),
        "hung": sum(len(outcome.hung) for outcome in outcomes),
        "late": sum(outcome.late for outcome in outcomes),
        "kill_to_error_ms": {
            "count": len(deaths),
            "median": round(1000 * statistics.median(deaths), 2) if deaths else None,
            "max": round(1000 * max(deaths), 2) if deaths else None,
        },
        "longest_close_s": round(max((r.close_s for r in reports), default=0.0), 3),
        "most_new_descriptors": max((r.left["descriptors"] for r in reports), default=0),
    }

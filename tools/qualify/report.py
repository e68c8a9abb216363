"""The report: what each job was, what came of it, and whether all is well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .jobs import FAULTS, TOPOLOGY, Job
from .runner import Outcome, clean

OK, FAILED, LEFT_OUT, NOT_REACHED = "ok", "failed", "left out", "not reached"


def entry(job: Job, shared: bool, outcome: Outcome | None = None) -> dict[str, Any]:
    """Return a job's entry in the report."""
    facts: dict[str, Any] = {"step": job.step, "ranks": job.ranks or None}
    if outcome is None:
        return {**facts, "verdict": LEFT_OUT, "why": job.left_out}
    command = clean(" ".join(job.command))
    facts |= {"ranks_share_a_gpu": shared, "command": command, "environment": job.environment}
    facts |= {"exit_code": outcome.exit_code, "seconds": outcome.seconds}
    figures, why = _figures(job, outcome)
    if outcome.exit_code is None:
        why = f"ended after its {job.limit_s:g} s"
    elif outcome.exit_code and not (job.step == TOPOLOGY and figures):  # the doctor found errors
        why = figures.get("failure") or f"exit code {outcome.exit_code}" + (
            f", {why}" if why else ""
        )
    facts |= {"verdict": FAILED if why else OK, "why": clean(why)}
    if why:
        facts["said"] = outcome.said
    return {**facts, "figures": figures if job.step == TOPOLOGY else clean(figures)}


def _figures(job: Job, outcome: Outcome) -> tuple[dict[str, Any], str]:
    """Return what a job has found, and why that is nothing."""
    text = outcome.printed if job.prints else outcome.written
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        return {}, "it has written no figures"
    if job.step == TOPOLOGY:
        return _topology(text, found), ""
    if job.step == FAULTS:
        bad = [one for one in found["rounds"] if one["faults"]]
        if not found["rounds"]:
            return found, "no round was played"
        if bad:
            said = f"{len(bad)} of {len(found['rounds'])} rounds: {bad[0]['faults'][0]}"
            found["failure"] = said
    return found, ""


def _topology(text: str, host: dict[str, Any]) -> dict[str, Any]:
    """Return a host's report, and what the doctor makes of it."""
    from pcie_comm.errors import CommError
    from pcie_comm.topology import codec
    from pcie_comm.topology.doctor import Case, examine

    system = host.get("system")
    if system:
        system["cmdline"] = None
        system["unknown"] = {**system.get("unknown", {}), "cmdline": "left out"}
    try:
        findings, unjudged = examine(Case(codec.from_json(text, "pcie-comm topo")))
    except CommError as error:
        why = f"{type(error).__name__}: {error}"
        return {"summary": {"errors": 1, "findings": [why]}, "host": host}
    told = [{"severity": one.severity, "id": one.id, "subject": one.subject} for one in findings]
    errors = sum(one.severity == "error" for one in findings)
    summary = {
        "errors": errors,
        "gpus": len(host.get("gpus") or ()),
        "unjudged": len(unjudged),
        "findings": told,
    }
    return {"summary": summary, "host": host}


class Report:
    """The report, and the file that holds it.

    Args:
        out: The file.
        facts: Options and provenance.
    """

    def __init__(self, out: Path, facts: Mapping[str, Any]) -> None:
        self.out = out
        self.facts: dict[str, Any] = {"format": "pcie_comm qualify 1", "complete": False, **facts}
        self.steps: list[dict[str, Any]] = []

    def add(self, found: dict[str, Any]) -> None:
        """Add the entry of a job, and write."""
        self.steps.append(found)
        self.write()

    @property
    def good(self) -> bool:
        """Whether something was run, and nothing that was to be run failed or was not reached."""
        verdicts = {one["verdict"] for one in self.steps}
        return OK in verdicts and verdicts <= {OK, LEFT_OUT}

    def write(self, complete: bool = False) -> None:
        """Replace the file in one step."""
        self.facts |= {"complete": complete, "good": self.good}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        beside = self.out.with_name(f"{self.out.name}.part")
        beside.write_text(json.dumps({**self.facts, "steps": self.steps}, indent=1) + "\n")
        beside.replace(self.out)


def line(found: Mapping[str, Any]) -> str:
    """Return a job's entry in one line."""
    figures = found.get("figures", {})
    parts = [found["step"], f"ranks={found['ranks']}" if found["ranks"] else ""]
    parts += [found["verdict"], found.get("why", "")]
    if "calls" in figures:
        parts.append(f"{figures['mismatches']} of {figures['calls']} calls wrong")
    if "summary" in figures:
        parts.append(f"{figures['summary']['errors']} errors found on this host")
    if "good" in figures:
        parts.append(f"{figures['good']} of {len(figures['rounds'])} rounds good")
    if "seconds" in found:
        parts.append(f"{found['seconds']} s")
    return ", ".join(filter(None, parts))

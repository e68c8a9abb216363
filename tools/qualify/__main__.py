"""Qualifies the library on all GPUs of this host; exits with 1 if anything was wrong.

Usage: python tools/qualify --out report.json
       python tools/qualify --out report.json --ranks 2,4 --only processes,latency --limit 300
       python tools/qualify --out report.json --device cpu --ranks 2
       python tools/qualify --out report.json --ranks 2 --share   # on one GPU, to try it out

Steps, most important first: processes, threads, topology, latency, faults. The report is written
after each. PCIE_COMM_KERNELS names kernels that were built ahead of time; without them each step
compiles what it needs first, which takes minutes. Exit code 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "tools")]

from qualify import report, runner  # noqa: E402 - a script: it finds the package first
from qualify.jobs import (  # noqa: E402
    CONTROLS,
    NO_MULTICAST,
    STEPS,
    Job,
    Request,
    jobs,
    ranks_of,
    steps_of,
)
from qualify.report import NOT_REACHED, Report  # noqa: E402

LIMIT_S = 570.0
PROVENANCE_S = 90.0
SHORTEST_S = 10.0
"""A job with less time than this is not started."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        prog="python tools/qualify",
        description=(__doc__ or "").splitlines()[0],
        epilog=f"steps: {', '.join(STEPS)}",
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON report")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=_kind(ranks_of), default=(2, 4, 8), help="2,4,8")
    parser.add_argument("--rounds", type=int, default=0, help="of each case; 0: 10^5 calls in all")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for everything")
    parser.add_argument("--job-limit", type=float, default=600.0, help="seconds, most for a job")
    parser.add_argument("--only", type=_kind(steps_of), default=(), help="steps, with commas")
    parser.add_argument("--share", action="store_true", help="ranks may share a GPU")
    parser.add_argument("--alone", action="store_true", help="latency: without torch's ways")
    parser.add_argument(
        "--control", choices=CONTROLS, default="", help="break jobs, to see that it is noticed"
    )
    return parser.parse_args(argv)


def _kind(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a type of an option whose message is that of the reader."""

    def kind(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return kind


def provenance(device: str) -> tuple[dict[str, Any], str]:
    """Return what the results depend on, or why that cannot be told."""
    command = ["python", "tools/qualify/child.py", "provenance", "--device", device, "--out"]
    told = runner.run([*command, runner.OUT], PROVENANCE_S, NO_MULTICAST)
    try:
        return runner.clean(json.loads(told.written)), ""
    except ValueError:
        return {}, told.said or "torch did not answer in time"


def run_job(job: Job, shared: bool, left_s: float) -> dict[str, Any]:
    """Run a job, if there is time; return its entry."""
    if job.left_out:
        return report.entry(job, shared)
    if left_s < SHORTEST_S:
        why = {"verdict": NOT_REACHED, "why": "no time was left"}
        return {"step": job.step, "ranks": job.ranks or None, **why}
    job = job.within(left_s)
    outcome = runner.run(job.command, job.limit_s, {**NO_MULTICAST, **job.environment})
    return report.entry(job, shared, outcome)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all jobs; return the exit code."""
    options, started = parse(argv), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *ignored: sys.exit(1))  # the job at work is ended then
    known, why = provenance(options.device)
    if why or (options.device == "cuda" and not known["gpu_count"]):
        print(
            f"qualify: {why or 'torch sees no GPU; --device cpu tries the tool'}", file=sys.stderr
        )
        return 2
    request = Request(
        device=options.device,
        ranks=options.ranks,
        gpus=known["gpu_count"],
        share=options.share,
        rounds=options.rounds,
        only=options.only,
        alone=options.alone,
        control=options.control,
        has_typer=find_spec("typer") is not None,
        limit_s=options.job_limit,
    )
    told = {name: value for name, value in vars(options).items() if name != "out"}
    settings = {name: text for name, text in os.environ.items() if name.startswith("PCIE_COMM_")}
    facts = {"options": told, "settings": runner.clean(settings), "provenance": known}
    found = Report(options.out, facts)
    found.write()
    for job in jobs(request):
        shared = request.shares(job.ranks)
        found.add(run_job(job, shared, options.limit - (time.monotonic() - started)))
        print(report.line(found.steps[-1]), flush=True)
    reached = all(one["verdict"] != NOT_REACHED for one in found.steps)
    found.facts["seconds"] = round(time.monotonic() - started, 1)
    found.write(complete=reached)
    return 0 if found.good else 1


if __name__ == "__main__":
    sys.exit(main())

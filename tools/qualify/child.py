"""One job of tools/qualify in a process of its own; tools/qualify starts it.

Usage: python tools/qualify/child.py processes --world 2 --device cpu --rounds 4 --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # instead of this folder, whose modules belong to a package
    folders = (ROOT, ROOT / "tools", ROOT / "tests", ROOT / "tests" / "gpu")
    sys.path[:1] = map(str, folders)

from qualify.jobs import CONTROLS  # noqa: E402 - a script: it finds the package first

GRACE_S = 5.0
"""What is left of the time to write down how far ranks came that had to be ended."""

ROWS = {"cuda": (1, 8, 64), "cpu": (1, 8)}
TIMED_OPS = {"cuda": 64, "shared": 4, "cpu": 2}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=0, help="of each case; 0: as --calls needs")
    parser.add_argument("--calls", type=int, default=100_000, help="of all ranks and cases")
    parser.add_argument("--shared", action="store_true", help="ranks share a GPU")
    parser.add_argument("--alone", action="store_true", help="latency: without torch's ways")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the ranks")
    parser.add_argument("--control", choices=CONTROLS, default="")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the results depend on: versions, source, names of GPUs. No serial numbers."""
    import torch

    from pcie_comm.bench import provenance as known

    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    devices = [torch.device("cuda", index) for index in range(gpus)] or [torch.device("cpu")]
    nccl: Any = torch.cuda.nccl if gpus and torch.distributed.is_nccl_available() else None
    facts = known.gather(devices, "tools/qualify")
    return {
        **{name: value for name, value in facts.items() if name != "command"},
        "gpu_count": gpus,
        "gpus": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "nccl": nccl.version() if nccl else None,
    }


def _run_ranks(serve: Any, options: argparse.Namespace, args: tuple[Any, ...]) -> tuple[Any, str]:
    """Run a function in a process for each rank; return rank 0's result, and what went wrong."""
    from launcher import RanksFailedError, run_ranks

    limit_s = max(options.limit - GRACE_S, 1.0)
    try:
        return run_ranks(serve, options.world, timeout_s=limit_s, args=args)[0], ""
    except RanksFailedError as error:
        print(error, file=sys.stderr)
        said = [f"rank {rank}: {_last(text)}" for rank, text in sorted(error.reports.items())]
        return {}, "; ".join(said)


def _last(text: str) -> str:
    """Return the last line of a traceback that says something."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _check(options: argparse.Namespace) -> Any:
    from qualify.ranks import Check

    control = "wrong_byte" if options.control == "wrong_byte" else ""
    return Check(options.device, options.world, options.rounds, ROWS[options.device], control)


def processes(options: argparse.Namespace, notes: str) -> dict[str, Any]:
    """Check all operations between ranks that are processes."""
    from qualify import ranks

    found, failure = _run_ranks(ranks.serve, options, (_check(options), options.calls, notes))
    return _checked({**found, "failure": failure}, ranks.read_notes(notes, options.world))


def threads(options: argparse.Namespace, notes: str) -> dict[str, Any]:
    """Check them between ranks that are threads of this process."""
    import torch

    from pcie_comm import CommError
    from qualify import ranks

    torch.set_num_threads(1)
    found: dict[str, Any] = {"failure": ""}
    lines: list[dict[str, Any]] = []

    def note(line: dict[str, Any]) -> None:
        lines.append(line)
        if line["rank"] == options.world - 1:  # in case this process must be ended
            write(options.out, _checked({"failure": "not complete"}, lines))

    try:
        found |= ranks.run_threads(_check(options), options.calls, note)
    except (CommError, RuntimeError) as error:
        found["failure"] = f"{type(error).__name__}: {error}"
    return _checked(found, lines)


def _checked(found: dict[str, Any], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add the counts, and what is wrong with them."""
    from qualify.figures import counts

    sums = counts(lines)
    if not found["failure"]:
        if not sums["calls"]:
            found["failure"] = "no call was made"
        elif not sums["drawn_alike"]:
            found["failure"] = "ranks drew different bytes: GPUs of different kinds; no verdict"
        elif sums["mismatches"]:
            found["failure"] = f"{sums['mismatches']} of {sums['calls']} calls are wrong"
    return {**found, **sums}


def latency(options: argparse.Namespace, notes: str) -> dict[str, Any]:
    """Time the decode operations, one process per rank, beside torch's ways."""
    from qualify import latency as timed
    from qualify.figures import latencies
    from qualify.ranks import read_notes

    timing = timed.Timing(
        device=options.device,
        rows=ROWS[options.device],
        ops=TIMED_OPS["shared" if options.shared else options.device],
        shared=options.shared,
        alone=options.alone,
        meeting=f"{notes}.meeting",
        control=options.control if options.control == "wrong_byte" else "",
    )
    _, failure = _run_ranks(timed.serve, options, (timing, notes))
    lines = read_notes(notes, options.world)
    facts: dict[str, Any] = next((line["facts"] for line in lines if "facts" in line), {})
    cases = latencies([line for line in lines if "op" in line], options.world)
    wrong = [
        f"{case['op']}, rows={case['rows']}, {side['name']}: {side['faults'][0]}"
        for case in cases
        for side in case["contenders"]
        if not side["correct"]
    ]
    failure = failure or "; ".join(wrong[:4]) or ("" if cases else "nothing was measured")
    method = " ".join((timed.__doc__ or "").split())
    found = {"failure": failure, "ops_of_a_sample": timing.ops, "method": method}
    return {**found, **facts, "cases": cases}


STEPS = {"processes": processes, "threads": threads, "latency": latency, "provenance": None}


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write figures in one step."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(figures))
    beside.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return 1 if something was wrong."""
    options = parse(argv)
    if options.control == "fail":
        raise SystemExit("the control asks for a failure")
    if options.control == "hang":
        time.sleep(1e6)
    work = STEPS[options.step]
    if work is None:
        write(options.out, provenance(options))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        figures = work(options, f"{folder}/notes")
    write(options.out, figures)
    return 1 if figures["failure"] else 0


if __name__ == "__main__":
    sys.exit(main())

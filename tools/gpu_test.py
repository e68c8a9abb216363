"""Runs every GPU test and a short benchmark; writes one JSON report.

Usage: python tools/gpu_test.py --out build/gpu_report.json

Exit code: that of the tests, or of the benchmark if they passed and one of its outputs was wrong.
The report holds the environment, every test's outcome, the figures that tests recorded, and the
report of the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEST_LIMIT_S = 450
TIMED_OUT = 124

PARTS = (
    ("tests/gpu/test_calls.py", "tests/gpu/test_host_cost.py"),
    ("tests/gpu/test_exact.py",),
    ("tests/gpu/test_router.py", "tests/gpu/test_bench.py"),
    ("tests/gpu/test_processes.py", "tests/gpu/test_sanitizer.py"),
    ("tests/transport",),
)
"""Test files that run in one process; `check_parts` sees to it that none is left out."""
BENCH_LIMIT_S = 80


def output_of(*command: str) -> str:
    """Return what a command prints, or why it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not available: {error}"
    return (done.stdout or done.stderr).strip()


def environment() -> dict[str, Any]:
    """Return what the results depend on; device names, no serial numbers."""
    versions = (
        "import torch, json, importlib.metadata as m; "
        "print(json.dumps({'torch': torch.__version__, 'devices': "
        "[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())], "
        "'cuda-bindings': m.version('cuda-bindings')}))"
    )
    query = "name,driver_version,clocks.sm,clocks.mem,pcie.link.gen.current,pcie.link.width.current"
    revision = os.environ.get("PCIE_COMM_REVISION") or output_of("git", "rev-parse", "HEAD")
    return {
        "revision": revision,
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "versions": output_of(sys.executable, "-c", versions),
        "nvidia_smi": output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def check_parts() -> None:
    """Fail if a test file under tests/gpu is in no part."""
    listed = {path for paths in PARTS for path in paths}
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").glob("test_*.py")}
    if missing := found - listed:
        raise SystemExit(f"add to PARTS in tools/gpu_test.py: {sorted(missing)}")


def run_part(
    paths: tuple[str, ...], folder: Path, limit_s: float
) -> tuple[int, list[dict[str, Any]]]:
    """Run some test files in a process of their own; return exit code and outcomes.

    A fault on the device ends a process's use of it, so it must not end the other parts.
    """
    junit = folder / "junit.xml"
    junit.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--durations=5", "-rs", *paths]
    variables = {
        **os.environ,
        "PCIE_COMM_TEST_FIGURES": str(folder / "figures.jsonl"),
        "PYTHONUNBUFFERED": "1",
    }
    try:
        code = subprocess.call(
            [*command, f"--junit-xml={junit}"], cwd=ROOT, env=variables, timeout=max(limit_s, 1)
        )
    except subprocess.TimeoutExpired:
        code = TIMED_OUT
    outcomes = []
    for case in ElementTree.parse(junit).iter("testcase") if junit.exists() else ():
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes.append(
            {
                "test": f"{case.get('classname')}::{case.get('name')}",
                "outcome": bad[0] if bad else "passed",
                "seconds": float(case.get("time", 0)),
            }
        )
    return code, outcomes


def run_tests(
    folder: Path, limit_s: float
) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
    """Run all parts; return the first bad exit code, the outcomes and the figures."""
    deadline = time.monotonic() + limit_s
    code, outcomes = 0, []
    for paths in PARTS:
        part_code, part = run_part(paths, folder, deadline - time.monotonic())
        print(f"{' '.join(paths)}: exit code {part_code}, {len(part)} tests", flush=True)
        code = code or part_code
        outcomes += part
    figures = folder / "figures.jsonl"
    lines = figures.read_text().splitlines() if figures.exists() else []
    return code, outcomes, [json.loads(line) for line in lines]


def run_bench(folder: Path) -> dict[str, Any]:
    """Run the short benchmark; return its report, as far as it came, and its exit code."""
    out = folder / "bench.json"
    command = [sys.executable, "-m", "pcie_comm.bench", "--short", "--out", str(out)]
    try:
        code = subprocess.call(command, cwd=ROOT, timeout=BENCH_LIMIT_S)
    except subprocess.TimeoutExpired:
        code = TIMED_OUT
    report = json.loads(out.read_text()) if out.exists() else {}
    return {"exit_code": code, **report}


def main() -> int:
    """Run everything; return the exit code of the tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_report.json")
    parser.add_argument("--limit", type=float, default=TEST_LIMIT_S, help="seconds for the tests")
    arguments = parser.parse_args()
    check_parts()
    started = time.monotonic()
    report: dict[str, Any] = {"environment": environment()}
    with tempfile.TemporaryDirectory() as name:
        code, outcomes, figures = run_tests(Path(name), arguments.limit)
        counts: dict[str, int] = {}
        for outcome in outcomes:
            counts[outcome["outcome"]] = counts.get(outcome["outcome"], 0) + 1
        report |= {"exit_code": code, "counts": counts, "tests": outcomes, "figures": figures}
        report["bench"] = run_bench(Path(name))
    report["environment"]["nvidia_smi_after"] = environment()["nvidia_smi"]
    report["seconds"] = round(time.monotonic() - started, 1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1))
    print(f"{counts} in {report['seconds']} s; report: {arguments.out}")
    return code or int(report["bench"]["exit_code"] == 1)


if __name__ == "__main__":
    sys.exit(main())

"""Runs every GPU test and a short benchmark; writes one JSON report.

Usage: python tools/gpu_test.py --out build/gpu_report.json

Exit code: that of the tests, or of the benchmark if they passed and one of its outputs was wrong.
The report holds the environment, every test's outcome, the figures that tests recorded, and the
report of the benchmark. It is written anew after every step, so that a run that is cut short keeps
what it has shown; `complete` says whether it came to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 530
TIMED_OUT = 124
INTERRUPT_S = 15
"""Grace of a part that ran out of time: pytest then still writes what it knows."""


@dataclass(frozen=True)
class Part:
    """Tests that run in one process: a fault on the device must not end the others.

    Attributes:
        paths: Files and folders.
        chosen: Which tests of them, as pytest's -k; empty for all.
    """

    paths: tuple[str, ...]
    chosen: str = ""

    def __str__(self) -> str:
        return " ".join(self.paths) + (f" -k {self.chosen!r}" if self.chosen else "")


TIMED = "times or latencies"
"""Tests that only time, of files whose other tests mostly wait for their host."""

FIRST = Part(("tests/gpu/test_calls.py", "tests/gpu/test_host_cost.py"))
ALONE = (
    Part(
        (
            "tests/gpu/test_two_streams.py",
            "tests/gpu/test_stats.py",
            "tests/gpu/test_graph_lifetimes.py",
            "tests/gpu/test_full_device.py",
        )
    ),
    Part(("tests/gpu/test_model_routers.py", "tests/gpu/test_all_collectives.py"), TIMED),
    Part(("tests/gpu/test_topology.py",)),
    Part(("tests/gpu/test_alone.py", "tests/gpu/test_deaths.py")),
    Part(("tests/gpu/test_processes.py",), "not without_mps"),
    Part(("tests/gpu/test_decode_example.py",)),
)
"""What measures time, or needs the device to itself; one after another."""

TOGETHER = (
    Part(("tests/gpu/test_exact.py",), "eager and VRAM"),
    Part(("tests/gpu/test_exact.py",), "eager and not VRAM"),
    Part(("tests/gpu/test_exact.py",), "not eager"),
    Part(("tests/gpu/test_router.py",), "vllm"),
    Part(("tests/gpu/test_router.py", "tests/gpu/test_bench.py"), "not vllm"),
    Part(("tests/gpu/test_processes.py",), "without_mps"),
    Part(("tests/transport", "tests/gpu/test_sanitizer.py")),
    Part(("tests/gpu/test_all_collectives.py",), f"VRAM and not ({TIMED})"),
    Part(("tests/gpu/test_all_collectives.py",), f"not VRAM and not ({TIMED})"),
    Part(
        (
            "tests/gpu/test_model_routers.py",
            "tests/gpu/test_torch_arrays.py",
            "tests/gpu/test_torch_dist.py",
        ),
        f"not ({TIMED})",
    ),
    Part(
        (
            "tests/gpu/test_large_payloads.py",
            "tests/gpu/test_uneven_shards.py",
            "tests/gpu/test_example_plugin.py",
        )
    ),
)
"""What mostly waits for its host: all at once, and the device takes turns. `check_parts` sees to it
that no file is left out."""

BENCH_LIMIT_S = 100
TOGETHER_LIMIT_S = 240


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
    listed = {path for part in (FIRST, *ALONE, *TOGETHER) for path in part.paths}
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").glob("test_*.py")}
    if missing := found - listed:
        raise SystemExit(f"add to a part in tools/gpu_test.py: {sorted(missing)}")


class Run:
    """One run: what it has found so far, and the file that holds it.

    Args:
        out: The report.
        folder: For files of the parts.
        limit_s: Seconds for everything.
    """

    def __init__(self, out: Path, folder: Path, limit_s: float) -> None:
        self.out = out
        self.folder = folder
        self.started = time.monotonic()
        self.limit_s = limit_s
        self.started_parts: list[Part] = []
        self._noting = threading.Lock()
        self.report: dict[str, Any] = {
            "complete": False,
            "environment": environment(),
            "exit_code": 0,
            "counts": {},
            "parts": {},
            "tests": [],
            "figures": [],
        }

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return max(1.0, self.limit_s - (time.monotonic() - self.started))

    def save(self) -> None:
        """Write the report as it stands, replacing an older one in one step."""
        self.report["seconds"] = round(time.monotonic() - self.started, 1)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        beside = self.out.with_name(f"{self.out.name}.part")
        beside.write_text(json.dumps(self.report, indent=1))
        beside.replace(self.out)

    def call(self, command: list[str], limit_s: float, **variables: str) -> int:
        """Run a command; return its exit code, TIMED_OUT if it did not end in time.

        It is interrupted before it is killed: pytest and the benchmark then write what they know.
        """
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables})
        try:
            return process.wait(min(limit_s, self.left_s()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPT_S)
            return TIMED_OUT
        finally:
            process.kill()
            process.wait()

    def test(self, part: Part, limit_s: float = math.inf) -> None:
        """Run a part in a process of its own; note outcomes and figures."""
        name = f"{len(self.started_parts)}"
        self.started_parts.append(part)
        junit, figures = self.folder / f"{name}.xml", self.folder / f"{name}.jsonl"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--durations=5", "-rs"]
        chosen = ["-k", part.chosen] if part.chosen else []
        code = self.call(
            [*command, *part.paths, *chosen, f"--junit-xml={junit}"],
            min(limit_s, self.limit_s),
            PCIE_COMM_TEST_FIGURES=str(figures),
            PYTHONUNBUFFERED="1",
        )
        outcomes = read_outcomes(junit)
        lines = figures.read_text().splitlines() if figures.exists() else []
        with self._noting:
            counts = self.report["counts"]
            for outcome in outcomes:
                counts[outcome["outcome"]] = counts.get(outcome["outcome"], 0) + 1
            self.report["parts"][str(part)] = {"exit_code": code, "tests": len(outcomes)}
            self.report["tests"] += outcomes
            self.report["figures"] += [json.loads(line) for line in lines]
            self.report["exit_code"] = self.report["exit_code"] or code
            print(f"{part}: exit code {code}, {len(outcomes)} tests", flush=True)
            self.save()

    def test_together(self, parts: Sequence[Part]) -> None:
        """Run parts at the same time."""
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(lambda part: self.test(part, TOGETHER_LIMIT_S), parts))

    def bench(self) -> None:
        """Run the short benchmark; note its report, as far as it came, and its exit code."""
        out = self.folder / "bench.json"
        command = [sys.executable, "-m", "pcie_comm.bench", "--short", "--out", str(out)]
        code = self.call(command, BENCH_LIMIT_S)
        found = json.loads(out.read_text()) if out.exists() else {}
        self.report["bench"] = {"exit_code": code, **found}
        self.save()

    def conclude(self) -> list[str]:
        """Say whether all has run; return what has not."""
        report = self.report
        report["environment"]["nvidia_smi_after"] = environment()["nvidia_smi"]
        missing = [name for name, part in report["parts"].items() if part["exit_code"] == TIMED_OUT]
        missing += [
            f"{test['test']}, skipped" for test in report["tests"] if test["outcome"] == "skipped"
        ]
        if not report.get("bench", {}).get("complete", False):
            missing.append("the benchmark")
        report["complete"] = not missing
        self.save()
        return missing


def read_outcomes(junit: Path) -> list[dict[str, Any]]:
    """Return name, outcome and seconds of every test in a JUnit file; none without a file."""
    outcomes = []
    for case in ElementTree.parse(junit).iter("testcase") if junit.exists() else ():
        if not case.get("classname"):
            continue  # what was interrupted
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes.append(
            {
                "test": f"{case.get('classname')}::{case.get('name')}",
                "outcome": bad[0] if bad else "passed",
                "seconds": float(case.get("time", 0)),
            }
        )
    return outcomes


def main() -> int:
    """Run everything; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_report.json")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for everything")
    arguments = parser.parse_args()
    check_parts()
    with tempfile.TemporaryDirectory() as name:
        run = Run(arguments.out, Path(name), arguments.limit)
        run.save()
        run.test(FIRST)
        run.bench()
        run.test_together(TOGETHER)
        for part in ALONE:
            run.test(part)
        missing = run.conclude()
        report = run.report
    print(f"{report['counts']} in {report['seconds']} s; report: {arguments.out}")
    if missing:
        print(f"not complete: {'; '.join(missing)}")
    return int(report["exit_code"] or report["bench"]["exit_code"] == 1)


if __name__ == "__main__":
    sys.exit(main())

"""Check the channel protocol with the model checker SPIN: every interleaving, up to a bound.

Each case is one model, channel.pml with its options. A case either must hold, or is a negative
control: a fault that must be found. Exit status 0 if all end as they must, else 1; 2 if SPIN or a
C compiler is missing. What the models say, and what they leave out: docs/protocol.md.

Usage: python tools/model/check.py [--small] [--jobs N]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).resolve().parent / "channel.pml"
TOOLS = ("spin", "gcc")
MISSING = 2

TIMEOUT_S = 300
MEMORY_MIB = 6000
MAX_DEPTH = 100_000

FINDINGS = (
    ("value==n", "wrong value"),
    ("invalid end state", "deadlock"),
    ("finished[", "too far ahead"),
    ("_sent[", "store overtakes store"),
)
"""What pan prints for each property of the model, and its name in the table."""


@dataclass(frozen=True)
class Case:
    """One run of the checker.

    Attributes:
        protocol: "pull", "push" or "tagged".
        world_size, launches: Ranks, and launches of each.
        options: More definitions for the model.
        control: Name of the fault that must be found; empty if the model must hold.
    """

    protocol: str
    world_size: int
    launches: int
    options: tuple[str, ...] = ()
    control: str = ""

    @property
    def definitions(self) -> list[str]:
        """The model's options as SPIN takes them."""
        names = (
            self.protocol.upper(),
            f"W={self.world_size}",
            f"N={self.launches}",
            *(("FAULTY",) if self.control else ()),
            *self.options,
        )
        return [f"-D{name}" for name in names]


@dataclass(frozen=True)
class Result:
    """How a case ended: `found` is empty if the model holds, `complete` False if nobody knows."""

    case: Case
    complete: bool
    found: str = ""
    states: int = 0
    depth: int = 0
    elapsed_s: float = 0.0

    @property
    def good(self) -> bool:
        """True if a model held that must, or a fault was found that must."""
        return self.complete and bool(self.found) == bool(self.case.control)

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        if not self.complete:
            return f"INCOMPLETE: {self.found}"
        if self.case.control:
            return f"found: {self.found}" if self.found else "NOT FOUND"
        return f"VIOLATED: {self.found}" if self.found else "holds"


def controls() -> Iterable[Case]:
    """Every fault in every protocol that it can break; two ranks are enough for each."""
    everywhere = {
        "one slot": "SLOTS=1",
        "one slot, two flags": "ONE_DATA_SLOT",
        "epoch compared by >=": "AT_LEAST",
        "wrap to 1": "WRAP_TO=1",
        "no wait, values ignored": "NO_WAIT",
    }
    published = {
        "no release": "NO_RELEASE",
        "no acquire": "NO_ACQUIRE",
        "flag before payload": "FLAG_FIRST",
    }
    for protocol in ("pull", "push", "tagged"):
        faults = everywhere if protocol == "tagged" else everywhere | published
        for name, option in faults.items():
            yield Case(protocol, 2, 4, (option,), name)
    yield Case("tagged", 2, 4, ("SPLIT",), "data and tag apart")
    yield Case("tagged", 2, 4, ("WRAP_TO=0", "FIRST=5"), "wrap to 0, fresh memory")
    yield Case("tagged", 2, 6, ("IDLE=4",), "unit idle for all epochs")


def models(small: bool) -> Iterable[Case]:
    """The models that must hold."""
    for protocol in ("pull", "push", "tagged"):
        yield Case(protocol, 2, 8)
        yield Case(protocol, 2, 8, ("FIRST=1",))
        yield Case(protocol, 2, 5, ("GIVE_UP",))
        yield Case(protocol, 3, 4, ("LAZY",))
        if not small:
            yield Case(protocol, 3, 6, ("LAZY",))
            yield Case(protocol, 3, 4, ("LAZY", "GIVE_UP"))
    yield Case("tagged", 2, 8, ("IDLE=2",))
    yield Case("tagged", 2, 8, ("IDLE=3",))
    if not small:
        yield Case("pull", 3, 4)


def finding(output: str) -> str:
    """Return the name of the error that pan found, or nothing."""
    match = re.search(r"^pan:1: (.*)$", output, re.MULTILINE)
    if not match:
        return ""
    return next((name for text, name in FINDINGS if text in match.group(1)), match.group(1))


def judge(case: Case, output: str, elapsed_s: float) -> Result:
    """Read what pan printed."""
    errors = re.search(r"depth reached (\d+), errors: (\d+)", output)
    states = re.search(r"^\s*(\d+) states, stored", output, re.MULTILINE)
    if not errors or not states:
        last = output.strip().splitlines()[-1:] or ["no output"]
        return Result(case, False, last[0][:60], elapsed_s=elapsed_s)
    facts = (int(states.group(1)), int(errors.group(1)), elapsed_s)
    found = finding(output)
    if bool(found) != (int(errors.group(2)) > 0):
        return Result(case, False, "an error that pan does not name", *facts)
    cut_short = "max search depth too small" in output or "Search not completed" in output
    if cut_short and not found:
        return Result(case, False, "a bound was reached", *facts)
    return Result(case, True, found, *facts)


def run(case: Case) -> Result:
    """Generate, compile and run the checker of one case in a folder that is removed again."""
    # A control ends after a few states: there, compiling is what takes time.
    level = "-O0" if case.control else "-O1"
    compile_it = ["gcc", level, "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}"]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pcie_comm_model_") as folder:
        for command in (
            ["spin", *case.definitions, "-a", str(MODEL)],
            [*compile_it, "-o", "pan", "pan.c"],
            ["./pan", f"-m{MAX_DEPTH}", "-n"],
        ):
            try:
                done = subprocess.run(
                    command,
                    cwd=folder,
                    timeout=TIMEOUT_S,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            except subprocess.TimeoutExpired:
                elapsed_s = time.monotonic() - started
                return Result(case, False, f"{command[0]}: {TIMEOUT_S} s", elapsed_s=elapsed_s)
            if done.returncode != 0 and command[0] != "./pan":
                return Result(case, False, f"{command[0]}: {done.stdout.strip()[:200]}")
    return judge(case, done.stdout, time.monotonic() - started)


def line(result: Result) -> str:
    """One line of the table."""
    case = result.case
    options = " ".join(case.options)
    return (
        f"{case.protocol:<7} {case.world_size} {case.launches:>8}  {case.control or options:<25}"
        f"{result.states:>10,} {result.depth:>6} {result.elapsed_s:>6.1f}  {result.verdict}"
    )


def missing_tools() -> str:
    """Say what has to be installed, or nothing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not missing:
        return ""
    names = " ".join(missing)
    return f"not found: {names}. On Debian or Ubuntu: apt-get update && apt-get install -y {names}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, print the table, return the exit status."""
    parser = argparse.ArgumentParser(description="Check the channel protocol with SPIN.")
    parser.add_argument("--small", action="store_true", help="sizes that end within a minute")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    if missing := missing_tools():
        print(missing, file=sys.stderr)
        return MISSING
    cases = [*models(options.small), *controls()]
    print("model   W launches  options or fault             states  depth      s  verdict")
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(run, cases):
            print(line(result), flush=True)
            results.append(result)
    bad = sum(not result.good for result in results)
    states = sum(result.states for result in results if not result.case.control)
    print(f"cases={len(results)} bad={bad} states={states:,} in models that must hold")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

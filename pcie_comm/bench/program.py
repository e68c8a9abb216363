"""The program `pcie-comm bench`: options in, table, JSON and picture out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from ..errors import CommError
from .options import parse

PROG = "pcie-comm bench"
WRONG, FAILED = 1, 2


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark.

    Returns:
        0; 1 if an output was wrong; 2 for an error, which is one line on stderr.
    """
    try:
        return _run(arguments)
    except CommError as error:
        text = " ".join(str(error).split())
        print(f"pcie-comm: {type(error).__name__}: {text}", file=sys.stderr)
        return FAILED


def _run(arguments: Sequence[str]) -> int:
    options = parse(arguments, PROG)
    from ..console import console, progress
    from .runner import Bench
    from .table import tables

    bench = Bench(options, shlex.join([*PROG.split(), *arguments]))
    with progress(bench.cases(), "measuring") as advance:
        report = bench.run(advance)
    screen = console()
    for table in tables(report.rows):
        screen.print(table)
    for entry in report.left_out:
        screen.print(f"left out: {entry.what} ({entry.where}): {entry.why}")
    for row in report.rows:
        for fault in (*row.faults_before, *row.faults_after)[:3]:
            screen.print(f"WRONG: {row.contender}, {row.case}, {row.protocol}: {fault}")
    verdict = "every output was right" if report.correct else "OUTPUTS WERE WRONG"
    where = f"; report: {options.out}" if options.out else ""
    screen.print(f"{len(report.rows)} rows, {verdict}{where}")
    return 0 if report.correct else WRONG

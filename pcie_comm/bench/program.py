"""The program `pcie-comm bench`: options in, table, JSON and picture out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import CommError
from .options import Options, parse

if TYPE_CHECKING:
    from .report import Report

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
    if options.read is not None:
        from .report import Report

        report = Report.read(options.read)
    else:
        report = _measured(options, shlex.join([*PROG.split(), *arguments]))
    _show(report)
    if options.plot is not None:
        from .plot import draw, draw_ladder

        picture = draw_ladder if report.is_ladder else draw
        picture(report.rows, options.plot, str(report.provenance.get("device", "")))
    return 0 if report.correct else WRONG


def _measured(options: Options, command: str) -> Report:
    from ..console import progress
    from .ladder import Ladder
    from .runner import Bench

    bench = (Ladder if options.ladder else Bench)(options, command)
    with progress(bench.cases(), "measuring") as advance:
        return bench.run(advance)


def _show(report: Report) -> None:
    from ..console import console
    from .report import crossovers
    from .table import ladders, tables

    screen = console()
    for table in (ladders if report.is_ladder else tables)(report.rows):
        screen.print(table)
    for entry in report.left_out:
        screen.print(f"left out: {entry.what} ({entry.where}): {entry.why}")
    for row in report.rows:
        for fault in (*row.faults_before, *row.faults_after)[:3]:
            screen.print(f"WRONG: {row.contender}, {row.case}, {row.protocol}: {fault}")
    for memory, limits in crossovers(report.rows).items():
        screen.print(f"crossovers, {memory}: {', '.join(f'{k}={v}' for k, v in limits.items())}")
    verdict = "every output was right" if report.correct else "OUTPUTS WERE WRONG"
    end = "" if report.complete else "; the run did not come to its end"
    screen.print(f"{len(report.rows)} rows, {verdict}{end}")

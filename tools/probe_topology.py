"""Finds out what this machine really does, on every level: `pcie-comm topo --verify --measure`.

For a checkout that is not installed. Needs what the package needs except typer: torch, cuda-python,
NumPy and rich; nvidia-ml-py where there is one. Without the CuTe DSL, kernels come from the folder
that PCIE_COMM_KERNELS names (`pcie-comm compile --probes`, on any machine).

Usage: python tools/probe_topology.py --quick --json build/topology.json --html build/topology.html

Exit code: that of the doctor: 1 if it found an error; 2 if nothing could be probed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from pcie_comm.console import timed_progress  # noqa: E402 - a script: it finds the package first
from pcie_comm.errors import CommError  # noqa: E402
from pcie_comm.probe import Options, probe  # noqa: E402
from pcie_comm.topology import codec, render  # noqa: E402
from pcie_comm.topology.collect import collect  # noqa: E402
from pcie_comm.topology.doctor import Case, examine, exit_code  # noqa: E402
from pcie_comm.topology.redact import redact  # noqa: E402

FAILED = 2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 30 s on one GPU")
    parser.add_argument("--no-verify", action="store_true", help="leave level 3 out")
    parser.add_argument("--no-measure", action="store_true", help="leave level 4 out")
    parser.add_argument("--redact", action="store_true", help="without UUIDs and names")
    parser.add_argument("--json", type=Path, help="write the report")
    parser.add_argument("--html", type=Path, help="write a page")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Probe, print, write; return the exit code."""
    options = parse(argv)
    levels = Options(not options.no_verify, not options.no_measure, options.quick)
    try:
        host = probe(collect(), levels, lambda seconds: timed_progress(seconds, "probing"))
    except CommError as error:
        print(f"probe_topology: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    if options.redact:
        host = redact(host)
    for path, text in ((options.json, codec.to_json), (options.html, render.to_html)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(host), encoding="utf-8")
    findings, _ = examine(Case(host))
    print(render.to_text(host))
    for finding in findings:
        print(f"{finding.severity}: {finding.id}: {finding.subject}: {finding.seen}")
    return exit_code(findings, strict=False)


if __name__ == "__main__":
    sys.exit(main())

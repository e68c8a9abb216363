"""What bounded waits and the abort word cost on the hot path: on against off, in one run.

Usage: python tools/bounds build --arch sm_90a --out build/unbounded_kernels
       python tools/bounds measure --kernels build/unbounded_kernels --out build/bounds.json
       python tools/bounds stats --out build/stats.json

`stats` compares `Config.stats` on and off in the same way; its kernels are the library's, or those
that `pcie-comm compile --stats` wrote to the folder `--kernels`.

`build` needs the CuTe DSL and no GPU, the others a GPU; the kernels with bounds are the library's,
from PCIE_COMM_KERNELS, the wheel, the cache or the compiler. Never leave the other folder where a
job finds it: a wait of theirs ends with the process if a rank does not come. So do `measure` and
`stats`, after `--limit` seconds. Exit code: 1 if an output was wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before any context exists

OPERATIONS = ("all_gather_pair_kimi_topk", "all_gather_pair")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        prog="python tools/bounds", description=(__doc__ or "").splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile the kernels without bounds")
    build.add_argument("--arch", default="sm_90a")
    build.add_argument("--out", type=Path, default=ROOT / "build" / "unbounded_kernels")
    bounds = commands.add_parser("measure", help="compare bounds; needs a GPU")
    bounds.add_argument("--kernels", type=Path, default=ROOT / "build" / "unbounded_kernels")
    bounds.add_argument("--ranks", type=int, nargs="+", default=[2, 16])
    stats = commands.add_parser("stats", help="compare counters; needs a GPU")
    stats.add_argument("--kernels", type=Path, help="default: those of the library")
    stats.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    for compare in (bounds, stats):
        compare.add_argument("--rows", type=int, default=1)
        compare.add_argument("--samples", type=int, default=101)
        compare.add_argument("--ops", type=int, default=64)
        compare.add_argument("--limit", type=float, default=240.0, help="seconds for everything")
        compare.add_argument("--out", type=Path)
        compare.add_argument("--protocol", default="tagged", choices=("tagged", "push", "pull"))
    return parser.parse_args(argv)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Compare in worlds of all sizes; return the report."""
    import torch

    from bounds import compare
    from pcie_comm.bench import provenance

    devices = [torch.device("cuda:0")]
    facts = provenance.gather(devices, shlex.join(sys.argv))
    rows = []
    for ranks in options.ranks:
        setting = compare.Setting(
            subject="stats" if options.command == "stats" else "bounds",
            ranks=ranks,
            operations=OPERATIONS,
            rows=options.rows,
            protocol=options.protocol,
            samples=options.samples,
            ops=options.ops,
            kernels=options.kernels,
        )
        found = compare.run(setting)
        rows += found
        for one in compare.comparisons(found):
            print(compare.line(one), flush=True)
    provenance.complete(facts, devices[0])
    return {
        "correct": all(row.correct for row in rows),
        "direction": compare.direction(setting.subject),
        "comparisons": compare.comparisons(rows),
        "provenance": facts,
        "rows": [row.as_json() for row in rows],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Build, or measure and write the report; return the exit code."""
    options = parse(argv)
    if options.command == "build":
        from bounds import kernels

        built = kernels.build_all(options.arch, options.out)
        print(f"{len(built)} kernels for {options.arch} in {options.out}")
        return 0
    faulthandler.dump_traceback_later(options.limit, exit=True)
    report = measured(options)
    faulthandler.cancel_dump_traceback_later()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["correct"] else 1


if __name__ == "__main__":
    sys.exit(main())

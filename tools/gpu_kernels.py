"""Builds all kernels that `make gpu-test` runs, for a machine with a GPU and without the compiler.

Usage: python tools/gpu_kernels.py --arch sm_90a --out build/kernels; there, set PCIE_COMM_KERNELS.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples" / "all_reduce_max")]

from pcie_comm import build  # noqa: E402 - a script: it finds the packages first


def main(argv: Sequence[str] | None = None) -> int:
    """Build, and say how many."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "kernels")
    options = parser.parse_args(argv)
    specs = importlib.import_module("router_rows").SPECS  # of the tests
    routers = list(dict.fromkeys(specs.values()))
    jobs = build.jobs(
        [options.arch], floors=True, probes=True, stats=True, routers=routers, tensors=8
    )
    example = importlib.import_module("all_reduce_max").AllReduceMax()
    jobs += [build.Job(key, options.arch, example) for key in example.variants()]
    done = build.build_all(jobs, options.out, build.default_workers(), lambda built: None)
    print(f"{len(done)} kernels for {options.arch} in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

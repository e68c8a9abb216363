"""Runs a soak and writes a JSON report; exits with 1 if anything was wrong.

Usage: python tools/soak --seconds 300 --out build/soak.json
       python tools/soak --processes --calls 100000
       python tools/soak --device cuda --kernels build/soak_kernels --seconds 300

`--kernels` is a folder that tools/soak/kernels.py made; without it a GPU soak has neither delays
inside kernels nor controls. `--calls` counts the calls of all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests" / "gpu")]
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before any context exists

from soak import plan  # noqa: E402 - a script: it finds the package first
from soak.plan import Part  # noqa: E402

NO_LIMIT = 1 << 62


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        prog="python tools/soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", action="store_true", help="CPU ranks are processes")
    parser.add_argument("--worlds", type=int, nargs="+", help="ranks; 2 3 4, on a GPU 2 4 8")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="of all parts; controls extra")
    parser.add_argument("--calls", type=int, default=NO_LIMIT, help="at most, of all parts")
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--kernels", type=Path, help="folder made by tools/soak/kernels.py")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def parts_of(options: argparse.Namespace) -> list[Part]:
    """Return what is to be run."""
    if options.device == "cuda":
        worlds = options.worlds or (2, 4, 8)
        return plan.gpu_parts(worlds, options.kernels is not None, not options.no_controls)
    where = "processes" if options.processes else "threads"
    return plan.cpu_parts(options.worlds or (2, 3, 4), where, not options.no_controls)


def run_part(part: Part, number: int, share: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part, one of `share` that are no controls; return its line of the report."""
    seed = options.seed * 1000 + number
    seconds = plan.CONTROL_S if part.control else options.seconds / share
    calls = -(-options.calls // share)
    facts: dict[str, Any] = {"seed": seed, **asdict(part)}
    if options.device == "cuda":
        from soak import gpu

        folder = options.kernels / part.kernels if part.kernels else None
        tally, facts["kernels_from"] = gpu.run(
            gpu.GpuSoak(
                seed=seed,
                world_size=part.world_size,
                protocol=part.protocol,
                transport=part.where,
                seconds=seconds,
                calls=calls,
                overlap=part.overlap,
                control=part.control,
                kernels=folder,
            )
        )
    else:
        from soak import cpu

        tally = cpu.run(
            cpu.Soak(
                seed=seed,
                world_size=part.world_size,
                protocol=part.protocol,
                seconds=seconds,
                calls=calls,
                control=part.control,
                processes=part.where == "processes",
            )
        )
    result = {**facts, **tally.report()}
    return {**result, "verdict": plan.verdict(part, result)}


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures depend on."""
    import torch

    revision = os.environ.get("PCIE_COMM_REVISION", "")
    if not revision:
        command = ["git", "describe", "--always", "--dirty"]
        with suppress(OSError):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            revision = done.stdout.strip()
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    return {
        "options": {k: str(v) for k, v in vars(options).items() if k not in ("out", "kernels")},
        "revision": revision,
        "torch": torch.__version__,
        "device": device,
        "cpus": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def prepare(options: argparse.Namespace) -> None:
    """Set up torch for the run."""
    import torch

    if options.device == "cuda":
        from soak import gpu

        gpu.warm_up()
    else:
        torch.set_num_threads(1)  # each rank is a thread already


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts; write the report after each, so that a run that is cut short keeps them."""
    options = parse(argv)
    parts = parts_of(options)
    share = max(1, sum(not part.control for part in parts))
    prepare(options)
    results: list[dict[str, Any]] = []
    report: dict[str, Any] = {"complete": False, **provenance(options)}
    for number, part in enumerate(parts):
        results.append(run_part(part, number, share, options))
        print(json.dumps(results[-1]), flush=True)
        report |= {**plan.total(results), "complete": len(results) == len(parts), "parts": results}
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(plan.total(results)))
    return 0 if report["good"] else 1


if __name__ == "__main__":
    sys.exit(main())

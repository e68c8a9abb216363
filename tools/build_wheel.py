"""Builds the wheel with every kernel in it, and says how large it is.

Compiles into the package what is not there, stale or damaged, and removes there what is no kernel
of these sources. Then hatchling packs the wheel, which is opened and counted. Needs the CuTe DSL
and hatchling; no GPU, no network.

Usage: python tools/build_wheel.py [--arch sm_90a ...] [--out dist] [--jobs N]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from pcie_comm import build, cli  # noqa: E402 - a script: it finds the package first
from pcie_comm.errors import CommError, CompileError  # noqa: E402
from pcie_comm.kernels import compile as compiler  # noqa: E402
from pcie_comm.kernels.store import PREBUILT_DIR, staleness  # noqa: E402

PACK_TIMEOUT_S = 300.0


def kept(job: build.Job, folder: Path) -> compiler.CompiledKernel | None:
    """Return the kernel of an earlier build, or None if it has to be built (again)."""
    try:
        kernel = compiler.read(folder, job.key, job.arch)
    except CompileError:
        return None
    if kernel is None or kernel.dsl != compiler.dsl_version():
        return None
    return None if staleness(kernel, job.plugin()) else kernel


def compile_missing(jobs: Sequence[build.Job], folder: Path, workers: int) -> None:
    """Build what is not there or not good.

    Raises:
        CompileError: A kernel does not build.
    """
    started = time.perf_counter()
    todo = [job for job in jobs if kept(job, folder) is None]
    if todo:
        with cli.progress(len(todo)) as advance:
            build.build_all(todo, folder, workers, advance)
    elapsed_s = time.perf_counter() - started
    print(f"kernels: {len(todo)} compiled, {len(jobs) - len(todo)} kept, {elapsed_s:.1f} s")


def tidy(jobs: Sequence[build.Job], folder: Path) -> set[str]:
    """Remove what is no kernel of these jobs; return the names of the files that are.

    Raises:
        RuntimeError: A kernel was built from sources that have changed since.
    """
    kernels = [kernel for job in jobs if (kernel := kept(job, folder))]
    if len(kernels) < len(jobs):
        raise RuntimeError("the sources have changed during the build; run it again")
    names = {name for kernel in kernels for name in compiler.file_names(kernel)}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    return names


def pack(out: Path) -> Path:
    """Let hatchling build the wheel; return its path.

    Raises:
        RuntimeError: It fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".wheel.") as folder:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=PACK_TIMEOUT_S
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
        (wheel,) = Path(folder).glob("*.whl")
        return wheel.replace(out / wheel.name)


def check_content(wheel: Path, wanted: set[str]) -> None:
    """Check that a wheel holds these kernel files and no others.

    Raises:
        RuntimeError: It does not.
    """
    folder = PREBUILT_DIR.relative_to(ROOT).as_posix()
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    found = {path.name for path in names if path.parent.as_posix() == folder}
    if found != wanted:
        differing = sorted(found ^ wanted)
        raise RuntimeError(f"{wheel}: {len(differing)} kernel files differ: {differing[:4]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Build the wheel and report. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", help="repeatable; default: all of a release")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel")
    parser.add_argument("--jobs", type=int, default=build.default_workers(), help="processes")
    options = parser.parse_args(argv)
    try:
        archs = build.resolve_archs(options.arch or build.WHEEL_ARCHS)
        jobs = build.own_jobs(archs)
        compile_missing(jobs, PREBUILT_DIR, options.jobs)
        files = tidy(jobs, PREBUILT_DIR)
        wheel = pack(options.out.resolve())
        check_content(wheel, files)
    except (CommError, RuntimeError) as error:
        print(f"build_wheel: {error}")
        return 1
    installed = sum(path.stat().st_size for path in PREBUILT_DIR.iterdir())
    print(
        f"{wheel}: {wheel.stat().st_size} bytes, {len(jobs)} kernels "
        f"({len(jobs) // len(archs)} for each of {', '.join(archs)}; {installed} bytes installed)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

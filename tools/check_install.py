"""Builds sdist and wheel, installs the wheel into a fresh environment, and tries it there.

The wheel is built from the unpacked sdist, with kernels for a few architectures. The environment
gets what the wheel needs except the CuTe DSL, so nothing can be compiled in it. Needs the DSL and
hatchling here, and pip's index for torch; no GPU.

Usage: python tools/check_install.py [--arch sm_90a ...] [--constraint FILE] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILER = "nvidia-cutlass-dsl"
LIMIT_S = 600.0

SDIST_HAS = (
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints/cpu.txt",
    "docs/README.md",
    "mkdocs.yml",
    "pcie_comm/__init__.py",
    "pcie_comm/py.typed",
    "pyproject.toml",
    "tests/conftest.py",
    "tools/build_wheel.py",
)
"""What someone who has only the sdist needs to build, test and read."""

TRIAL = ROOT / "tools" / "installed_trial.py"
TYPED = "import pcie_comm\nreveal_type(pcie_comm.local_world)\n"


class Failure(Exception):
    """A check that did not hold."""


def run(*command: object, cwd: Path) -> str:
    """Run a command without this tree on its module path; return what it printed.

    Raises:
        Failure: It fails, or takes longer than LIMIT_S.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise Failure(f"{' '.join(words)}: not done after {LIMIT_S} s") from error
    if done.returncode:
        raise Failure(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


class Times:
    """What took how long, in seconds."""

    def __init__(self) -> None:
        self.by_step: dict[str, float] = {}
        self._since = time.perf_counter()

    def mark(self, step: str) -> None:
        """Say that a step has ended."""
        now = time.perf_counter()
        self.by_step[step] = round(now - self._since, 2)
        self._since = now


def build_sdist(folder: Path) -> Path:
    """Build the sdist; return its path."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist; return its top folder.

    Raises:
        Failure: It lacks a file, or holds what no sdist should.
    """
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    lacking = [name for name in SDIST_HAS if not (top / name).exists()]
    extra = [str(path.relative_to(top)) for path in top.rglob("*.cubin")]
    if lacking or extra:
        raise Failure(f"{sdist.name}: lacking={lacking}, unwanted={extra[:4]}")
    return top


def needed(wheel: Path) -> list[str]:
    """Return what a wheel requires, without extras and without the compiler.

    Raises:
        Failure: It has no type marker.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if "pcie_comm/py.typed" not in names:
            raise Failure(f"{wheel.name} has no pcie_comm/py.typed")
        (name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and not line.startswith(COMPILER)]


def fresh(folder: Path, wheel: Path, constraint: Path | None) -> Path:
    """Make an environment with the wheel and what it needs; return its interpreter."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    limits = () if constraint is None else ("--constraint", constraint.resolve())
    run(*pip, "install", "--quiet", *limits, *needed(wheel), cwd=folder)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    return python


def check_types(python: Path, folder: Path) -> None:
    """Check that mypy finds the types of the installed package.

    Raises:
        Failure: It does not.
    """
    (folder / "typed.py").write_text(TYPED)
    said = run(sys.executable, "-m", "mypy", "--python-executable", python, "typed.py", cwd=folder)
    if "LocalWorld" not in said:
        raise Failure(f"mypy does not see the types: {said}")


def try_it(python: Path, folder: Path, archs: Sequence[str]) -> dict[str, object]:
    """Use the installed package; return what was measured.

    Raises:
        Failure: Something does not work, or would have to be compiled.
    """
    report: dict[str, object] = json.loads(run(python, TRIAL, *archs, cwd=folder))
    if not Path(str(report["package"])).is_relative_to(folder):
        raise Failure(f"imported from {report['package']}, not from the environment")
    if report["faults"] or not report["kernels"]:
        raise Failure(f"kernels: {report['kernels']}, faults: {report['faults']}")
    program = python.parent / "pcie-comm"
    demo = ("demo", "--device", "cpu", "--ranks", "2", "--rounds", "2")
    if "right: " not in run(program, *demo, cwd=folder):
        raise Failure("pcie-comm demo did not say that its results are right")
    if "CuTe DSL none" not in run(program, "doctor", cwd=folder):
        raise Failure("pcie-comm doctor did not say that the compiler is missing")
    return report


def check(folder: Path, archs: Sequence[str], constraint: Path | None) -> dict[str, object]:
    """Go through all steps; return sizes and times."""
    times = Times()
    sdist = build_sdist(folder)
    tree = unpack(sdist, folder / "unpacked")
    times.mark("sdist built and unpacked")
    chosen = [word for arch in archs for word in ("--arch", arch)]
    run(sys.executable, "tools/build_wheel.py", *chosen, "--out", folder, cwd=tree)
    (wheel,) = folder.glob("*.whl")
    times.mark("wheel built from it")
    python = fresh(folder / "fresh", wheel, constraint)
    times.mark("environment made and filled")
    trial = folder / "fresh" / "trial"
    trial.mkdir()
    check_types(python, trial)
    report = try_it(python, folder / "fresh", archs)
    times.mark("tried")
    sizes = {"sdist_nbytes": sdist.stat().st_size, "wheel_nbytes": wheel.stat().st_size}
    return {"archs": list(archs), **sizes, **report, "seconds": times.by_step}


def show(report: dict[str, object]) -> None:
    """Print what was found, a line each."""
    for name, value in report.items():
        print(f"{name}: {value}")


def main(argv: Sequence[str] | None = None) -> int:
    """Check and report. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", help="repeatable; default: sm_90a")
    parser.add_argument("--constraint", type=Path, help="versions for pip")
    parser.add_argument("--out", type=Path, help="also write the report as JSON")
    options = parser.parse_args(argv)
    archs = options.arch or ["sm_90a"]
    if wrong := [arch for arch in archs if not re.fullmatch(r"sm_\d+[af]?", arch)]:
        parser.error(f"arch={wrong} is no architecture")
    with tempfile.TemporaryDirectory(prefix="pcie_comm.install.") as folder:
        try:
            report = check(Path(folder).resolve(), archs, options.constraint)
        except Failure as error:
            print(f"check_install: {error}")
            return 1
    show(report)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

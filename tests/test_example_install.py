"""The example's package, installed with this one into a fresh environment, and used there.

Built with what this environment has, and without the network: what both need comes from here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "all_reduce_max"
LIMIT_S = 200.0

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling builds it"),
    # Not find_spec("pip"): for that setuptools gives distutils back to the standard library.
    pytest.mark.skipif(not any(distributions(name="pip")), reason="pip installs it"),
]

TRIAL = """
import sys
import pytest
from pcie_comm.bench.program import main as bench
from pcie_comm.cli import app

built = ["--op", "all_reduce_max", "--arch", "sm_90a", "--out", "kernels", "--jobs", "1"]
if "cutlass" in sys.argv:
    app(["compile", *built], standalone_mode=False)
small = ["--device", "cpu", "--ranks", "2", "--rows", "1", "--samples", "3", "--out", "bench.json"]
assert bench(["--op", "all_reduce_max", *small]) == 0
import all_reduce_max, pcie_comm
print("FOUND", pcie_comm.__file__, all_reduce_max.__file__)
sys.exit(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "--import-mode=importlib", "."]))
"""
"""Nothing but the entry point tells the first two of the plugin."""


def run(folder: Path, *words: object) -> str:
    """Run a command that does not see this tree; return what it printed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of an environment that has both packages, and sees what is installed here."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    here = sysconfig.get_path("purelib")
    (packages / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    trees = []
    for tree in (ROOT, EXAMPLE):  # copies: a build leaves nothing behind in this one
        kept = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "tests", "prebuilt")
        trees.append(shutil.copytree(tree, folder / "source" / tree.name, ignore=kept))
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    alone = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run(folder, *pip, "install", *alone, *trees)
    return python


def test_an_installed_plugin_is_found_built_timed_and_tested(python, tmp_path):
    shutil.copy(EXAMPLE / "test_all_reduce_max.py", tmp_path)
    compiler = "cutlass" if importlib.util.find_spec("cutlass") else ""
    said = run(tmp_path, python, "-c", TRIAL, compiler)
    for path in re.search(r"^FOUND (\S+) (\S+)$", said, re.MULTILINE).groups():
        assert Path(path).is_relative_to(python.parent.parent), "not the installed package"
    report = json.loads((tmp_path / "bench.json").read_text())
    assert {row["op"] for row in report["rows"]} == {"all_reduce_max"}
    assert report["correct"] is True
    if compiler:
        built = {path.name for path in (tmp_path / "kernels").glob("*.json")}
        assert built == {f"all_reduce_max-{name}.sm_90a.json" for name in ("push", "pull")}
    skipped = re.findall(r"SKIPPED \[(\d)\] .*: (.*)", said)
    assert {why for _, why in skipped} <= {"there is no cuda:0", "the CuTe DSL is not installed"}

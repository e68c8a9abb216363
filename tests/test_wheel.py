"""What a wheel holds, and that an installed one runs without a compiler.

Works on a copy of the tree, so that this tree's own prebuilt kernels, or none, stay as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="packs wheels")

ROOT = Path(__file__).resolve().parent.parent
PREBUILT = "pcie_comm/kernels/prebuilt"
ARCH, CAPABILITY = "sm_90a", (9, 0)


def run(*command: object, cwd: Path, **environ: str) -> str:
    """Run a command without this tree on its module path; return what it printed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environ
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_tree(folder: Path) -> Path:
    """Copy what a clone has, without what git ignores."""
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
    for name in ("pcie_comm", "tests", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in (".gitignore", "LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def pack(tree: Path) -> zipfile.ZipFile:
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", cwd=tree)
    (wheel,) = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel)


# --- what is in it -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with something planted where prebuilt kernels lie."""
    tree = copy_of_tree(tmp_path_factory.mktemp("sources"))
    (tree / PREBUILT).mkdir()
    for suffix in ("cubin", "json"):
        (tree / PREBUILT / f"planted.{suffix}").write_text("planted")
    (tree / "pcie_comm" / "module.pyc").write_text("ignored by git, and no kernel")
    return tree


@pytest.fixture(scope="module")
def packed(sources: Path) -> Iterator[zipfile.ZipFile]:
    with pack(sources) as wheel:
        yield wheel


def test_wheel_holds_the_package_and_its_kernels_and_nothing_else(sources, packed):
    names = set(packed.namelist())
    modules = {path.relative_to(sources).as_posix() for path in sources.glob("pcie_comm/**/*.py")}
    kernels = {f"{PREBUILT}/planted.cubin", f"{PREBUILT}/planted.json"}
    data = {"pcie_comm/py.typed", "pcie_comm/topology/host.schema.json"}
    wanted = {*data, *kernels, *modules}
    assert {name for name in names if ".dist-info/" not in name} == wanted
    facts = {Path(name).name for name in names if ".dist-info/" in name}
    assert facts == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "LICENSE"}


def test_wheel_says_what_it_needs_and_offers(packed):
    (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(packed.read(name).decode())
    needed = metadata.get_all("Requires-Dist") or []
    assert any(line.startswith("nvidia-cutlass-dsl") for line in needed)
    points = packed.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert "pcie-comm = pcie_comm.cli:main" in points


def test_tree_without_prebuilt_kernels_packs_too(tmp_path):
    with pack(copy_of_tree(tmp_path)) as wheel:
        names = wheel.namelist()
    assert "pcie_comm/kernels/store.py" in names
    assert not [name for name in names if name.startswith(PREBUILT)]


# --- an installed one --------------------------------------------------------------------------

INSTALLED = """
    import json, sys
    from pathlib import Path

    sys.modules["cutlass"] = None  # whoever imports it gets an ImportError
    import pcie_comm
    from pcie_comm.errors import CommError
    from pcie_comm.kernels.registry import collectives
    from pcie_comm.kernels.store import KernelStore

    cache = Path("cache")
    store = KernelStore(None, cache)
    capability = tuple(map(int, sys.argv[1:3]))
    errors = []
    for collective in collectives().values():
        for key in collective.variants():
            try:
                kernel = store.get(collective, key, capability)
            except CommError as error:
                errors.append(str(error))
            else:
                assert kernel.entry.encode() in kernel.cubin
    report = {
        "package": pcie_comm.__file__,
        "sources": store.sources,
        "errors": errors,
        "cached": cache.exists(),
    }
    print(json.dumps(report))
"""


class Installed:
    """A fresh environment with the wheel in it; what the wheel needs is that of this process."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.purelib = Path(run(self.python, "-c", where, cwd=folder).strip())
        options = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
        pip = (sys.executable, "-m", "pip", "--python", self.python)
        run(*pip, "install", *options, wheel, cwd=folder)
        paths = {path for path in sys.path if Path(path).name.endswith("-packages")}
        (self.purelib / "needed.pth").write_text("\n".join(sorted(paths)))

    def report(self, *capability: int) -> dict[str, object]:
        code = textwrap.dedent(INSTALLED)
        return json.loads(run(self.python, "-c", code, *capability, cwd=self.folder))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which a wheel was built, for one architecture."""
    pytest.importorskip("cutlass", reason="compiles kernels")
    tree = copy_of_tree(tmp_path_factory.mktemp("built"))
    said = run(sys.executable, "tools/build_wheel.py", "--arch", ARCH, cwd=tree)
    (tree / "first.txt").write_text(said)
    return tree


@pytest.fixture(scope="module")
def installed(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    (wheel,) = (tree / "dist").glob("*.whl")
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


slow = [pytest.mark.slow, pytest.mark.timeout(600)]


class TestInstalled:
    pytestmark = slow

    def test_every_kernel_comes_from_the_wheel_and_nothing_is_compiled(self, installed):
        report = installed.report(*CAPABILITY)
        assert Path(report["package"]).is_relative_to(installed.folder)
        assert report["errors"] == []
        assert set(report["sources"].values()) == {f"prebuilt for {ARCH}"}
        assert len(report["sources"]) > 30
        assert not report["cached"]

    def test_control_gpu_without_prebuilt_kernels_would_have_to_compile(self, installed):
        report = installed.report(12, 1)
        assert report["sources"] == {}
        assert len(report["errors"]) > 30
        assert all("CuTe DSL is missing" in error for error in report["errors"])

    def test_edited_kernel_in_an_installed_package_is_not_served_old_code(self, installed):
        file = installed.purelib / "pcie_comm" / "kernels" / "topk.py"
        before = file.read_bytes()
        file.write_bytes(before + b"# edited\n")
        try:
            report = installed.report(*CAPABILITY)
        finally:
            file.write_bytes(before)
        assert report["sources"] == {}
        assert all("passed over: built from other sources" in one for one in report["errors"])

    def test_installed_program_runs(self, installed):
        program = installed.folder / "venv" / "bin" / "pcie-comm"
        said = run(program, "demo", "--device", "cpu", "--rounds", "2", cwd=installed.folder)
        assert "right: " in said


class TestBuilt:
    pytestmark = slow

    def test_it_says_size_and_number(self, tree):
        (wheel,) = (tree / "dist").glob("*.whl")
        last = (tree / "first.txt").read_text().splitlines()[-1]
        count = len(list((tree / PREBUILT).glob("*.cubin")))
        start = (
            f"{wheel}: {wheel.stat().st_size} bytes, {count} kernels ({count} for each of {ARCH}"
        )
        assert last.startswith(start)

    def test_second_build_compiles_only_what_is_bad_and_gives_the_same_wheel(self, tree):
        (wheel,) = (tree / "dist").glob("*.whl")
        first = wheel.read_bytes()
        codes = sorted((tree / PREBUILT).glob("*.cubin"))
        times = {path: path.stat().st_mtime_ns for path in codes}
        codes[0].write_bytes(b"damaged")
        (tree / PREBUILT / "gone.sm_80.json").write_text("of a kernel that is no more")
        said = run(sys.executable, "tools/build_wheel.py", "--arch", ARCH, cwd=tree)
        assert f"kernels: 1 compiled, {len(codes) - 1} kept, " in said
        changed = [path for path in codes if path.stat().st_mtime_ns != times[path]]
        assert changed == [codes[0]]
        assert wheel.read_bytes() == first

    def test_error_is_one_line(self, tree):
        command = [sys.executable, "tools/build_wheel.py", "--arch", "sm_1"]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=100)
        assert done.returncode == 1
        (line,) = done.stdout.splitlines()
        assert line.startswith("build_wheel: arch='sm_1' is unknown to the DSL")

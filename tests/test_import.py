"""Importing pcie_comm starts nothing, and works where CUDA and the DSL are missing.

Each case runs in an interpreter of its own: an import cannot be taken back.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pcie_comm

ROOT = Path(__file__).resolve().parent.parent

# Stands in for a machine without the DSL, cuda-python and the driver's library.
BLOCKER = """
import ctypes, sys

class Blocker:
    blocked = ("cutlass", "cuda")

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)
        return None

class NoDriver(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if name and "libcuda.so" in str(name):
            raise OSError(f"{name}: cannot open shared object file (blocked)")
        super().__init__(name, *args, **kwargs)

sys.meta_path.insert(0, Blocker())
ctypes.CDLL = NoDriver
"""

# Reports what an import does beyond loading modules. What pcie_comm builds on is imported first:
# only its own doings count.
WATCHER = """
import json, os, sys, threading
import numpy, torch, torch.distributed

MODULE_FILES = (".py", ".pyc", ".so")
STARTS = ("ctypes.dlopen", "os.fork", "os.posix_spawn", "os.putenv", "os.unsetenv", "socket.bind",
          "socket.connect", "subprocess.Popen")
seen = []

def hook(event, args):
    if event == "open" and not str(args[0]).endswith(MODULE_FILES):
        seen.append(f"open {args[0]}")
    if event in STARTS:
        seen.append(f"{event} {args[0] if args else ''}")

before, threads, environ = set(sys.modules), threading.active_count(), dict(os.environ)
sys.addaudithook(hook)
import pcie_comm
if "__all__" in vars(pcie_comm):
    for name in pcie_comm.__all__:  # what is loaded when it is first used, too
        getattr(pcie_comm, name)
new = {name.partition(".")[0] for name in set(sys.modules) - before}
report = {
    "seen": list(seen),
    "new": sorted(new),
    "cuda_initialised": torch.cuda.is_initialized(),
    "threads": threading.active_count() - threads,
    "environ_changed": dict(os.environ) != environ,
}
print(json.dumps(report))
"""


def run_python(code: str, **environ: str) -> str:
    """Run code in a fresh interpreter that sees no CUDA device; return what it printed."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"} | environ
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def report() -> dict[str, object]:
    return json.loads(run_python(WATCHER).splitlines()[-1])


def test_import_opens_no_file_and_starts_nothing(report):
    assert report["seen"] == []
    assert report["threads"] == 0
    assert not report["environ_changed"]


def test_import_leaves_cuda_alone(report):
    assert not report["cuda_initialised"]
    assert not {"cuda", "cutlass"} & set(report["new"])


def test_watcher_sees_what_it_watches_for(tmp_path):
    package = tmp_path / "pcie_comm"
    package.mkdir()
    (tmp_path / "settings.txt").write_text("x")
    source = """
        import os, subprocess, sys, threading
        open({path!r}).close()
        subprocess.run(["true"])
        os.environ["PLANTED"] = "1"
        sys.modules["cutlass"] = os
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    """
    text = textwrap.dedent(source).format(path=str(tmp_path / "settings.txt"))
    (package / "__init__.py").write_text(text)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{WATCHER}"
    planted = json.loads(run_python(code).splitlines()[-1])
    assert f"open {tmp_path / 'settings.txt'}" in planted["seen"]
    assert any(line.startswith("subprocess.Popen") for line in planted["seen"])
    assert planted["environ_changed"]
    assert planted["threads"] == 1
    assert "cutlass" in planted["new"]


def test_import_works_without_cuda_python_dsl_and_driver():
    code = f"{BLOCKER}\nimport pcie_comm\nprint(sorted(pcie_comm.__all__))"
    assert "PcieDcpGroup" in run_python(code)


def test_torch_is_loaded_when_it_is_first_needed():
    code = "import sys, pcie_comm; print('torch' in sys.modules, pcie_comm.local_world.__name__)"
    assert run_python(code).split() == ["False", "local_world"]


def test_names_are_listed_before_they_are_loaded():
    code = "import pcie_comm; print(set(pcie_comm.__all__) <= set(dir(pcie_comm)))"
    assert run_python(code).strip() == "True"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pcie_comm.nothing


@pytest.mark.parametrize(
    "statement",
    ["import cutlass", "import cuda.bindings.driver", "import ctypes; ctypes.CDLL('libcuda.so.1')"],
)
def test_blocker_blocks(statement):
    guarded = f"try:\n    {statement}\nexcept (ImportError, OSError) as error:\n    print(error)"
    assert "(blocked)" in run_python(f"{BLOCKER}\n{guarded}")


def test_every_public_name_exists_once():
    assert len(pcie_comm.__all__) == len(set(pcie_comm.__all__))
    assert [name for name in pcie_comm.__all__ if not hasattr(pcie_comm, name)] == []


def undocumented(name: str) -> list[str]:
    """The name itself and, for a class of ours, its own public methods without a docstring."""
    value = getattr(pcie_comm, name)
    missing = [] if inspect.getdoc(value) else [name]
    if inspect.isclass(value):
        own = ((n, member) for n, member in vars(value).items() if not n.startswith("_"))
        kinds = (property, staticmethod, classmethod)
        called = [n for n, member in own if inspect.isroutine(member) or isinstance(member, kinds)]
        missing += [f"{name}.{n}" for n in called if not inspect.getdoc(getattr(value, n))]
    return missing


def test_every_public_name_is_documented():
    assert [fault for name in pcie_comm.__all__ for fault in undocumented(name)] == []

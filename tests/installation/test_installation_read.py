"""What is read of an installation: fake files, a fake libcuda, and this process itself."""

from __future__ import annotations

import ctypes
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pcie_comm import cli
from pcie_comm.installation import packages, read
from pcie_comm.installation.cuda_probe import probe
from pcie_comm.installation.read import count_kernels

ROOT = Path(__file__).resolve().parent.parent.parent
NO_DEVICE = 100


class FakeCuda:
    """The part of libcuda that is asked, with these GPUs."""

    def __init__(self, *capabilities, version=13000, fails="", start=0):
        self.capabilities = capabilities
        self.version = version
        self.fails = fails
        self.start = start

    def _answer(self, name, place, value):
        if self.fails == name:
            return 999
        place._obj.value = value
        return 0

    def cuDriverGetVersion(self, place):
        return self._answer("version", place, self.version)

    def cuInit(self, flags):
        return self.start

    def cuGetErrorName(self, status, place):
        return self._answer("name", place, b"CUDA_ERROR_NO_DEVICE")

    def cuDeviceGetCount(self, place):
        return self._answer("count", place, len(self.capabilities))

    def cuDeviceGet(self, place, index):
        return self._answer("device", place, index)

    def cuDeviceGetAttribute(self, place, attribute, device):
        which = {75: 0, 76: 1}[attribute]
        return self._answer("attribute", place, self.capabilities[device.value][which])


def no_library(name):
    raise OSError(f"{name}: cannot open shared object file")


class TestCuda:
    def test_gpus_and_version(self):
        answer = probe(lambda name: FakeCuda((12, 0), (9, 0), version=12080))
        assert answer == {"library": "12.8", "start": "", "capabilities": ((12, 0), (9, 0))}

    def test_no_library(self):
        assert probe(no_library) == {"library": "", "start": None, "capabilities": None}

    def test_a_driver_that_does_not_start_is_named(self):
        answer = probe(lambda name: FakeCuda(start=NO_DEVICE))
        assert answer["start"] == "CUDA_ERROR_NO_DEVICE"
        answer = probe(lambda name: FakeCuda(start=NO_DEVICE, fails="name"))
        assert answer["start"] == "CUDA error 100"

    @pytest.mark.parametrize("call", ["count", "device", "attribute"])
    def test_calls_that_fail_leave_the_gpus_unknown(self, call):
        assert probe(lambda name: FakeCuda((9, 0), fails=call))["capabilities"] is None

    def test_a_version_that_is_not_given_is_unknown(self):
        assert probe(lambda name: FakeCuda((9, 0), fails="version"))["library"] is None


def host(tmp_path, ipc="4026531839", pid="4026531836", shm=True):
    """A root folder with what is read of /proc, /sys and /dev."""
    spaces = tmp_path / "proc" / "self" / "ns"
    spaces.mkdir(parents=True)
    (spaces / "ipc").symlink_to(f"ipc:[{ipc}]")
    (spaces / "pid").symlink_to(f"pid:[{pid}]")
    if shm:
        (tmp_path / "dev" / "shm").mkdir(parents=True)
    version = tmp_path / "proc" / "driver" / "nvidia" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.159.04  Release Build\n")
    return tmp_path


class TestSystem:
    def test_of_a_host(self, tmp_path):
        facts = read(2, host(tmp_path), lambda name: FakeCuda((9, 0)))
        assert (facts.ipc_namespace, facts.pid_namespace) == ("host", "host")
        assert facts.driver == "580.159.04"
        assert facts.shm_nbytes > 0
        assert facts.capabilities == ((9, 0),)

    def test_of_a_container(self, tmp_path):
        facts = read(2, host(tmp_path, ipc="4026532001", pid="4026532003", shm=False), no_library)
        assert (facts.ipc_namespace, facts.pid_namespace) == ("private", "private")
        assert facts.shm_nbytes == -1

    def test_of_an_empty_folder_namespaces_are_unknown(self, tmp_path):
        facts = read(None, tmp_path, no_library)
        assert facts.ipc_namespace is None
        assert "/proc/self/ns/ipc" in facts.why("ipc_namespace")
        assert facts.driver == ""
        assert facts.why("gpus")

    def test_limits_are_those_of_the_process(self, tmp_path):
        facts = read(0, tmp_path, no_library)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert facts.files == (-1 if soft == resource.RLIM_INFINITY else soft)

    def test_wrong_settings_leave_what_follows_from_them_unknown(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PCIE_COMM_SLOT_NBYTES", "many")
        facts = read(0, tmp_path, no_library)
        assert facts.slab_nbytes is None
        assert "PCIE_COMM_SLOT_NBYTES='many'" in facts.why("slab_nbytes")

    def test_own_kernels_are_counted(self, tmp_path, monkeypatch):
        for name in ("a.sm_90a.json", "b.sm_90a.json", "a.sm_86.json", "a.sm_86.123.cubin", "x"):
            (tmp_path / name).write_text("{}")
        monkeypatch.setenv("PCIE_COMM_KERNELS", str(tmp_path))
        assert read(0, tmp_path, no_library).own_kernels == {"sm_90a": 2, "sm_86": 1}
        assert count_kernels(tmp_path / "none") == {}


class TestPackages:
    def test_ranges_are_those_of_the_project(self):
        text = (ROOT / "pyproject.toml").read_text().replace("[cu13]", "")
        needed = {match[1] for match in re.finditer(r'^  "([^";]+)', text, re.MULTILINE)}
        assert {packages.wanted(name) for name in packages.RANGES} <= needed

    @pytest.mark.parametrize(
        ("version", "good"),
        [("2.6.0", True), ("2.13.0+cpu", True), ("2.5.9", False), ("3.0", False), ("x", False)],
    )
    def test_fits(self, version, good):
        assert packages.fits("torch", version) is good

    @pytest.mark.parametrize(
        ("text", "cuda"),
        [
            ("cuda: Optional[str] = '13.0'\n", "13.0"),
            ("cuda = '12.8'\n", "12.8"),
            ("cuda: Optional[str] = None\n", ""),
            ("__version__ = '2.6'\n", None),
        ],
    )
    def test_cuda_of_torch(self, tmp_path, text, cuda):
        (tmp_path / "version.py").write_text(text)
        assert packages.torch_cuda(tmp_path) == cuda

    def test_cuda_of_torch_is_that_which_torch_reports(self):
        import torch

        assert packages.torch_cuda() == (torch.version.cuda or "")

    def test_toolkit(self, tmp_path):
        assert packages.toolkit(tmp_path / "none") == ""
        assert packages.toolkit(tmp_path) is None
        (tmp_path / "version.json").write_text(json.dumps({"cuda": {"version": "13.0.1"}}))
        assert packages.toolkit(tmp_path) == "13.0.1"

    def test_a_missing_distribution(self):
        assert packages.version_of("no-such-distribution-here") == ""


WITHOUT = """
import importlib.metadata, importlib.util, sys

gone = {"torch", "cuda", "cutlass", "numpy", "pynvml"}
names = {"torch", "cuda-bindings", "cuda-python", "nvidia-cutlass-dsl"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in gone:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
find_spec, version = importlib.util.find_spec, importlib.metadata.version
importlib.util.find_spec = lambda name: None if name in gone else find_spec(name)

def without(name):
    if name in names:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

importlib.metadata.version = without
sys.argv = ["pcie-comm", "doctor"]
from pcie_comm.cli import main
main()
"""


class TestProgram:
    def test_it_works_where_torch_is_missing(self):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT], capture_output=True, text=True, cwd=ROOT, timeout=100
        )
        assert done.returncode == 1, done.stderr
        assert "error: torch: this installation" in done.stdout
        assert "pip install 'torch>=2.6,<3'" in done.stdout
        assert "torch none" in done.stdout

    def test_this_installation_is_judged(self):
        result = CliRunner().invoke(cli.app, ["doctor", "--json"])
        data = json.loads(result.stdout)
        (listed,) = (item for item in data["findings"] if item["id"] == "versions")
        assert f"Python {'.'.join(map(str, sys.version_info[:3]))}" in listed["seen"]

    def test_another_host_is_not_blamed_for_it(self, tmp_path):
        (tmp_path / "sys" / "bus" / "pci" / "devices").mkdir(parents=True)
        result = CliRunner().invoke(cli.app, ["doctor", "--from", str(tmp_path), "--json"])
        assert "versions" not in {item["id"] for item in json.loads(result.stdout)["findings"]}


def test_probe_loads_the_library_by_its_name():
    seen = []

    def load(name):
        seen.append(name)
        raise OSError

    probe(load)
    assert seen == ["libcuda.so.1"]
    assert ctypes.CDLL  # the default

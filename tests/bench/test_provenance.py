"""Where figures come from: all of it is said, and no serial number."""

from __future__ import annotations

import hashlib
import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from pcie_comm.bench import provenance

CPU = torch.device("cpu")


@pytest.fixture
def smi(monkeypatch):
    """Let nvidia-smi print a text, or be missing."""

    def install(text):
        class Process:
            def __init__(self, command, **options):
                if text is None:
                    raise FileNotFoundError("nvidia-smi")
                assert command[0] == "nvidia-smi"
                self.stdout = SimpleNamespace(read=lambda: text)
                self.polls = iter([None, 0])

            def poll(self):
                return next(self.polls)

            def __enter__(self):
                return self

            def __exit__(self, *exc):
                pass

        monkeypatch.setattr(subprocess, "Popen", Process)
        monkeypatch.setattr(provenance, "spin", lambda *arguments: None)

    return install


def test_a_cpu_run_names_its_source_and_software():
    found = provenance.gather([CPU], "pcie-comm bench --device cpu")
    assert found["command"] == "pcie-comm bench --device cpu"
    assert found["device"] == "cpu"
    assert found["torch"] == torch.__version__
    assert found["clocks_before"] == "no GPU takes part"
    provenance.complete(found, CPU)
    assert found["clocks_after"] == "no GPU takes part"
    assert isinstance(found["kernels"], dict)
    json.dumps(found)


def test_the_revision_may_be_told(monkeypatch):
    monkeypatch.setenv("PCIE_COMM_REVISION", "abc123")
    assert provenance.source()["revision"] == "abc123"
    monkeypatch.delenv("PCIE_COMM_REVISION")
    assert provenance.source()["revision"]


def test_the_hash_of_the_package_changes_with_its_files(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    first = provenance.source()["package_sha256"]
    assert provenance.source()["package_sha256"] == first
    (tmp_path / "a.py").write_text("x = 2\n")
    assert provenance.source()["package_sha256"] != first


def test_clocks_are_asked_for_while_the_gpu_works(smi):
    values = ["NVIDIA H200", "1980 MHz", "1980 MHz", "3201 MHz", "P0", "40", "120.5 W", "5", "16"]
    smi(", ".join(values) + "\n")
    (gpu,) = provenance.clocks(torch.device("cuda", 0))
    assert gpu == dict(zip(provenance.QUERY.split(","), values, strict=True))
    assert gpu["clocks.sm"] == "1980 MHz"


@pytest.mark.parametrize(("text", "said"), [(None, "not available"), ("No devices", "No devices")])
def test_without_nvidia_smi_the_report_says_so(smi, text, said):
    smi(text)
    assert said in provenance.clocks(torch.device("cuda", 0))


def test_nothing_asked_for_identifies_a_machine():
    asked = provenance.QUERY.lower()
    assert not any(word in asked for word in ("uuid", "serial", "bus_id"))


def test_kernels_are_named_with_the_hash_of_their_code(monkeypatch):
    kernel = SimpleNamespace(key="gather-push-16", arch="sm_90a", cubin=b"code")
    monkeypatch.setattr(provenance, "loaded_kernels", lambda: [kernel])
    found: dict = {}
    provenance.complete(found, CPU)
    assert found["kernels"] == {"gather-push-16.sm_90a": hashlib.sha256(b"code").hexdigest()}


def test_a_command_that_is_not_there_is_no_error():
    assert provenance.output_of("no-such-program").startswith("not available")

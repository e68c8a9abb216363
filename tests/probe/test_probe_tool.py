"""tools/probe_topology.py, and what builds the probes' kernels."""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import fake_child
import pytest

from pcie_comm import build
from pcie_comm.errors import UnsupportedError
from pcie_comm.kernels.collective import PlanInfo, TensorMeta
from pcie_comm.kernels.registry import collectives
from pcie_comm.probe import runner
from pcie_comm.probe.kernels import PROBES

TOOL = Path(__file__).resolve().parents[2] / "tools" / "probe_topology.py"
ARCH = "sm_90a"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("probe_topology", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "timed_progress", lambda *_: nullcontext(lambda *_: None))
    return module


def test_it_writes_what_it_found(tool, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runner, "child", fake_child)
    report, page = tmp_path / "new" / "report.json", tmp_path / "page.html"
    code = tool.main(["--quick", "--json", str(report), "--html", str(page)])
    data = json.loads(report.read_text())
    assert len(data["checks"]) == 22 and data["measurements"]
    assert page.read_text().startswith("<!doctype html>")
    assert "litmus push" in capsys.readouterr().out
    errors = [one for one in tool.examine(tool.Case(tool.collect()))[0] if one.severity == "error"]
    assert code == int(bool(errors))


def test_without_cuda_it_says_why(tool, monkeypatch, capsys):
    def refuse(*arguments):
        raise UnsupportedError("no driver", reason="no driver")

    monkeypatch.setattr(tool, "probe", refuse)
    assert tool.main([]) == 2
    assert capsys.readouterr().err == "probe_topology: UnsupportedError: no driver\n"


def test_the_builder_knows_the_probes_when_it_is_asked_to():
    usual = build.jobs([ARCH])
    assert not {job.key.op for job in usual} & set(PROBES)
    more = build.jobs([ARCH], ["probe_fill"], probes=True)
    assert {job.key.op for job in more} == set(PROBES)
    assert len(more) == len({str(job.key) for job in more}) == 8
    assert not {job.key.op for job in build.own_jobs([ARCH])} & set(PROBES)


def test_they_are_no_collectives():
    assert not set(PROBES) & set(collectives())
    info, meta = PlanInfo(0, 2, "push", 1 << 20, 64, 16), TensorMeta((4,), "float32", (1,), 4)
    for probe in PROBES.values():
        with pytest.raises(UnsupportedError, match="no collective"):
            probe.plan(info, meta)

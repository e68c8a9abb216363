"""A warp is together again behind every wait; with the control that was a hang on an H200."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

from cutlass import cute
from machine_code import Kind, caught, report
from router_rows import SPECS
from sass_code import Sass

from pcie_comm.calls import fused_collective
from pcie_comm.kernels import compile as compiler

ROUTER = fused_collective(SPECS["gpt-oss-20b"])
KEY = next(key for key in ROUTER.variants() if key.variant[:2] == ("tagged", 8))


def findings(cuobjdump: str, arch: str) -> list[str]:
    kernel = compiler.build(ROUTER, KEY, arch)
    made = report.MachineCode(kernel, report.dump(kernel.cubin, cuobjdump))
    return Sass(made.code, Kind.of(str(KEY), arch)).findings()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_a_router_of_few_experts_meets_behind_its_wait(cuobjdump, arch):
    assert findings(cuobjdump, arch) == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_control_without_the_meeting_it_is_found(cuobjdump, arch, monkeypatch):
    monkeypatch.setattr(cute.arch, "sync_warp", lambda *mask, **at: None)
    assert caught("a parted warp enters a branch", findings(cuobjdump, arch))

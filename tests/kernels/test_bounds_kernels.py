"""The kernels of tools/bounds: the bounds are gone, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

from machine_code import Kind, report
from ptx_code import Ptx
from sass_code import Sass

from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels.collective import KernelKey
from pcie_comm.kernels.registry import find
from pcie_comm.kernels.store import KernelStore

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from bounds import kernels

ARCH = "sm_90a"
KEYS = [
    KernelKey("all_gather_pair", ("tagged", 8)),
    KernelKey("all_gather_pair_kimi_topk", ("tagged", 8, "torch")),
    KernelKey("all_gather_pair", ("push", 16)),
]
GONE = [
    "no claim of the poison word",
    "no release of the status code, 32 bits",
    "a wait watches abort and poison word, here 0 words",
]
NOTE = "no note that the launch has begun"
OF_UNITS = "a wait for units watches abort and poison word, here 0 words"
TRACES = ("%globaltimer", "atom.", "ld.relaxed.sys.global.u32", "st.release.sys.global.u32")


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_rules_miss_the_bounds_and_nothing_else(key, cuobjdump):
    """Barriers, release, acquire and tags are where docs/protocol.md needs them."""
    kernel = kernels.build(key, ARCH)
    kind = Kind.of(kernel.key, ARCH)
    wanted = [*GONE, *([OF_UNITS] if kind.tagged else []), NOTE]
    assert Ptx(kernel.ptx, kind).findings() == wanted
    dump = report.dump(kernel.cubin, cuobjdump)
    assert Sass(report.instructions(dump), kind).findings() == wanted


def test_the_library_has_bounds_and_keeps_them():
    key = KEYS[0]
    before = compiler.build(find(key.op), key, ARCH)
    without = kernels.build(key, ARCH)
    assert compiler.build(find(key.op), key, ARCH).cubin == before.cubin
    for trace in TRACES:
        assert trace in before.ptx, trace
        assert trace not in without.ptx, trace


def test_one_command_builds_all_that_a_comparison_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "keys", lambda: KEYS)
    assert kernels.build_all(ARCH, tmp_path) == KEYS
    store = KernelStore(tmp_path, tmp_path / "cache")
    for key in KEYS:
        store.get(find(key.op), key, (9, 0))
    assert set(store.sources.values()) == {f"ahead of time, {tmp_path}"}

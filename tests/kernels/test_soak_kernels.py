"""The kernels of tools/soak: delays break no rule of order, controls break exactly theirs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

from machine_code import Kind, report
from ptx_code import Ptx
from sass_code import Sass

from pcie_comm.errors import CompileError
from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels.collective import KernelKey
from pcie_comm.kernels.registry import find
from pcie_comm.kernels.store import KernelStore, staleness

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from soak import kernels

ARCH = "sm_90a"
KEYS = [
    KernelKey("all_gather_pair", ("push", 16)),
    KernelKey("all_gather_heads", ("pull", 16)),
    KernelKey("all_gather_pair_kimi_topk", ("push", 16, "torch")),
    KernelKey("all_gather_heads", ("tagged", 8)),
    KernelKey("all_gather_pair_kimi_topk", ("tagged", 8, "torch")),
]
EARLY = {
    "ptx": {
        False: [r"release before the first barrier: st\.release\.sys\.global\.u64.*"],
        True: [r"forbidden instruction: st\.relaxed\.sys\.global\.u32", "no store of a unit"],
    },
    "sass": {
        False: [r"release before the first barrier: .*STG\.E\.64\.STRONG\.SYS.*"],
        True: [r"\d+ strong stores without a fence before them", "no store of a unit"],
    },
}
"""What must be said of `early_flag`, and nothing else: by kind of code, by tagged or not."""


def assert_findings(found: list[str], wanted: list[str]) -> None:
    assert len(found) == len(wanted), found
    assert all(re.fullmatch(w, f) for w, f in zip(wanted, found, strict=True)), found


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("variant", kernels.VARIANTS)
def test_exactly_the_intended_rule_is_broken(variant, key, cuobjdump):
    """No rule is about slots: `one_slot` is an order of instructions that is right."""
    kernel = kernels.build(variant, key, ARCH)
    kind = Kind.of(kernel.key, ARCH)
    wanted = {"ptx": [], "sass": []}
    if variant == "early_flag":
        wanted = {code: EARLY[code][kind.tagged] for code in EARLY}
    assert_findings(Ptx(kernel.ptx, kind).findings(), wanted["ptx"])
    dump = report.dump(kernel.cubin, cuobjdump)
    assert_findings(Sass(report.instructions(dump), kind).findings(), wanted["sass"])


@pytest.mark.parametrize("key", KEYS[1:4:2], ids=str)
def test_variants_differ_from_the_library_and_leave_it_alone(key):
    plain = compiler.build(find(key.op), key, ARCH)
    ptx = {variant: kernels.build(variant, key, ARCH).ptx for variant in kernels.VARIANTS}
    assert compiler.build(find(key.op), key, ARCH).cubin == plain.cubin
    timers = {variant: text.count("%globaltimer") for variant, text in ptx.items()}
    assert all(count > plain.ptx.count("%globaltimer") for count in timers.values())
    assert len({*ptx.values(), plain.ptx}) == 4


def test_the_store_takes_them_for_its_own(tmp_path):
    key = KEYS[1]
    kernel = kernels.build("one_slot", key, ARCH)
    assert staleness(kernel, find(key.op)) == ""
    compiler.write(kernel, tmp_path)
    store = KernelStore(tmp_path, tmp_path / "cache")
    assert store.get(find(key.op), key, (9, 0)).cubin == kernel.cubin
    assert store.sources == {str(key): f"ahead of time, {tmp_path}"}


def test_an_edited_source_makes_them_stale(tmp_path, monkeypatch):
    key = KEYS[1]
    compiler.write(kernels.build("delay", key, ARCH), tmp_path)
    monkeypatch.setattr(compiler, "_package_sources", lambda: b"edited")
    with pytest.raises(CompileError, match="other sources"):
        KernelStore(tmp_path, tmp_path / "cache").get(find(key.op), key, (9, 0))

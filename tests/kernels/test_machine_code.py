"""PTX and SASS of every kernel for every architecture that CI compiles, and the checks' controls.

What is checked: no spills and no local memory; release and acquire at system scope, with the block
barriers of docs/protocol.md around them; peer memory is loaded relaxed at system scope, stored
plainly, and never meets an atomic, a reduction or the read-only path.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

from machine_code import Role, caught, report
from ptx_code import Ptx
from sass_code import Sass, usage_findings

from pcie_comm import build
from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels import primitives
from pcie_comm.kernels.registry import KernelKey, find

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "evidence" / "kernels.json"
REMEDY = f"python tools/kernel_report.py --out {RECORD.relative_to(ROOT)}"

pytestmark = pytest.mark.timeout(300)  # the first test waits until all kernels are compiled

JOBS = {f"{job.key}-{job.arch}": job for job in report.own_jobs(report.ARCHS)}
SILENT = {"kimi_topk16"}
FUSED = "all_gather_pair_kimi_topk"
MOST_FUSED_NBYTES = 26_000
"""Machine code of a fused kernel; 23,680 bytes at most were measured (docs/evidence)."""

PLAIN = KernelKey("all_gather_heads", ("pull", 16))
CONTROL_ARCHS = ("sm_80", "sm_120a")


@pytest.fixture(scope="session")
def program() -> str:
    return report.cuobjdump() or pytest.skip("cuobjdump is not installed")


@pytest.fixture(scope="session")
def codes(program):
    """Every kernel of this package for every architecture, compiled and disassembled once."""
    made = report.compile_all(list(JOBS.values()), build.default_workers(), program)
    return dict(zip(JOBS, made, strict=True))


@pytest.fixture(params=JOBS)
def code(codes, request):
    return codes[request.param]


def communicates(code) -> bool:
    return code.kernel.key.split("-")[0] not in SILENT


def sass(code) -> Sass:
    return Sass(report.instructions(code.dump))


# --- every kernel ------------------------------------------------------------------------------


def test_no_spill_and_no_local_memory(code):
    usage = report.resources(code.dump)
    assert usage_findings(usage) == []
    assert usage["REG"] == build.max_registers(code.kernel.cubin)


def test_ptx_keeps_the_rules(code):
    assert Ptx(code.kernel.ptx).findings(communicates=communicates(code)) == []


def test_sass_keeps_the_rules(code):
    assert sass(code).findings(communicates=communicates(code)) == []


def test_ptxas_keeps_every_access_at_system_scope(code):
    ptx, machine = Ptx(code.kernel.ptx).program(), sass(code).program()
    assert bool(ptx.places(Role.RELEASE)) == communicates(code)
    for role in (Role.RELEASE, Role.STATUS, Role.ACQUIRE):
        assert len(machine.places(role)) == len(ptx.places(role)), role
    assert len(machine.places(Role.RELAXED)) >= len(ptx.places(Role.RELAXED))


def test_fused_kernels_stay_small(codes):
    sizes = {
        name: report.instructions(code.dump)[-1].address + report.INSTRUCTION_NBYTES
        for name, code in codes.items()
        if JOBS[name].key.op == FUSED
    }
    assert {name: size for name, size in sizes.items() if size > MOST_FUSED_NBYTES} == {}
    largest = max(sizes.values())
    assert largest * 1.2 > MOST_FUSED_NBYTES, "the bound says nothing any more: lower it"


def test_record_is_that_of_this_tree(codes):
    here, recorded = report.record(codes.values()), json.loads(RECORD.read_bytes())
    names = {name: set(archs) for name, archs in here["kernels"].items()}
    assert {name: set(archs) for name, archs in recorded["kernels"].items()} == names, REMEDY
    versions = ("dsl", "compiler")
    if any(here[one] != recorded[one] for one in versions):
        pytest.skip(f"recorded with other versions: {[recorded[one] for one in versions]}")
    assert recorded == here, REMEDY


def test_record_has_a_line_per_kernel(codes):
    content = report.record(codes.values())
    text = report.text_of(content)
    assert json.loads(text) == content
    assert sum('"sm_80": [' in line for line in text.splitlines()) == len(content["kernels"])


# --- controls: kernels broken on purpose -------------------------------------------------------


def swap(old: str, new: str) -> Callable[[str, int], str]:
    return lambda text, barriers: text.replace(old, new)


def without_barrier(number: int) -> Callable[[str, int], str]:
    def change(text: str, barriers: int) -> str:
        whole = "barrier.cta.red.and.pred q, 0, p;"
        return text.replace(whole, "mov.pred q, p;") if barriers == number else text

    return change


@dataclass(frozen=True)
class Broken:
    """A fault in the primitives, and what must be said of it; None: that code cannot show it."""

    change: Callable[[str, int], str]
    ptx: str
    sass: str | None
    key: KernelKey = PLAIN


PACK, SIGNAL, POLL = "ld.relaxed.sys.global.v4", "st.release.sys.global.u64", "ld.acquire.sys"
CLAIM = "atom.relaxed.gpu.global.cas.b32 $0, [$1], 0, $2;"
BROKEN = {
    "signal without release": Broken(
        swap(SIGNAL, "st.relaxed.sys.global.u64"), "no release of a flag", "without a fence"
    ),
    "signal for this device only": Broken(
        swap(SIGNAL, "st.release.gpu.global.u64"), "no release of a flag", r"STG\S+STRONG.GPU"
    ),
    "status code without release": Broken(
        swap("st.release.sys.global.u32", "st.global.u32"), "no release of the status", "no release"
    ),
    "poll without acquire": Broken(swap(POLL, "ld.relaxed.sys"), "no acquire", "no acquire"),
    "poll of this device only": Broken(
        swap(POLL, "ld.acquire.gpu"), "no acquire", r"LDG\S+STRONG.GPU"
    ),
    "peer load through the read-only path": Broken(
        swap(PACK, "ld.global.nc.v4"), "forbidden .*: ld.global.nc", r"forbidden .*CONSTANT"
    ),
    "weak peer load": Broken(
        swap(PACK, "ld.global.v4"), "not for memory of others: .*ld.global.v4", "nothing is collect"
    ),
    "weak load of a peer's record": Broken(
        swap("ld.relaxed.sys.global.u64", "ld.global.u64"),
        "not for memory of others: ld.global.u64",
        None,
        KernelKey(FUSED, ("push", 16, "vllm")),
    ),
    "volatile peer load": Broken(swap(PACK, "ld.volatile.global.v4"), "ld.volatile.global", None),
    "flag raised by a reduction": Broken(
        swap(SIGNAL, "red.release.sys.global.add.u64"), "forbidden .*: red", "forbidden .*: RED"
    ),
    "atomic add": Broken(
        swap(CLAIM, "atom.relaxed.gpu.global.add.u32 $0, [$1], $2;"),
        "forbidden .*: atom.relaxed.gpu.global.add",
        "forbidden .*: ATOMG.E.ADD",
    ),
    "claim of a peer's word": Broken(
        swap(
            f"{SIGNAL} [$0], $1;",
            "{\n.reg .b32 t;\natom.relaxed.gpu.global.cas.b32 t, [$0], 0, 1;\n"
            f"{SIGNAL} [$0], $1;\n}}",
        ),
        "not for memory of others: atom",
        None,
    ),
    "fence of one's own": Broken(
        swap(f"{POLL}.global.u64 $0, [$1];", f"fence.sc.sys;\n{POLL}.global.u64 $0, [$1];"),
        "forbidden .*: fence.sc.sys",
        "forbidden .*: MEMBAR.SC.SYS",
    ),
    "no barrier before the signal": Broken(
        without_barrier(1), "no barrier between staging and release", "release before the first"
    ),
    "no barrier behind the wait": Broken(
        without_barrier(2),
        "no barrier between acquire and collecting",
        "no barrier between acquire and collecting",
    ),
    "local memory": Broken(
        swap(
            f"{SIGNAL} [$0], $1;",
            "{\n.local .align 8 .b64 spill;\nst.volatile.local.u64 [spill], $1;\n"
            f"{SIGNAL} [$0], $1;\n}}",
        ),
        "forbidden .*: st.volatile.local",
        "local memory is used",
    ),
}


@pytest.mark.parametrize("arch", CONTROL_ARCHS)
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_broken_kernel_is_caught(program, monkeypatch, broken, arch):
    plain, seen = primitives._asm, []

    def changed(result, operands, text, *rest, **options):
        seen.append(text)
        barriers = sum("barrier.cta" in one for one in seen)
        return plain(result, operands, broken.change(text, barriers), *rest, **options)

    monkeypatch.setattr(primitives, "_asm", changed)
    kernel = compiler.build(find(broken.key.op), broken.key, arch)
    assert caught(broken.ptx, Ptx(kernel.ptx).findings(communicates=True))
    dump = report.dump(kernel.cubin, program)
    found = Sass(report.instructions(dump)).findings(communicates=True)
    if broken.sass:
        assert caught(broken.sass, found)
    if broken is BROKEN["local memory"]:
        assert caught("STACK", usage_findings(report.resources(dump)))

"""Kernels broken on purpose, and whether the rules of test_machine_code find what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

from cutlass import Uint32, cute
from machine_code import Kind, caught, report
from ptx_code import Ptx
from sass_code import Sass, usage_findings

from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels import primitives, protocol, tagged
from pcie_comm.kernels.collective import KernelKey
from pcie_comm.kernels.registry import find

PLAIN = KernelKey("all_gather_heads", ("pull", 16))
TAGGED = KernelKey("all_gather_heads", ("tagged", 8))
FUSED = KernelKey("all_gather_pair_kimi_topk", ("push", 16, "vllm"))
FUSED_TAGGED = KernelKey(FUSED.op, ("tagged", 8, "vllm"))
SILENT = KernelKey("kimi_topk16", ("torch",))
WITH_OVERLAP = ("sm_120a",)


@dataclass(frozen=True)
class Broken:
    """A kernel with a fault, and what must be said of it; None: that code cannot show it.

    `change` gets the text of a primitive and how many block barriers there were so far, `replaced`
    are device functions that others take the place of.
    """

    ptx: str
    sass: str | None
    change: Callable[[str, int], str] = lambda text, barriers: text
    key: KernelKey = PLAIN
    archs: tuple[str, ...] = ("sm_80", *WITH_OVERLAP)
    replaced: tuple[tuple[object, str, Callable], ...] = ()


def swap(old: str, new: str) -> Callable[[str, int], str]:
    return lambda text, barriers: text.replace(old, new)


def without_barrier(number: int) -> Callable[[str, int], str]:
    def change(text: str, barriers: int) -> str:
        whole = "barrier.cta.red.and.aligned.pred q, 0, p;"
        return text.replace(whole, "mov.pred q, p;") if barriers == number else text

    return change


PACK, SIGNAL, POLL = "ld.relaxed.sys.global.v4", "st.release.sys.global.u64", "ld.acquire.sys"
CLAIM = "atom.relaxed.gpu.global.cas.b32 $0, [$1], 0, $2;"
STAGED = {
    "signal without release": Broken(
        "no release of a flag", "without a fence", swap(SIGNAL, "st.relaxed.sys.global.u64")
    ),
    "signal for this device only": Broken(
        "no release of a flag", r"STG\S+STRONG.GPU", swap(SIGNAL, "st.release.gpu.global.u64")
    ),
    "status code without release": Broken(
        "no release of the status", "no release", swap("st.release.sys.global.u32", "st.global.u32")
    ),
    "poll without acquire": Broken("no acquire", "no acquire", swap(POLL, "ld.relaxed.sys")),
    "poll of this device only": Broken(
        "no acquire", r"LDG\S+STRONG.GPU", swap(POLL, "ld.acquire.gpu")
    ),
    "peer load through the read-only path": Broken(
        "forbidden .*: ld.global.nc", r"forbidden .*CONSTANT", swap(PACK, "ld.global.nc.v4")
    ),
    "weak peer load": Broken(
        "not for memory of others: .*ld.global.v4", "nothing is collect", swap(PACK, "ld.global.v4")
    ),
    "weak load of a peer's record": Broken(
        "not for memory of others: ld.global.u64",
        None,
        swap("ld.relaxed.sys.global.u64", "ld.global.u64"),
        FUSED,
    ),
    "volatile peer load": Broken("ld.volatile.global", None, swap(PACK, "ld.volatile.global.v4")),
    "flag raised by a reduction": Broken(
        "forbidden .*: red", "forbidden .*: RED", swap(SIGNAL, "red.release.sys.global.add.u64")
    ),
    "atomic add": Broken(
        "forbidden .*: atom.relaxed.gpu.global.add",
        "forbidden .*: ATOMG.E.ADD",
        swap(CLAIM, "atom.relaxed.gpu.global.add.u32 $0, [$1], $2;"),
    ),
    "claim of a peer's word": Broken(
        "not for memory of others: atom",
        "2 claims of the poison word, 1 status codes",
        swap(
            f"{SIGNAL} [$0], $1;",
            "{\n.reg .b32 t;\natom.relaxed.gpu.global.cas.b32 t, [$0], 0, 1;\n"
            f"{SIGNAL} [$0], $1;\n}}",
        ),
    ),
    "fence of one's own": Broken(
        "forbidden .*: fence.sc.sys",
        "forbidden .*: MEMBAR.SC.SYS",
        swap(f"{POLL}.global.u64 $0, [$1];", f"fence.sc.sys;\n{POLL}.global.u64 $0, [$1];"),
    ),
    "no barrier before the signal": Broken(
        "no barrier between staging and release", "release before the first", without_barrier(1)
    ),
    "no barrier behind the wait": Broken(
        "no barrier between acquire and collecting",
        "no barrier between acquire and collecting",
        without_barrier(2),
    ),
    "local memory": Broken(
        "forbidden .*: st.volatile.local",
        "local memory is used",
        swap(
            f"{SIGNAL} [$0], $1;",
            "{\n.local .align 8 .b64 spill;\nst.volatile.local.u64 [spill], $1;\n"
            f"{SIGNAL} [$0], $1;\n}}",
        ),
    ),
}

PUT, GET = "@p st.relaxed.sys.global.v2.b64 [$0], {a, b};", "ld.relaxed.sys.global.v2.b64"
ANNOUNCE = "st.relaxed.sys.global.u64"
OUTPUT = "output before the barrier behind the wait"


def tagged_fault(ptx: str, sass: str | None, change: Callable[[str, int], str]) -> Broken:
    return Broken(ptx, sass, change, TAGGED)


Lane = protocol.Lane
announce, confirm, conclude, start = Lane.announce, Lane.confirm, Lane.conclude, Lane.__init__


def confirm_at_last(lane, ok, wait):
    """Wait for the flags behind the block's barrier."""
    ok = conclude(lane, ok, wait)
    lane.give_up(confirm(lane))
    return ok


def announce_at_last(lane):
    """Tell the peers which call this is once theirs is known."""
    wait = confirm(lane)
    announce(lane)
    return wait


def one_tag(lane, unit):
    return unit[1] ^ lane.epoch


TAGGED_PUSH = {
    "unit stored weakly": tagged_fault(
        "weak store to a peer",
        "no store of a unit",
        swap(PUT, "@p st.global.v4.u32 [$0], {$1,$3,$2,$3};"),
    ),
    "unit stored as four words": tagged_fault(
        "forbidden .*: st.relaxed.sys.global.v4.u32",
        None,
        swap(PUT, "@p st.relaxed.sys.global.v4.u32 [$0], {$1,$3,$2,$3};"),
    ),
    "half without its tag": tagged_fault(
        "data without its tag", None, swap("mov.b64 a, {$1, $3};", "mov.b64 a, {$1, $1};")
    ),
    "tag of one half not looked at": Broken(
        "a tag is not looked at", None, key=TAGGED, replaced=((tagged, "_missing", one_tag),)
    ),
    "unit polled weakly": tagged_fault(
        "not for memory of others: .*ld.global.v2.b64",
        "no load of a unit",
        swap(GET, "ld.global.v2.b64"),
    ),
    "unit loaded through the read-only path": tagged_fault(
        "forbidden .*: ld.global.nc.v2", "forbidden .*CONSTANT", swap(GET, "ld.global.nc.v2.b64")
    ),
    "weak announcement": tagged_fault(
        "weak store to a peer", "no announcement", swap(ANNOUNCE, "st.global.u64")
    ),
    "announcement for this device only": tagged_fault(
        "no announcement", r"STG\S+STRONG.GPU", swap(ANNOUNCE, "st.relaxed.gpu.global.u64")
    ),
    "announcement with release": tagged_fault(
        "a flag is released", "a flag is released", swap(ANNOUNCE, SIGNAL)
    ),
    "announcement behind the wait": Broken(
        "sent only when waiting has begun: st.relaxed.sys.global.u64",
        "no announcement of a flag",
        key=TAGGED,
        replaced=(
            (Lane, "announce", lambda lane: None),
            (Lane, "confirm", announce_at_last),
        ),
    ),
    "flags polled without acquire": tagged_fault(
        "no acquire", "no acquire", swap(POLL, "ld.relaxed.sys")
    ),
    "outputs without a barrier": tagged_fault(OUTPUT, OUTPUT, without_barrier(1)),
    "selection written without a barrier": Broken(
        f"{OUTPUT}: st.global.u32", OUTPUT, without_barrier(1), FUSED_TAGGED
    ),
    "gathered rows written without a barrier": Broken(
        f"{OUTPUT}: .*st.global.v2", OUTPUT, without_barrier(2), FUSED_TAGGED
    ),
    "flags awaited behind the barrier": Broken(
        OUTPUT,
        OUTPUT,
        key=TAGGED,
        replaced=(
            (Lane, "confirm", lambda lane: protocol.no_wait()),
            (Lane, "conclude", confirm_at_last),
        ),
    ),
}


BEGUN = "begun only when waiting is over"
begin, conclude = Lane.begin, Lane.conclude


def begin_at_last(lane, ok, wait):
    """Say that the launch has begun when it has waited."""
    begin(lane, lane.thread == 0)
    return conclude(lane, ok, wait)


NO_NOTE = ((Lane, "begin", lambda lane, noting: Uint32(0)),)
LATE_NOTE = ((Lane, "conclude", begin_at_last), *NO_NOTE)
THE_NOTE = {
    f"{PLAIN.op} {PLAIN.variant[0]}: begun too late": Broken(
        BEGUN, BEGUN, key=PLAIN, replaced=LATE_NOTE
    )
} | {
    f"{key.op} {key.variant[0]}: the beginning is not noted": Broken(
        what, what, key=key, replaced=NO_NOTE
    )
    for key in (PLAIN, TAGGED)
    for what in ("no note that the launch has begun",)
}


def overlap_fault(what: str, first: Callable | None, second: Callable | None, key: KernelKey):
    def follow_predecessor() -> None:
        for step in (first, second):
            if step:
                step()

    replaced = ((primitives, "follow_predecessor", follow_predecessor),)
    return Broken(what, what, key=key, archs=WITH_OVERLAP, replaced=replaced)


wait, launch = cute.arch.griddepcontrol_wait, cute.arch.griddepcontrol_launch_dependents


def start_with_a_store(lane, args, threads, tagged=False):
    primitives.store_u32(args.control, Uint32(0))
    start(lane, args, threads, tagged)


OVERLAP = {
    f"{key.op}: {name}": overlap_fault(what, *steps, key)
    for key in (TAGGED, SILENT)
    for name, what, *steps in (
        ("successor first", "successor before the wait for the predecessor", launch, wait),
        ("no wait", "no wait for the predecessor", launch, None),
        ("no successor", "no permission for the successor", wait, None),
    )
}
OVERLAP["memory before the wait"] = Broken(
    "memory before the wait for the predecessor: st.global.u32",
    r"memory before the wait for the predecessor: \S+ STG.E",
    key=TAGGED,
    archs=WITH_OVERLAP,
    replaced=((Lane, "__init__", start_with_a_store),),
)

CASES = {
    f"{name}-{arch}": (broken, arch)
    for name, broken in (STAGED | TAGGED_PUSH | THE_NOTE | OVERLAP).items()
    for arch in broken.archs
}


@pytest.mark.parametrize(("broken", "arch"), CASES.values(), ids=CASES.keys())
def test_broken_kernel_is_caught(cuobjdump, monkeypatch, broken, arch):
    plain, seen = primitives.asm, []

    def changed(result, operands, text, *rest, **options):
        seen.append(text)
        barriers = sum("barrier.cta" in one for one in seen)
        return plain(result, operands, broken.change(text, barriers), *rest, **options)

    monkeypatch.setattr(primitives, "asm", changed)
    for place, name, function in broken.replaced:
        monkeypatch.setattr(place, name, function)
    kernel = compiler.build(find(broken.key.op), broken.key, arch)
    kind = Kind.of(kernel.key, arch)
    assert caught(broken.ptx, Ptx(kernel.ptx, kind).findings())
    if broken.sass:
        dump = report.dump(kernel.cubin, cuobjdump)
        assert caught(broken.sass, Sass(report.instructions(dump), kind).findings())
    if broken is STAGED["local memory"]:
        assert caught("STACK", usage_findings(report.resources(dump)))

"""The rules of sass_code, on machine code with planted faults; on kernels: test_machine_code."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

from machine_code import Kind, caught, report
from sass_code import FENCE, INVALIDATE, Sass, usage_findings
from sass_values import behind

from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels.collective import KernelKey
from pcie_comm.kernels.registry import find

STAGED = Kind(communicates=True, tagged=False, overlaps=True)


@pytest.fixture(scope="module")
def kernel():
    """A kernel without faults."""
    key = KernelKey("all_gather_heads", ("push", 16))
    return compiler.build(find(key.op), key, "sm_90a")


@pytest.fixture(scope="module")
def code(kernel, cuobjdump):
    return report.instructions(report.dump(kernel.cubin, cuobjdump))


def sass_findings(code, kind: Kind = STAGED) -> list[str]:
    return Sass(code, kind).findings()


def places(code, pattern: str) -> list[int]:
    return [place for place, one in enumerate(code) if re.fullmatch(pattern, one.opcode)]


def blank(code, place: int):
    """Replace one instruction by one that does nothing."""
    nothing = replace(code[place], guard="", opcode="NOP", operands=())
    return [*code[:place], nothing, *code[place + 1 :]]


def insert(code, place: int, opcode: str, *operands: str):
    """Put an instruction where no branch leads to."""
    planted = report.Sass(-16, "", opcode, operands)
    return [*code[:place], planted, *code[place:]]


# fmt: off
FORBIDDEN = [
    "LDL", "LDL.64", "STL", "STL.128", "LD.E", "ST.E", "LDG.E.CONSTANT", "LDG.E.64.CONSTANT",
    "LDG.E.STRONG.GPU", "LDG.E.NA", "STG.E.STRONG.GPU", "RED.E.ADD.STRONG.SYS",
    "REDG.E.ADD.STRONG.SYS", "ATOM.E.ADD", "ATOMG.E.CAS.STRONG.SYS", "ATOMG.E.ADD.STRONG.GPU",
    "LDGSTS.E.128", "UBLKCP.S.G", "UTMALDG.2D", "MEMBAR.SC.SYS", "MEMBAR.ALL.GPU", "CCTL.PF2",
    "SULD.D.BA", "TLD.LZ", "STG.E.128.STRONG.SYS", "STG.E.U8.STRONG.SYS",
]
# fmt: on


def test_faultless_sass_has_no_findings(code):
    assert sass_findings(code) == []
    assert sass_findings(insert(code, 1, "REDUX.SUM", "UR1", "R2")) == []


@pytest.mark.parametrize("opcode", FORBIDDEN)
def test_forbidden_opcode_is_named(code, opcode):
    found = sass_findings(insert(code, 1, opcode, "R1", "[R2]"))
    assert f"forbidden instruction: {opcode}" in found
    assert ("local memory is used" in found) == opcode.startswith(("LDL", "STL"))


def test_release_needs_its_fence_right_before_it(code):
    fence = places(code, re.escape(FENCE))[0]
    lost = r"1 strong stores without a fence"
    assert caught(lost, sass_findings(blank(code, fence)))
    assert caught(lost, sass_findings(insert(code, fence + 1, "LDG.E", "R1", "[R2]")))
    guarded = [*code[:fence], replace(code[fence], guard="P0"), *code[fence + 1 :]]
    assert caught(lost, sass_findings(guarded))


def test_acquire_needs_its_invalidation_right_behind_it(code):
    (only,) = places(code, re.escape(INVALIDATE))
    assert caught("no acquire", sass_findings(blank(code, only)))
    assert caught("no acquire", sass_findings(insert(code, only, "STS", "[R1]", "R2")))


def test_wait_looks_at_abort_and_poison_word(code):
    for watched in places(code, r"LDG\.E\.STRONG\.SYS"):
        assert caught("watches abort and poison word", sass_findings(blank(code, watched)))


def at_barrier(code, number: int, *numbers: str):
    """Give a barrier other numbers: which it is, and how many threads meet there."""
    place = places(code, r"BAR\.RED\..*")[number]
    changed = replace(code[place], operands=(*numbers, code[place].operands[-1]))
    return [*code[:place], changed, *code[place + 1 :]]


def test_missing_block_barrier_is_found(code):
    first, second = places(code, r"BAR\.RED\..*")
    assert caught("release before the first barrier", sass_findings(blank(code, first)))
    assert caught("between acquire and collecting", sass_findings(blank(code, second)))
    guarded = [*code[:second], replace(code[second], guard="!P0"), *code[second + 1 :]]
    assert caught("between acquire and collecting", sass_findings(guarded))


@pytest.mark.parametrize("numbers", [("0x1",), ("0x0", "0x40"), ("R250",), ("R250", "0x40")])
def test_barrier_of_a_part_of_the_block_does_not_count(code, numbers):
    assert caught("release before the first barrier", sass_findings(at_barrier(code, 0, *numbers)))
    known = insert(at_barrier(code, 1, *numbers), 1, "MOV", "R250", "0x1")
    assert caught("between acquire and collecting", sass_findings(known))


@pytest.mark.parametrize("numbers", [("R250",), ("R250", "R250")])
def test_barrier_is_known_by_the_number_in_a_register(code, numbers):
    barrier = at_barrier(code, 1, *numbers)
    assert sass_findings(insert(barrier, 1, "MOV", "R250", "RZ")) == []
    other = insert(insert(barrier, 1, "S2R", "R250", "SR_LANEID"), 1, "MOV", "R250", "RZ")
    assert caught("between acquire and collecting", sass_findings(other))


def test_wait_for_the_predecessor_is_needed(code):
    (wait,), (start,) = places(code, "ACQBULK"), places(code, "PREEXIT")
    assert caught("no wait for the predecessor", sass_findings(blank(code, wait)))
    assert caught("no permission for the successor", sass_findings(blank(code, start)))
    guarded = [*code[:wait], replace(code[wait], guard="P0"), *code[wait + 1 :]]
    assert caught("no wait for the predecessor", sass_findings(guarded))
    early = insert(blank(code, start), wait, "PREEXIT")
    assert caught("successor before the wait", sass_findings(early))
    loads = insert(code, wait, "LDG.E", "R250", "[R2]")
    assert caught("memory before the wait", sass_findings(loads))
    assert sass_findings(code, replace(STAGED, overlaps=False)) == [
        "forbidden instruction: ACQBULK",
        "forbidden instruction: PREEXIT",
    ]


def test_unknown_jump_is_an_error(code):
    with pytest.raises(ValueError, match="not followed"):
        sass_findings(insert(code, 1, "BRX", "R2", "-0x10"))
    with pytest.raises(ValueError, match="not followed"):
        sass_findings(insert(code, 1, "WARPSYNC.COLLECTIVE.ALL", "0x40"))


@pytest.mark.parametrize(
    ("guard", "line", "known", "then"),
    [
        ("", "MOV R2, 0x10", {}, {"R2": 16}),
        ("", "MOV R2, R3", {"R3": 5}, {"R2": 5, "R3": 5}),
        ("", "MOV R2, c[0x0][0x160]", {"R2": 1}, {}),
        ("", "MOV.64 R2, RZ", {}, {"R2": 0, "R3": 0}),
        ("", "CS2R R2, SRZ", {}, {"R2": 0, "R3": 0}),
        ("", "HFMA2.MMA R2, -RZ, RZ, 0, 0", {}, {"R2": 0}),
        ("", "IMAD.MOV.U32 R2, RZ, RZ, 0x7", {}, {"R2": 7}),
        ("", "IMAD.X R2, RZ, RZ, RZ, P1", {"R2": 3}, {}),
        ("", "SHF.L.U32 R2, R2, 0x10, RZ", {"R2": 3}, {"R2": 3 << 16}),
        ("", "LOP3.LUT R2, R2, 0xf, R4, 0xf8, !PT", {"R2": 32, "R4": 18}, {"R2": 34, "R4": 18}),
        ("", "ISETP.NE.U32.AND P0, PT, R2, RZ, PT", {"R2": 0}, {"R2": 0, "P0": 0}),
        ("", "ISETP.EQ.AND P0, PT, R2.reuse, 0x1, PT", {"R2": 1}, {"R2": 1, "P0": 1}),
        ("", "ISETP.EQ.AND P0, PT, R2, RZ, P1", {"R2": 0, "P0": 0}, {"R2": 0}),
        ("", "PLOP3.LUT P0, PT, P3, PT, PT, 0x80, 0x8", {"P0": 1, "P3": 1}, {"P3": 1}),
        ("", "IMAD.WIDE.U32 R2, R5, R6, R8", {"R2": 0, "R3": 0, "R4": 0}, {"R4": 0}),
        ("", "LDG.E.128 R4, [R2.64]", {"R3": 0, "R4": 0, "R7": 0, "R8": 0}, {"R3": 0, "R8": 0}),
        ("", "SHFL.IDX PT, R2, R3, R4, 0x1f", {"R2": 0, "R3": 0}, {"R3": 0}),
        ("", "R2P PR, R2, 0x7f", {"P0": 1, "P6": 0, "R2": 1}, {"R2": 1}),
        ("", "BAR.RED.AND.DEFER_BLOCKING R2, P0", {"R2": 0, "P0": 1}, {"R2": 0, "P0": 1}),
        ("P1", "MOV R2, 0x10", {"R2": 1}, {}),
        ("P1", "MOV R2, 0x10", {"R2": 16}, {"R2": 16}),
        ("!P1", "MOV R2, 0x10", {"R2": 1, "P1": 0}, {"R2": 16, "P1": 0}),
        ("!P1", "MOV R2, 0x10", {"R2": 1, "P1": 1}, {"R2": 1, "P1": 1}),
    ],
)
def test_constants_are_followed(guard, line, known, then):
    opcode, operands = line.split(" ", 1)
    assert behind(report.Sass(0, guard, opcode, tuple(operands.split(", "))), known) == then


# --- cuobjdump ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("REG:48 STACK:16 SHARED:14848 LOCAL:0 CONSTANT[0]:664 TEXTURE:0", "STACK:16"),
        ("REG:48 STACK:0 SHARED:14848 LOCAL:8 CONSTANT[0]:664 TEXTURE:0", "LOCAL:8"),
        ("REG:256 STACK:0 SHARED:14848 LOCAL:0 CONSTANT[0]:664 TEXTURE:0", "REG:256"),
        ("REG:40 STACK:0 SHARED:49153 LOCAL:0 CONSTANT[0]:664 TEXTURE:0", "SHARED:49153"),
    ],
)
def test_usage_beyond_the_limits_is_found(line, finding):
    assert caught(finding, usage_findings(report.resources(f"  {line}\n")))


def test_only_one_function_is_read(kernel, cuobjdump):
    dump = report.dump(kernel.cubin, cuobjdump)
    assert usage_findings(report.resources(dump)) == []
    with pytest.raises(ValueError, match="found 2"):
        report.resources(dump * 2)
    with pytest.raises(ValueError, match="leave gaps"):
        report.instructions(dump.replace("/*0100*/", "/*what*/"))
    with pytest.raises(RuntimeError, match=r"cuobjdump .* failed"):
        report.dump(b"no cubin", cuobjdump)

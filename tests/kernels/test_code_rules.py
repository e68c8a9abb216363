"""The rules of ptx_code and sass_code, on code with planted faults; kernels: test_machine_code."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

from machine_code import Kind, caught, report
from ptx_code import CLAIM, Ptx
from sass_code import FENCE, INVALIDATE, Sass, usage_findings

from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels.registry import KernelKey, find

STAGED = Kind(communicates=True, tagged=False, overlaps=True)
TAGGED = Kind(communicates=True, tagged=True, overlaps=True)
SILENT = Kind(communicates=False, tagged=False, overlaps=True)
BARRIER = "barrier.cta.red.and.pred q, 0, p;"


@pytest.fixture(scope="module")
def program() -> str:
    return report.cuobjdump() or pytest.skip("cuobjdump is not installed")


@pytest.fixture(scope="module")
def kernel():
    """A kernel without faults."""
    key = KernelKey("all_gather_heads", ("push", 16))
    return compiler.build(find(key.op), key, "sm_90a")


@pytest.fixture(scope="module")
def tagged():
    """A tagged kernel without faults."""
    key = KernelKey("all_gather_heads", ("tagged", 8))
    return compiler.build(find(key.op), key, "sm_90a")


@pytest.fixture(scope="module")
def ptx(kernel) -> str:
    return kernel.ptx


@pytest.fixture(scope="module")
def code(kernel, program):
    return report.instructions(report.dump(kernel.cubin, program))


# --- PTX ---------------------------------------------------------------------------------------


def at_the_end(ptx: str, *statements: str) -> str:
    """Put statements before the last return."""
    head, tail = ptx.rsplit("\tret;", 1)
    return f"{head}\t" + "\n\t".join(statements) + f"\n\tret;{tail}"


def ptx_findings(ptx: str, kind: Kind = STAGED) -> list[str]:
    return Ptx(ptx, kind).findings()


def test_faultless_ptx_has_no_findings(ptx):
    assert ptx_findings(ptx) == []
    harmless = ("ld.param.b64 %rd900, [any_param_0];", "add.s64 %rd901, %rd900, 8;")
    assert ptx_findings(at_the_end(ptx, *harmless, "st.global.u32 [%rd901], 1;")) == []


@pytest.mark.parametrize(
    "statement",
    [
        "ldu.global.u64 %rd900, [%rd4];",
        "ld.global.nc.u32 %r900, [%rd4];",
        "ld.global.nc.L1::no_allocate.v4.u32 {%r900,%r901,%r902,%r903}, [%rd4];",
        "ld.volatile.global.u32 %r900, [%rd4];",
        "st.volatile.global.u32 [%rd4], 1;",
        "ld.relaxed.gpu.global.u32 %r900, [%rd4];",
        "ld.u32 %r900, [%rd4];",
        "ld.local.u32 %r900, [%rd4];",
        "st.local.u32 [%rd4], 1;",
        "red.relaxed.sys.global.add.u32 [%rd4], 1;",
        "@%p1 red.global.add.u32 [%rd4], 1;",
        "atom.relaxed.gpu.global.exch.b32 %r900, [%rd4], 1;",
        "atom.relaxed.sys.global.cas.b32 %r900, [%rd4], 0, 1;",
        "membar.sys;",
        "fence.acq_rel.sys;",
        "cp.async.ca.shared.global [%r1], [%rd4], 16;",
        "multimem.red.relaxed.sys.global.add.u32 [%rd4], 1;",
        "prefetch.global.L2 [%rd4];",
        "st.relaxed.sys.global.u64 [%rd4], 1;",
        "st.relaxed.sys.global.v2.b64 [%rd4], {%rd5,%rd6};",
        "ld.relaxed.sys.global.v2.b64 {%rd900,%rd901}, [%rd4];",
    ],
)
def test_forbidden_instruction_is_named(ptx, statement):
    opcode = re.sub(r"^@\S+ ", "", statement).split()[0].rstrip(";")
    found = ptx_findings(at_the_end(ptx, statement))
    assert f"forbidden instruction: {opcode}" in found


LEADS = {
    "directly": ("mov.b64 %rd901, %rd900;",),
    "with an offset": ("add.s64 %rd901, %rd900, 8;",),
    "through a choice": ("selp.b64 %rd901, %rd4, %rd900, %p1;",),
    "through registers of inline code": (
        "// begin inline asm",
        "{",
        ".reg .b64 a;",
        "mov.b64 a, %rd900;",
        "mov.b64 %rd901, a;",
        "}",
        "// end inline asm",
    ),
    "through shared memory": ("st.shared.u64 [%r1], %rd900;", "ld.shared.u64 %rd901, [%r1];"),
    "through a shuffle": (
        "mov.b64 {%r900,%r901}, %rd900;",
        "shfl.sync.idx.b32 %r902, %r900, 0, 31, -1;",
        "mov.b64 %rd901, {%r902,%r901};",
    ),
}


@pytest.mark.parametrize("lead", LEADS.values(), ids=LEADS.keys())
@pytest.mark.parametrize(
    "access",
    ["ld.global.u32 %r910, [%rd901];", f"{CLAIM} %r910, [%rd901], 0, 1;"],
    ids=["weak load", "claim"],
)
def test_address_of_a_peer_is_followed(ptx, lead, access):
    found = ptx_findings(at_the_end(ptx, "ld.global.u64 %rd900, [%rd4];", *lead, access))
    assert f"not for memory of others: {access[:-1]}" in found


@pytest.mark.parametrize(
    "partial", ["barrier.cta.red.and.pred q, 1, p;", "barrier.cta.red.and.pred q, 0, 64, p;"]
)
def test_barrier_of_a_part_of_the_block_does_not_count(ptx, partial):
    first, second = ptx.count(BARRIER) * [BARRIER]
    head, middle, tail = ptx.split(BARRIER)
    assert caught("between staging and rel", ptx_findings(head + partial + middle + second + tail))
    assert caught("between acquire and col", ptx_findings(head + first + middle + partial + tail))


def test_barrier_under_a_condition_does_not_count(ptx):
    assert caught("before the first barrier", ptx_findings(ptx.replace(BARRIER, f"@p {BARRIER}")))


def test_way_around_the_barrier_is_found(ptx):
    """The barrier still stands before the signal in the text; one branch leads past it."""
    head, tail = ptx.split(BARRIER, 1)
    block = head.rindex("// begin inline asm")
    past = "// end inline asm\n"
    jump = f"@%p1 bra $PAST;\n\t{head[block:]}"
    around = head[:block] + jump + BARRIER + tail.replace(past, f"{past}$PAST:\n", 1)
    assert caught("release before the first barrier", ptx_findings(around))


def test_claim_needs_its_status_code(ptx):
    own = "ld.param.b64 %rd900, [any_param_0];"
    claim = f"{CLAIM} %r900, [%rd900], 0, 1;"
    code = "st.release.sys.global.u32 [%rd900], 1;"
    assert ptx_findings(at_the_end(ptx, own, claim, code)) == []
    lost = "2 claims of the poison word, 1 status codes"
    assert lost in ptx_findings(at_the_end(ptx, own, claim))
    assert caught("status code unclaimed", ptx_findings(at_the_end(ptx, own, code)))


def test_kernel_of_the_other_kind_is_told_apart(ptx, tagged):
    silent = compiler.build(find("kimi_topk16"), find("kimi_topk16").variants()[0], "sm_90a").ptx
    assert ptx_findings(silent, SILENT) == []
    assert caught("no release", ptx_findings(silent))
    assert caught("forbidden .*: st.release", ptx_findings(ptx, SILENT))
    assert ptx_findings(tagged.ptx, TAGGED) == []
    assert caught("forbidden .*: st.relaxed.sys.global.v2", ptx_findings(tagged.ptx))
    assert caught("no store of a unit", ptx_findings(ptx, TAGGED))


def test_overlap_is_forbidden_where_there_is_none(ptx):
    old = replace(STAGED, overlaps=False)
    assert ptx_findings(ptx, old) == [
        "forbidden instruction: griddepcontrol.launch_dependents",
        "forbidden instruction: griddepcontrol.wait",
    ]


def test_wait_for_the_predecessor_counts_on_every_way_only(ptx):
    wait = "griddepcontrol.wait;"
    assert caught("no wait for the pred", ptx_findings(ptx.replace(wait, f"@%p1 {wait}")))
    around = ptx.replace(wait, f"@%p1 bra $PAST;\n\t{wait}\n$PAST:")
    assert caught("memory before the wait for the predecessor", ptx_findings(around))
    assert caught("successor before the wait for the predecessor", ptx_findings(around))


@pytest.mark.parametrize(
    ("statements", "finding"),
    [
        (("st.relaxed.sys.global.u64 [%rd18], 1;",), "2 announcements of a flag"),
        (("st.relaxed.sys.global.u64 [%rd18], 1;",), "sent only when waiting has begun"),
        (("st.relaxed.sys.global.v2.b64 [%rd18], {%rd16,%rd18};",), "data without its tag"),
        (("ld.relaxed.sys.global.v2.b64 {%rd900,%rd901}, [%rd18];",), "a tag is not looked at"),
        (("ld.relaxed.sys.global.u32 %r900, [%rd18];",), "relaxed load that is no part of a wait"),
        (("ld.relaxed.sys.global.u32 %r900, [%rd18];",), "a wait for units watches .* 3 words"),
        (("st.global.v2.u32 [%rd18], {%r1,%r2};",), "weak store to a peer"),
    ],
)
def test_fault_in_tagged_code_is_found(tagged, statements, finding):
    assert caught(finding, ptx_findings(at_the_end(tagged.ptx, *statements), TAGGED))


def test_first_turn_is_told_by_its_counter(tagged):
    """Later turns write outputs without a barrier; a counter that may start above 0 is a fault."""
    before, loop = re.split(r"(?=\n\$\w+:\n\t\.pragma \"nounroll\";)", tagged.ptx)[-2:]
    counter = re.search(r"(mov\.b32 \t(%r\d+)), 0;$", before)
    assert f"setp.ne.b32 \t%p" in loop and f"{counter[2]}, 0;" in loop
    unknown = f"{before[: counter.start()]}{counter[1]}, %r1;{loop}"
    found = ptx_findings(unknown, TAGGED)
    assert caught("output before the barrier behind the wait", found)


@pytest.mark.parametrize("statement", ["brx.idx %r1, targets;", "call.uni helper, ();"])
def test_jump_that_is_not_followed_is_an_error(ptx, statement):
    with pytest.raises(ValueError, match="not followed"):
        ptx_findings(at_the_end(ptx, statement))


# --- SASS --------------------------------------------------------------------------------------


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
    "SULD.D.BA", "TLD.LZ",
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
    first, second = places(code, re.escape(INVALIDATE))
    assert caught("no acquire", sass_findings(blank(blank(code, first), second)))
    assert caught("watches abort and poison word", sass_findings(blank(code, second)))
    late = insert(insert(code, second, "STS", "[R1]", "R2"), first, "STS", "[R1]", "R2")
    assert caught("no acquire", sass_findings(late))


def test_missing_block_barrier_is_found(code):
    first, second = places(code, r"BAR\.RED\..*")
    assert caught("release before the first barrier", sass_findings(blank(code, first)))
    assert caught("between acquire and collecting", sass_findings(blank(code, second)))
    named = replace(code[second], operands=("0x1", *code[second].operands[1:]))
    other = [*code[:second], named, *code[second + 1 :]]
    assert caught("between acquire and collecting", sass_findings(other))


def test_unknown_jump_is_an_error(code):
    with pytest.raises(ValueError, match="not followed"):
        sass_findings(insert(code, 1, "BRX", "R2", "-0x10"))


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


def test_only_one_function_is_read(kernel, program):
    dump = report.dump(kernel.cubin, program)
    assert usage_findings(report.resources(dump)) == []
    with pytest.raises(ValueError, match="found 2"):
        report.resources(dump * 2)
    with pytest.raises(ValueError, match="leave gaps"):
        report.instructions(dump.replace("/*0100*/", "/*what*/"))
    with pytest.raises(RuntimeError, match=r"cuobjdump .* failed"):
        report.dump(b"no cubin", program)

"""The rules of ptx_code, on PTX with planted faults; on kernels: test_machine_code."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

from machine_code import Kind, caught
from ptx_code import CLAIM, Ptx

from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels.collective import KernelKey
from pcie_comm.kernels.registry import find

STAGED = Kind(communicates=True, tagged=False, overlaps=True)
TAGGED = Kind(communicates=True, tagged=True, overlaps=True)
SILENT = Kind(communicates=False, tagged=False, overlaps=True)
BARRIER = "barrier.cta.red.and.aligned.pred q, 0, p;"


def compiled(op: str, *variant: str | int) -> str:
    return compiler.build(find(op), KernelKey(op, variant), "sm_90a").ptx


@pytest.fixture(scope="module")
def ptx() -> str:
    """A kernel without faults."""
    return compiled("all_gather_heads", "push", 16)


@pytest.fixture(scope="module")
def tagged() -> str:
    """A tagged kernel without faults."""
    return compiled("all_gather_heads", "tagged", 8)


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
        "atom.relaxed.gpu.global.exch.b64 %rd900, [%rd4], 1;",
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
    "partial",
    [
        "barrier.cta.red.and.pred q, 1, p;",
        "barrier.cta.red.and.pred q, 0, 64, p;",
        "bar.sync 0, 64;",
        "bar.sync %r1;",
    ],
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
    silent = compiled("kimi_topk16", "torch")
    assert ptx_findings(silent, SILENT) == []
    assert caught("no release", ptx_findings(silent))
    assert caught("forbidden .*: st.release", ptx_findings(ptx, SILENT))
    assert ptx_findings(tagged, TAGGED) == []
    assert caught("forbidden .*: st.relaxed.sys.global.v2", ptx_findings(tagged))
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


FOREIGN = "ld.global.u64 %rd900, [%rd4];"


def test_send_behind_a_wait_is_found(ptx):
    late = at_the_end(ptx, FOREIGN, "st.release.sys.global.u64 [%rd900], 1;")
    assert caught("sent only when waiting has begun", ptx_findings(late))


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("st.relaxed.sys.global.u64 [%rd900], 1;", "2 announcements of a flag"),
        ("st.relaxed.sys.global.u64 [%rd900], 1;", "sent only when waiting has begun"),
        ("st.relaxed.sys.global.v2.b64 [%rd900], {%rd8,%rd9};", "data without its tag"),
        ("ld.relaxed.sys.global.v2.b64 {%rd901,%rd902}, [%rd900];", "a tag is not looked at"),
        ("ld.relaxed.sys.global.u32 %r900, [%rd900];", "relaxed load that is no part of a wait"),
        ("ld.relaxed.sys.global.u32 %r900, [%rd900];", "a wait for units watches .* 3 words"),
        ("st.global.v2.u32 [%rd900], {%r1,%r2};", "weak store to a peer"),
        ("ld.global.v2.u32 {%r900,%r901}, [%rd900];", "not for memory of others"),
    ],
)
def test_fault_in_tagged_code_is_found(tagged, statement, finding):
    assert caught(finding, ptx_findings(at_the_end(tagged, FOREIGN, statement), TAGGED))


def test_first_turn_is_told_by_its_counter(tagged):
    """Later turns write outputs without a barrier; a counter that may start above 0 is a fault."""
    loop = tagged.rindex('\t.pragma "nounroll";')
    compared = set(re.findall(r"setp\.ne\.b32 \t%p\d+, (%r\d+), 0;", tagged[loop:]))
    starts = re.finditer(r"mov\.b32 \t(%r\d+), (\S+);", tagged[loop - 300 : loop])
    (start,) = [one for one in starts if one[1] in compared]
    begin, end = (loop - 300 + place for place in start.span(2))
    unknown = f"{tagged[:begin]}%r1{tagged[end:]}"
    found = ptx_findings(unknown, TAGGED)
    assert caught("output before the barrier behind the wait", found)


@pytest.mark.parametrize("statement", ["brx.idx %r1, targets;", "call.uni helper, ();"])
def test_jump_that_is_not_followed_is_an_error(ptx, statement):
    with pytest.raises(ValueError, match="not followed"):
        ptx_findings(at_the_end(ptx, statement))

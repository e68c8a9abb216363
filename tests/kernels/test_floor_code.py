"""Machine code of the kernels that only the benchmark runs, for one architecture."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

from machine_code import Kind, Role, report
from ptx_code import Ptx
from sass_code import Sass

from pcie_comm.bench.floors import FLOORS
from pcie_comm.kernels import compile as compiler

ARCH = "sm_90a"
INSTRUCTION_CACHES_NBYTES = 200_000
"""More than the instruction caches of a multiprocessor, 128 KB, with room to spare."""


@pytest.fixture(scope="module")
def codes(cuobjdump):
    found = {}
    for name, floor in FLOORS.items():
        (key,) = floor.variants()
        kernel = compiler.build(floor, key, ARCH)
        found[name] = report.MachineCode(kernel, report.dump(kernel.cubin, cuobjdump))
    return found


def test_no_spills(codes):
    for code in codes.values():
        assert code.numbers()[1:4] == [0, 0, 0], code.kernel.key


def test_the_empty_kernel_is_empty(codes):
    done = [one.opcode for one in codes["bench_empty"].code if one.opcode != "NOP"]
    assert set(done) <= {"LDC", "S2R", "EXIT", "BRA"}


def test_eviction_is_larger_than_the_instruction_caches_and_has_no_loop(codes):
    code = codes["bench_evict"]
    assert code.sass_nbytes > INSTRUCTION_CACHES_NBYTES
    fused = [one for one in code.code if one.opcode == "FFMA"]
    assert len(fused) * 16 > INSTRUCTION_CACHES_NBYTES
    branches = [one for one in code.code if one.opcode.startswith("BRA")]
    targets = [int(one.operands[-1], 16) for one in branches]
    assert all(t >= one.address for one, t in zip(branches, targets, strict=True))


def test_the_handshake_keeps_the_rules_of_order(codes):
    code = codes["bench_handshake"]
    kind = Kind(communicates=True, tagged=False, overlaps=True)
    ptx, sass = Ptx(code.kernel.ptx, kind), Sass(code.code, kind)
    assert ptx.findings() == ["nothing is collected by relaxed loads at system scope"]
    assert sass.findings() in ([], ptx.findings())
    for role in (Role.RELEASE, Role.ACQUIRE):
        assert ptx.program.places(role)
        assert len(sass.program.places(role)) == len(ptx.program.places(role))

"""Kernels that count: which are built, which one runs, and what must be found in bad ones."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

from cutlass import Uint32, cute
from machine_code import Kind, caught, report
from ptx_code import Ptx
from sass_code import Sass
from test_cuda_engine import Fakes
from typer.testing import CliRunner

from pcie_comm import build, cli
from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels import waits
from pcie_comm.kernels.collective import KernelKey
from pcie_comm.kernels.protocol import Lane
from pcie_comm.kernels.registry import find
from pcie_comm.kernels.store import KernelStore

ARCH = "sm_90a"
OP, ROUTER = "all_gather_heads", "kimi_topk16"
KEYS = [KernelKey(OP, ("pull", 16), stats=True), KernelKey(OP, ("tagged", 8), stats=True)]


def findings(kernel: compiler.CompiledKernel, kind: Kind, program: str) -> list[str]:
    code = report.instructions(report.dump(kernel.cubin, program))
    return [*Ptx(kernel.ptx, kind).findings(), *Sass(code, kind).findings()]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_kernels_that_count_keep_the_rules(key, cuobjdump):
    kernel = compiler.build(find(OP), key, ARCH)
    assert str(key).endswith("-stats")
    assert findings(kernel, Kind.of(kernel.key, ARCH), cuobjdump) == []


def test_control_a_kernel_without_the_mark_may_not_count(cuobjdump):
    kernel = compiler.build(find(OP), KEYS[0], ARCH)
    found = findings(kernel, replace(Kind.of(kernel.key, ARCH), counts=False), cuobjdump)
    assert caught("forbidden instruction: red.relaxed.gpu.global.add.u64", found)
    assert caught("forbidden instruction: REDG?.E.ADD.64.STRONG.GPU", found)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_control_counting_on_the_way_is_found(key, cuobjdump):
    """Before the barrier the whole block would wait for it."""
    wait_flag = Lane.wait_flag

    @cute.jit
    def early(lane, address, peer, relayed):
        wait = wait_flag(lane, address, peer, relayed)
        waits.count(lane, peer, Uint32(1), wait.took)
        return wait

    with mock.patch.object(Lane, "wait_flag", early):
        kernel = compiler.build(find(OP), key, ARCH)
    found = findings(kernel, Kind.of(kernel.key, ARCH), cuobjdump)
    assert caught("counted before the barrier behind the wait: red.", found)
    assert caught("counted before the barrier behind the wait: 0x", found)
    assert caught("6 reductions of counters", found)


def test_builds_have_them_where_they_are_asked_for():
    plain = build.jobs([ARCH], [OP, ROUTER])
    both = build.jobs([ARCH], [OP, ROUTER], stats=True)
    assert both[: len(plain)] == plain
    added = both[len(plain) :]
    assert {job.key.op for job in added} == {OP}, "a router alone waits for nobody"
    assert [replace(job.key, stats=False) for job in added] == list(find(OP).variants())
    assert not any(job.key.stats for job in build.own_jobs([ARCH]))


def test_the_program_builds_them_and_the_store_finds_them(tmp_path):
    options = ["--arch", ARCH, "--op", OP, "--stats", "--jobs", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(cli.app, ["compile", *options])
    assert done.exit_code == 0, done.output
    store = KernelStore(tmp_path, tmp_path / "cache")
    for key in (KEYS[0], replace(KEYS[0], stats=False)):
        assert store.get(find(OP), key, (9, 0)).key == str(key)
    assert len(list(tmp_path.glob("*.cubin"))) == 2 * len(find(OP).variants())


def test_without_compiler_the_message_names_the_option(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pcie_comm.kernels.dsl", None)
    monkeypatch.delattr("pcie_comm.kernels.dsl", raising=False)
    with pytest.raises(compiler.CompileError, match="`pcie-comm compile --stats`"):
        compiler.build(find(OP), KEYS[0], ARCH)


@pytest.mark.parametrize("counting", [False, True])
def test_an_engine_asks_for_the_kernels_that_it_runs(counting, monkeypatch):
    engine = Fakes(monkeypatch).engine()
    engine.counters = object() if counting else None
    engine._kernels, asked = {}, []
    monkeypatch.setattr(engine, "_load", lambda collective, key: asked.append(key))
    for op in (OP, ROUTER):
        engine.prepare(find(op), ["push"])
    assert {(key.op, key.stats) for key in asked} == {(OP, counting), (ROUTER, False)}

"""The example's kernels run as PTX on the CPU: results, guard bytes, and what they report.

Negative controls: kernels that stage more than their plan says, that never signal, or wait for no
flag.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

import torch
from cutlass import Uint32, cute
from example_plugin import load_example
from machine_code import Kind
from ptx_code import Ptx
from ptx_world import World

from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels import protocol
from pcie_comm.kernels.collective import KernelKey
from pcie_comm.layout import ControlLayout, StatusLayout
from pcie_comm.tensors import meta_of
from pcie_comm.testing import ConformanceError, Subject, guard, kernels

pytestmark = pytest.mark.timeout(300)

PLUGIN = load_example()
EXAMPLE = type(PLUGIN)
SHORT = 200  # units of the machine's time, which advances one for each look at the clock


def slabs(world: World) -> list[memoryview]:
    """Return the bytes of the ranks' slabs."""
    memory, found = world.machine.memory, []
    for rank in range(world.size):
        address = memory.load(world.controls[0] + ControlLayout.PEERS + 8 * rank, 8)
        data, at = memory.place(address, world.layout.nbytes)
        found.append(memoryview(data)[at : at + world.layout.nbytes])
    return found


def staged_outside(plugin, protocol_name: str) -> list[str]:
    """Call on three ranks; return what was written to beside the declared bytes."""
    world = World(3, protocol_name, blocks=2, slot_nbytes=1 << 14)
    for slab in slabs(world):
        guard.paint(slab, world.layout)
    inputs = PLUGIN.example_inputs(3, 5, seed=3)
    (want,) = PLUGIN.reference(inputs)
    assert all(torch.equal(got, want) for (got,) in world.call(plugin, inputs))
    staged = plugin.plan(world.infos[0], meta_of(inputs[0][0])).staged_nbytes
    return [text for s in slabs(world) for text in guard.trespasses(s, world.layout, staged)]


@pytest.mark.parametrize("protocol_name", ["push", "pull", "tagged", "auto"])
def test_results_are_the_reference_s_and_guard_bytes_stay(protocol_name):
    assert staged_outside(PLUGIN, protocol_name) == []


@pytest.mark.parametrize("name", ["push", "pull"])
def test_its_code_keeps_the_rules_of_ours(name):
    """Memory order, scopes and barriers, see ptx_code.py; with overlapping launches."""
    kind = Kind(communicates=True, tagged=False, overlaps=True)
    kernel = compiler.build(PLUGIN, KernelKey(PLUGIN.name, (name,)), "sm_90a")
    assert Ptx(kernel.ptx, kind).findings() == []


def test_more_blocks_other_orders_and_calls_in_a_row():
    """With NaN, infinities and zeros of both signs: the same bits as the reference."""
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45])
    for name, blocks, order in (("push", 4, 5), ("pull", 3, 6)):
        world = World(2, name, blocks=blocks, order=order)
        for seed in range(3):
            random = torch.Generator().manual_seed(seed)
            shape = (3, 300) if seed == 1 else (seed, 9)
            places = [torch.randint(0, 6, shape, generator=random) for _ in range(2)]
            inputs = [(odd[place],) for place in places]
            (want,) = PLUGIN.reference(inputs)
            for (got,) in world.call(PLUGIN, inputs):
                assert torch.equal(got.view(torch.int32), want.view(torch.int32))


class StagesMore(EXAMPLE):
    """Declares one number less for each rank than its kernel stages."""

    def plan(self, info, *tensors):
        plan = super().plan(info, *tensors)
        return dataclasses.replace(plan, staged_nbytes=plan.staged_nbytes - 4)


@pytest.mark.parametrize("name", ["push", "pull"])
def test_control_staging_more_than_declared_leaves_a_trace(name):
    """What the suite looks for on a GPU. Results are right all the same: nobody else notices."""
    found = set(staged_outside(StagesMore(), name))
    assert found == {f"byte {byte} of a segment, staged_nbytes=136" for byte in range(136, 140)}


# --- kernels that do not keep to the protocol -----------------------------------------------------


class Silent(EXAMPLE):
    """Leaves without a flag: peers that make the example's call wait in vain."""

    def kernel(self, key):
        threads = self.block

        @cute.kernel
        def silent(args, tensors, scalars):
            lane = protocol.Lane(args, threads)
            lane.enter()

        return silent


class Deaf(EXAMPLE):
    """Announces itself and waits for nobody."""

    def kernel(self, key):
        threads = self.block

        @cute.kernel
        def deaf(args, tensors, scalars):
            lane = protocol.Lane(args, threads)
            lane.enter()
            lane.begin(lane.thread == 0)
            if lane.ok != Uint32(0):
                lane.announce()

        return deaf


def test_a_kernel_that_never_signals_is_named_to_its_peers():
    """Its own rank notices nothing; the other's wait ends, and says who did not come."""
    world = World(2, "push", blocks=1)
    memory = world.machine.memory
    for control in world.controls:
        memory.store(control + ControlLayout.TIMEOUT, 4, SHORT)
    inputs = PLUGIN.example_inputs(2, 1, seed=1)
    with pytest.raises(AssertionError, match="a rank reports a failure"):
        world.call([PLUGIN, Silent()], inputs)
    record, silent = world.records
    assert memory.load(record + StatusLayout.CODE, 4) == StatusLayout.CODE_TIMEOUT
    assert memory.load(record + StatusLayout.PEER, 4) == 1
    assert memory.load(silent + StatusLayout.CODE, 4) == StatusLayout.CODE_OK


@pytest.mark.parametrize(
    ("plugin", "what"),
    [(Silent(), "all_reduce_max-push never signals"), (Deaf(), "all_reduce_max-push never waits")],
)
def test_the_suite_finds_kernels_without_flags(plugin, what):
    subject = Subject(plugin, arch="sm_80")
    with pytest.raises(ConformanceError, match=re.escape(what)):
        kernels.kernels_compile_and_signal(subject)
    kernels.kernels_compile_and_signal(Subject(PLUGIN, arch="sm_80"))

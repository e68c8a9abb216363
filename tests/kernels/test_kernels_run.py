"""Kernels run as PTX on the CPU (ptx_machine): every byte of their outputs, in several orders."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

import torch
from ptx_machine import Launch, Machine, Program
from ptx_world import World, program_of
from router_rows import SPECS, hard_rows, rows_of

from pcie_comm.calls import fused_collective, router_collective
from pcie_comm.kernels.registry import find
from pcie_comm.kernels.router_presets import PRESETS

pytestmark = pytest.mark.timeout(300)

PROTOCOLS = ("push", "pull", "tagged")
TOLERANCE = 4e-6
"""Of weights: approximate instructions are exact here, and sums are in another order."""


def same_bytes(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and bool(
        (got.contiguous().view(torch.uint8) == want.contiguous().view(torch.uint8)).all()
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("order", [None, 1])
def test_gathers_are_exact(protocol, order):
    world = World(3, protocol, order=order, hosted=order is not None)
    for rows, name in itertools.product((1, 5), ("all_gather_pair", "all_gather_heads")):
        shapes = {"all_gather_pair": [(rows, 24), (rows, 7)], "all_gather_heads": [(rows, 2, 8)]}
        inputs = [
            [torch.randn(shape).to(torch.bfloat16) for shape in shapes[name]] for _ in range(3)
        ]
        want = find(name).reference(inputs)
        for got in world.call(find(name), inputs):
            assert all(map(same_bytes, got, want))


@pytest.mark.parametrize("name", SPECS)
def test_routers_are_the_reference(name):
    """Ids are equal, ties and all: choices are rounded alike, but for the last bit of exp."""
    spec = SPECS[name]
    router = router_collective(spec)
    for make, order in ((lambda s: rows_of(s, 3), None), (hard_rows, 2)):
        logits, bias = make(spec)
        inputs = [logits] if bias is None else [logits, bias]
        ((weights, ids),) = World(1, order=order).call(router, [inputs])
        want, want_ids = router.reference([inputs])
        wrong = (ids != want_ids).any(1)
        assert not wrong.any(), (ids[wrong], want_ids[wrong])
        assert torch.allclose(weights, want, rtol=TOLERANCE, atol=TOLERANCE * spec.scale)


FUSED = {
    "deepseek-v3": 4,
    "kimi-k2": 3,
    "qwen3-moe": 2,
    "gpt-oss-20b": 8,
    "glm-4.5": 5,
    "nemotron": 4,
    "odd": 1,
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", FUSED)
def test_fused_is_stand_alone_bit_for_bit(name, protocol):
    spec, size = SPECS[name], FUSED[name]
    logits, bias = hard_rows(spec)
    logits = logits[[0, 9, 16, 20, 21]]
    down = torch.randn(5, 12 * size).to(torch.bfloat16)
    shared = [] if bias is None else [bias]
    ((weights, ids),) = World(1).call(router_collective(spec), [[logits, *shared]])
    shards = zip(down.chunk(size, 1), logits.chunk(size, 1), strict=True)
    inputs = [[a.contiguous(), b, *shared] for a, b in shards]
    world = World(size, protocol, blocks=3, order=3, hosted=protocol == "tagged")
    for _ in range(2):
        for got in world.call(fused_collective(spec), inputs):
            assert all(map(same_bytes, got, (down, weights, ids)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_kimi_is_stand_alone_bit_for_bit(protocol):
    spec = dataclasses.replace(PRESETS["kimi-k3"], scale=2.0)
    for one in (PRESETS["kimi-k3"], spec):
        logits, bias = hard_rows(one)
        logits = logits[[0, 9, 16]]
        down = torch.randn(3, 3584).to(torch.bfloat16)
        ((weights, ids),) = World(1).call(router_collective(one), [[logits, bias]])
        assert torch.equal(ids, router_collective(one).reference([[logits, bias]])[1])
        inputs = [[a, b, bias] for a, b in zip(down.chunk(2, 1), logits.chunk(2, 1), strict=True)]
        for got in World(2, protocol, order=4).call(fused_collective(one), inputs):
            assert all(map(same_bytes, got, (down, weights, ids)))


# --- what the machine itself must notice ----------------------------------------------------------


def test_control_a_store_outside_of_memory_is_an_error():
    plugin = router_collective(PRESETS["gpt-oss-20b"])
    logits, _ = rows_of(plugin.spec, 1)
    world = World(1)
    world.call(plugin, [[logits]])
    memory = world.machine.memory
    params = [0, 0, 1, 1, memory.starts[-3], memory.starts[-2], memory.starts[-1] + 4, 128]
    launch = Launch(program_of(plugin, plugin.variants()[0]), params, 1)
    with pytest.raises(IndexError, match="outside of memory, behind output 1"):
        world.machine.run([launch], plugin.block)


def test_control_a_missing_rank_is_waited_for():
    plugin, world = find("all_gather_heads"), World(2)
    inputs = [[torch.randn(1, 2, 8).half()] for _ in range(2)]
    run, kept = world.machine.run, []
    world.machine.run = lambda launches, threads: kept.extend(launches[:1])
    world.call(plugin, inputs)
    with pytest.raises(RuntimeError, match="a wait that does not end"):
        run(kept, plugin.block, most=20_000)


DIVERGED = """
.visible .entry kernel()
{
	.reg .pred p;
	mov.u32 %r1, %tid.x;
	setp.lt.u32 %p1, %r1, 40;
	@%p1 bra $SKIP;
	bar.sync 0;
$SKIP:
	ret;
}
"""


def test_control_a_barrier_that_not_all_reach_is_an_error():
    with pytest.raises(RuntimeError, match="24 threads wait for ever"):
        Machine().run([Launch(Program(DIVERGED), [], 1)], 64)

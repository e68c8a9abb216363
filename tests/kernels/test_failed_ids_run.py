"""Ids of a call that gave up are in range: what indexes with them must not fault."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

import torch
from collective_cases import argmax
from ptx_world import World
from router_rows import SPECS

from pcie_comm.calls import fused_collective

pytestmark = pytest.mark.timeout(300)

PROTOCOLS = ("push", "pull", "tagged")
ROUTERS = ("kimi-k3", "kimi-k2", "gpt-oss-120b", "softmax groups")


def shards(spec, world: int, rows: list[int]):
    """Random rows of every rank, not as many on each: all of them see a mismatch."""
    dice = torch.Generator().manual_seed(3)
    bias = [torch.randn(spec.num_experts, generator=dice)] if spec.bias else []
    width = 3584 // world if spec is SPECS["kimi-k3"] else 64
    return [
        (
            torch.randn(count, width, generator=dice).bfloat16(),
            torch.randn(count, spec.num_experts // world, generator=dice),
            *bias,
        )
        for count in rows
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name, protocol):
    spec = SPECS[name]
    world = World(2, protocol, blocks=4)
    for outputs in world.call(fused_collective(spec), shards(spec, 2, [3, 5]), fails=True):
        ids = outputs[-1]
        assert ids.min() >= 0
        assert ids.max() < spec.num_experts


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tokens(protocol):
    case = argmax(torch.float32, 320)
    dice = torch.Generator().manual_seed(4)
    inputs = [case.make(2, rows, dice)[0] for rows in (3, 5)]
    world = World(2, protocol, blocks=2)
    for (tokens,) in world.call(case.plugin, inputs, fails=True):
        assert tokens.min() >= 0
        assert tokens.max() < 2 * inputs[0][0].shape[1]

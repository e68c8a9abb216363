"""Shared memory of kernels: a barrier orders every access; without that barrier, none does."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

import ptx_world
import torch
from collective_cases import CASES
from ptx_machine import Program
from ptx_world import World
from router_rows import SPECS, hard_rows

from pcie_comm.calls import fused_collective, router_collective

pytestmark = pytest.mark.timeout(300)

PROTOCOLS = ("push", "pull", "tagged")
SHARED = [
    case
    for case in CASES
    if case.plugin.name in ("all_reduce_rms_norm", "vocab_argmax") and "16" not in case.name
]


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-k2", "deepseek-v3", "qwen3-moe"])
def test_stand_alone_routers_have_no_races(name):
    spec = SPECS[name]
    logits, bias = hard_rows(spec)
    inputs = [logits[[0, 9]]] if bias is None else [logits[[0, 9]], bias]
    World(1, finds_races=True).call(router_collective(spec), [inputs])


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ["kimi-k3", "deepseek-v3", "qwen3-moe"])
def test_fused_routers_have_no_races(name, protocol):
    """Two rows on a block: what one row leaves behind, the next one overwrites."""
    spec = SPECS[name]
    logits, bias = hard_rows(spec)
    shared = [] if bias is None else [bias]
    down = torch.zeros(2, 3584).to(torch.bfloat16)
    inputs = [
        [a, b, *shared] for a, b in zip(down.chunk(2, 1), logits[[0, 9]].chunk(2, 1), strict=True)
    ]
    World(2, protocol, blocks=2, finds_races=True).call(fused_collective(spec), inputs)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", SHARED, ids=[case.name for case in SHARED])
def test_collectives_have_no_races(case, protocol):
    inputs = case.make(2, 5, torch.Generator().manual_seed(1))
    World(2, protocol, blocks=2, finds_races=True).call(case.plugin, inputs)


def without(program: Program, number: int) -> Program:
    """Return the kernel without one of its barriers."""
    found = list(re.finditer(r"\tbar\.(warp\.)?sync[^;]*;", program.text))
    begin, end = found[number].span()
    return Program(program.text[:begin] + program.text[end:])


@pytest.mark.parametrize("name", ["softmax groups", "qwen3-moe", "kimi-k2"])
def test_control_every_barrier_of_a_router_is_needed(name, monkeypatch):
    plugin = router_collective(SPECS[name])
    logits, bias = hard_rows(plugin.spec)
    inputs = [logits[:1]] if bias is None else [logits[:1], bias]
    program = ptx_world.program_of(plugin, plugin.variants()[0])
    barriers = len(re.findall(r"\tbar\.(?:warp\.)?sync", program.text))
    assert barriers >= 5
    for number in range(barriers):
        broken = without(program, number)
        monkeypatch.setattr(ptx_world, "program_of", lambda *_, one=broken: one)
        with pytest.raises(RuntimeError, match="races in shared memory"):
            World(1, finds_races=True).call(plugin, [inputs])

"""Shards that do not divide, on one GPU: exact, eager and captured."""

from __future__ import annotations

import harness
import pytest
import torch

from pcie_comm import Config, kimi_topk16, local_world
from pcie_comm.kernels.all_gathers import AllGather

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MEMORIES = {"VRAM": "cuda_local", "pinned host": "host_pinned"}
PROTOCOLS = ("push", "pull", "tagged")
KIMI = "all_gather_pair_kimi_topk"


def open_world(size: int, memory: str, protocol: str, **settings):
    config = Config(protocol=protocol, timeout_s=10.0, **settings)
    return local_world(size, harness.DEVICE, MEMORIES[memory], config)


@pytest.mark.parametrize("size", [3, 12])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_kimi_is_stand_alone_bit_for_bit(protocol, memory, size):
    """Also with vLLM's numerics, ties, and numbers that are not finite; and beyond a slot."""
    bias = torch.randn(896, device="cuda")
    with open_world(size, memory, protocol, slot_nbytes=1 << 20) as world:
        for group in world.groups:
            group.prepare(KIMI)
        for rows, spec in ((1, None), (33, harness.VLLM), (400, None)):
            down = torch.randn(rows, 3584, device="cuda").bfloat16()
            logits = torch.randn(rows, 896, device="cuda").mul(4).round().div(4)
            logits.view(-1)[::97] = float("nan")
            options = {} if spec is None else {"spec": spec}
            wanted = (down, *kimi_topk16(logits, bias, **options))
            torch.cuda.synchronize()

            def call(group, out=None, d=down, r=logits, more=options):
                shards = (one.tensor_split(size, 1)[group.rank] for one in (d, r))
                return group.all_gather_pair_kimi_topk(*shards, bias, out=out, **more)

            results = world.run(call)
            assert all(all(map(torch.equal, one, wanted)) for one in results)
            harness.replay_twice(world, call, results)
            assert all(all(map(torch.equal, one, wanted)) for one in results)


@pytest.mark.parametrize("size", [2, 5, 16])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_gathers_are_exact(protocol, size):
    widths, heads = (4097, 131), 33
    with open_world(size, "VRAM", protocol, slot_nbytes=1 << 18) as world:
        for group in world.groups:
            for op in ("all_gather_pair", "all_gather_heads", "all_gather"):
                group.prepare(op)
        for rows in (1, 7, 500):
            first = torch.randn(rows, widths[0], device="cuda").bfloat16()
            second = torch.randn(rows, widths[1], device="cuda")
            third = torch.randn(rows, heads, 24, device="cuda").half()
            torch.cuda.synchronize()

            def call(group, a=first, b=second, c=third):
                one, two, three = (t.tensor_split(size, 1)[group.rank] for t in (a, b, c))
                pair = group.all_gather_pair(one, two, widths=widths)
                gathered = group.all_gather_heads(three, heads=heads)
                return (*pair, gathered, group.run(AllGather(1, (widths[1],)), two))

            for results in world.run(call):
                assert all(map(torch.equal, results, (first, second, third, second)))

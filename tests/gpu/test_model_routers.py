"""Routers of other models on the GPU: against torch on this device, fused against stand-alone."""

from __future__ import annotations

import time

import harness
import pytest
import torch
from router_rows import SPECS, hard_rows

from pcie_comm import KIMI_K3, Config, local_world, router_topk
from pcie_comm.kernels.reference import router_topk as reference
from pcie_comm.kernels.router_presets import PRESETS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BATCHES = 5
ROWS = 20_000
MOST_DIFFERENT = {"softmax": 1e-3, "sqrtsoftplus": 1e-3}
"""Share of rows whose ids may differ from torch's, where its functions need not be these."""


def on_device(spec, rows: int, seed: int):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    spread = [1.0, 4.0, 20.0, 1e-3, 60.0][seed % 5]
    logits = torch.randn(rows, spec.num_experts, device="cuda", generator=generator) * spread
    logits.view(-1)[:: 9_973 + seed] = float("nan")
    logits.view(-1)[5 :: 7_919 + seed] = float("inf")
    bias = torch.randn(spec.num_experts, device="cuda", generator=generator) * 0.1
    return logits, bias if spec.bias else None


@pytest.mark.parametrize("name", SPECS)
def test_rows_are_those_of_torch(name, figures):
    spec, different, rows, worst = SPECS[name], 0, 0, 0.0
    for seed in range(BATCHES):
        logits, bias = on_device(spec, ROWS, seed)
        weights, ids = router_topk(logits, bias, spec)
        want, want_ids = reference(logits, bias, spec)
        ranked = ids.sort(1).values
        assert bool((ranked[:, 1:] != ranked[:, :-1]).all())
        assert int(ids.min()) >= 0 and int(ids.max()) < spec.num_experts
        same = (ids == want_ids).all(1)
        different += int((~same).sum())
        worst = max(worst, float((weights[same] - want[same]).abs().max()))
        rows += ROWS
    hard, bias = hard_rows(spec)
    hard, bias = hard.cuda(), None if bias is None else bias.cuda()
    _, ids = router_topk(hard, bias, spec)
    hard_different = int((ids != reference(hard, bias, spec)[1]).any(1).sum())
    figures(router=name, rows=rows, different=different, hard=hard_different, worst=worst)
    assert different <= MOST_DIFFERENT.get(spec.score, 0.0) * rows
    assert worst < 4e-6 * spec.scale
    assert hard_different == 0 or spec.score in MOST_DIFFERENT


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
@pytest.mark.parametrize("protocol", ["push", "pull", "tagged"])
def test_fused_is_stand_alone_bit_for_bit(protocol, world_size, figures):
    different, calls = [], 0
    with local_world(world_size, harness.DEVICE, config=Config(protocol=protocol)) as world:
        for name, spec in SPECS.items():
            if spec.num_experts % world_size:
                continue
            for group in world.groups:
                group.prepare(spec)
            for rows in (1, 24):
                logits, bias = hard_rows(spec)
                logits, bias = logits[:rows].cuda(), None if bias is None else bias.cuda()
                width = 3584 if spec == KIMI_K3 else 32 * world_size
                down = harness.random_bytes((rows, width), torch.bfloat16)
                weights, ids = router_topk(logits, bias, spec)
                shards = [t.chunk(world_size, 1) for t in (down, logits)]
                torch.cuda.synchronize()
                results = []
                for group, stream in zip(world.groups, world.streams, strict=True):
                    torch.cuda.set_stream(stream)
                    local = [shard[group.rank] for shard in shards]
                    results.append(group.all_gather_pair_topk(*local, bias, spec=spec))
                harness.settle(world)
                for got in results:
                    calls += 1
                    pairs = zip(got, (down, weights, ids), strict=True)
                    if not all(
                        torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))
                        for a, b in pairs
                    ):
                        different.append(name)
    figures(protocol=protocol, world=world_size, calls=calls, different=len(different))
    assert not different


@pytest.mark.parametrize("rows", [1, 64])
def test_times_beside_kimi(rows, figures):
    """Records, and asserts nothing: microseconds of a call, from graphs of 50."""
    times = {}
    for name, spec in PRESETS.items():
        logits, bias = on_device(spec, rows, 0)
        out = router_topk(logits, bias, spec)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(50):
                router_topk(logits, bias, spec, out=out)
        best = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(10):
                graph.replay()
            torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - started) / 500)
        times[name] = round(best * 1e6, 2)
    figures(rows=rows, microseconds=times)

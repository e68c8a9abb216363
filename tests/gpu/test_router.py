"""The router on the GPU: the whole corpus, bits of torch.sigmoid, stand-alone against fused."""

from __future__ import annotations

import harness
import pytest
import router_corpus
import router_oracle
import torch

from pcie_comm import KIMI_K3, Config, kimi_topk16, local_world
from pcie_comm.kernels.reference import router_topk

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

SPECS = {"torch": KIMI_K3, "vllm": harness.VLLM}


def violations(weights, ids, case, spec) -> list[str]:
    none_valid = "uniform" if spec.numerics == "vllm" else "zero"
    rule = router_oracle.Rule(none_valid=none_valid)
    ids, weights = ids.cpu().numpy(), weights.cpu().numpy()
    return list(router_oracle.violations(ids, weights, case.logits, case.bias, rule))


@pytest.mark.parametrize("numerics", SPECS)
def test_corpus_stand_alone(numerics, figures):
    spec, rows, bad, repeated = SPECS[numerics], 0, [], 0
    for case in router_corpus.corpus():
        logits = torch.from_numpy(case.logits).cuda()
        bias = torch.from_numpy(case.bias).cuda()
        weights, ids = kimi_topk16(logits, bias, spec=spec)
        rows += logits.shape[0]
        bad += [f"{case.name}: {text}" for text in violations(weights, ids, case, spec)]
        repeated += sum(len(set(row)) != 16 for row in ids.tolist())
    figures(numerics=numerics, rows=rows, violations=len(bad), repeated_ids=repeated)
    assert not bad
    assert repeated == 0


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
@pytest.mark.parametrize("numerics", SPECS)
def test_corpus_fused_equals_stand_alone(numerics, world_size, figures):
    """Fused and stand-alone bits, on every rank, over the whole corpus in batches of one bias."""
    spec, rows, different = SPECS[numerics], 0, []
    width, down_width = 896 // world_size, harness.HIDDEN // world_size
    with local_world(world_size, harness.DEVICE, config=Config(timeout_s=10)) as world:
        down = torch.zeros((64, down_width), dtype=torch.bfloat16, device="cuda")
        queued = []
        for case in router_corpus.corpus():
            logits = torch.from_numpy(case.logits).cuda()
            bias = torch.from_numpy(case.bias).cuda()
            shards = [logits[:, r * width : (r + 1) * width] for r in range(world_size)]
            count = logits.shape[0]
            torch.cuda.synchronize()
            results = []
            for group, stream in zip(world.groups, world.streams, strict=True):
                torch.cuda.set_stream(stream)
                results.append(
                    group.all_gather_pair_kimi_topk(
                        down[:count], shards[group.rank], bias, spec=spec
                    )
                )
            torch.cuda.set_stream(torch.cuda.default_stream())
            torch.cuda.synchronize()
            queued.append((case.name, kimi_topk16(logits, bias, spec=spec), results))
            rows += count
        for group in world.groups:
            group.check()
        for name, (weights, ids), results in queued:
            for _, fused_weights, fused_ids in results:
                same = torch.equal(ids, fused_ids) and torch.equal(
                    weights.view(torch.int32), fused_weights.view(torch.int32)
                )
                if not same:
                    different.append(name)
    figures(numerics=numerics, world=world_size, rows=rows, different=len(different))
    assert not different


@pytest.mark.parametrize("numerics", SPECS)
def test_scores_are_bits_of_torch(numerics, figures):
    """Ids and weights of a million rows against torch's own sigmoid or tanh on this device.

    The sum of the reference is taken in the kernel's order, so that weights compare exactly.
    """
    spec, different, rows = SPECS[numerics], 0, 0
    generator = torch.Generator(device="cuda").manual_seed(1)
    places = torch.arange(16, device="cuda")
    for index in range(25):
        spread = [1.0, 4.0, 40.0, 100.0, 1e-3][index % 5]
        logits = torch.randn(40_000, 896, device="cuda", generator=generator) * spread
        bias = torch.randn(896, device="cuda", generator=generator) * [0.02, 3.0][index % 2]
        weights, ids = kimi_topk16(logits, bias, spec=spec)
        _, want_ids = router_topk(logits, bias, spec)
        score = torch.sigmoid(logits) if numerics == "torch" else 0.5 * torch.tanh(logits / 2) + 0.5
        chosen = score.gather(1, ids.long())
        total = chosen.clone()
        for step in (8, 4, 2, 1):
            total = total + total[:, places ^ step]
        want = chosen / (total + 1e-20)
        wrong = (ids != want_ids).any(1) | (
            weights.view(torch.int32) != want.view(torch.int32)
        ).any(1)
        different += int(wrong.sum())
        rows += logits.shape[0]
    figures(numerics=numerics, rows=rows, different=different)
    assert different == 0


def test_rows_do_not_depend_on_the_batch():
    logits = torch.randn(64, 896, device="cuda")
    logits[::7, 3] = float("nan")
    bias = torch.randn(896, device="cuda") * 0.1
    weights, ids = kimi_topk16(logits, bias)
    for row in range(64):
        alone = kimi_topk16(logits[row : row + 1], bias)
        assert torch.equal(alone[0][0], weights[row])
        assert torch.equal(alone[1][0], ids[row])

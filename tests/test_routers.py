"""Routers of every kind on the CPU: against float64 as models state them, and the contract."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from router_rows import SPECS, hard_rows, rows_of
from worlds import small

from pcie_comm import (
    KIMI_K3,
    InvalidArgumentError,
    local_world,
    router_topk,
)
from pcie_comm.kernels.router_presets import PRESETS, QWEN3_MOE


def as_models_have_it(logits, bias, spec):
    """The router in float64 as modelling code states it; finite numbers only."""
    x = logits.double()
    score = {
        "sigmoid": lambda: 1 / (1 + torch.exp(-x)),
        "softmax": lambda: torch.softmax(x, -1),
        "softmax_topk": lambda: x,
        "sqrtsoftplus": lambda: torch.log1p(torch.exp(x)).sqrt(),
    }[spec.score]()
    choice = score if bias is None else score + bias.double()
    if spec.groups > 1:
        grouped = choice.view(len(x), spec.groups, -1)
        best = grouped.topk(2 if spec.bias else 1, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(spec.topk_groups).indices, 1).bool()
        choice = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.topk(spec.top_k).indices
    picked = score.gather(1, ids)
    if spec.score == "softmax_topk":
        picked = torch.softmax(picked, -1)
    elif spec.renormalize:
        picked = picked / (picked.sum(-1, keepdim=True) + spec.eps)
    return picked * spec.scale, ids


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_router_is_what_models_have(spec):
    logits, bias = rows_of(spec, 200)
    weights, ids = router_topk(logits, bias, spec)
    want, want_ids = as_models_have_it(logits, bias, spec)
    same = (ids == want_ids).all(1)
    assert same.float().mean() > 0.98  # the rest: neighbours that fp32 does not tell apart
    assert (weights[same] - want[same]).abs().max() < 3e-6 * spec.scale
    assert (torch.sort(ids[~same]).values != torch.sort(want_ids[~same]).values).sum() <= 2


def contract(logits, bias, spec, score):
    """The contract, expert by expert; `score` holds the fp32 scores."""
    rows, experts = logits.shape
    bias = np.zeros(experts, np.float32) if bias is None else bias.numpy()
    ids = np.empty((rows, spec.top_k), np.int64)
    valid = np.isfinite(logits.numpy()) & np.isfinite(bias)
    size = experts // spec.groups
    for row in range(rows):
        with np.errstate(all="ignore"):
            choice = np.where(valid[row], score[row].numpy() + bias, -np.inf)
        if spec.groups > 1:
            count = 2 if spec.bias else 1
            best = [
                sum(
                    sorted(choice[g * size : (g + 1) * size])[::-1][:count][i] for i in range(count)
                )
                for g in range(spec.groups)
            ]
            kept = sorted(range(spec.groups), key=lambda g: (-best[g], g))[: spec.topk_groups]
            valid[row] &= np.isin(np.arange(experts) // size, kept)
            choice = np.where(valid[row], choice, -np.inf)
        ids[row] = sorted(range(experts), key=lambda e: (-choice[e], e))[: spec.top_k]
    return ids, valid


HARD = {name: (spec, False) for name, spec in SPECS.items()}
HARD |= {f"{name}, bad bias": (spec, True) for name, spec in SPECS.items() if spec.bias}


@pytest.mark.parametrize(("spec", "bad_bias"), HARD.values(), ids=HARD)
def test_the_contract_holds_in_hard_rows(spec, bad_bias):
    from pcie_comm.kernels.reference import score_of

    logits, bias = hard_rows(spec)
    if bad_bias:
        bias[::5] = torch.nan
    weights, ids = router_topk(logits, bias, spec)
    want, valid = contract(logits, bias, spec, score_of(logits, spec))
    assert (ids.numpy() == want).all()
    assert all(len(set(row)) == spec.top_k for row in ids.tolist())
    assert weights.isfinite().all()
    chosen = np.take_along_axis(valid, want, 1)
    nothing = ~valid.any(1)
    if spec.numerics == "vllm":
        assert (weights[torch.from_numpy(nothing)] == np.float32(1 / spec.top_k)).all()
        chosen, weights = chosen[~nothing], weights[torch.from_numpy(~nothing)]
    assert (weights.numpy()[~chosen] == 0).all()
    sums = weights.double().sum(1).numpy()[chosen.any(1)]
    if spec.score == "softmax_topk":
        assert np.allclose(sums, spec.scale, rtol=1e-5)
    alone = [router_topk(logits[i : i + 1], bias, spec) for i in range(len(logits))]
    assert torch.equal(ids, torch.cat([one[1] for one in alone]))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_no_rows_give_no_rows(spec):
    """Alone and in a group, whatever the score and the groups."""
    logits, bias = rows_of(spec, 0)
    weights, ids = router_topk(logits, bias, spec)
    assert weights.shape == ids.shape == (0, spec.top_k)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    with local_world(1, "cpu", config=small(slot_nbytes=1 << 16)) as world:
        down, weights, ids = world.groups[0].all_gather_pair_topk(
            torch.empty(0, 3584).bfloat16(), logits, bias, spec=spec
        )
    assert (down.shape, weights.shape, ids.shape) == ((0, 3584), (0, spec.top_k), (0, spec.top_k))


def test_presets_are_those_of_the_shared_notes():
    """Experts, top k and scale as the models' configurations have them."""
    numbers = {name: (s.num_experts, s.top_k, s.scale) for name, s in PRESETS.items()}
    assert numbers == {
        "kimi-k3": (896, 16, 1.0),
        "kimi-k2": (384, 8, 2.827),
        "kimi-k2.5": (384, 8, 2.827),
        "kimi-linear": (256, 8, 2.446),
        "deepseek-v3": (256, 8, 2.5),
        "deepseek-v4-flash": (256, 6, 1.5),
        "deepseek-v4-pro": (384, 6, 2.5),
        "glm-4.5": (160, 8, 2.5),
        "glm-4.5-air": (128, 8, 1.0),
        "minimax-m2": (256, 8, 1.0),
        "qwen3-moe": (128, 8, 1.0),
        "gpt-oss-120b": (128, 4, 1.0),
        "gpt-oss-20b": (32, 4, 1.0),
    }


WORLDS = {"kimi-k2": 8, "deepseek-v3": 4, "qwen3-moe": 2, "gpt-oss-20b": 4, "glm-4.5": 5}


@pytest.mark.parametrize("protocol", ["push", "pull"])
@pytest.mark.parametrize(("name", "world_size"), WORLDS.items())
def test_the_fused_call_is_a_gather_and_a_router(name, world_size, protocol):
    spec = PRESETS[name]
    logits, bias = rows_of(spec, 3)
    down = torch.randn(3, 16 * world_size).to(torch.bfloat16)
    want = router_topk(logits, bias, spec)

    def on_rank(group):
        first, second = (t.chunk(world_size, 1)[group.rank] for t in (down, logits))
        out = (torch.empty_like(down), *map(torch.empty_like, want))
        for given in (None, out):
            got = group.all_gather_pair_topk(first, second, bias, out=given, spec=spec)
            assert all(map(torch.equal, got, (down, *want)))

    with local_world(world_size, "cpu", config=small(protocol=protocol)) as world:
        world.run(on_rank)


def test_kimi_is_one_of_them():
    from pcie_comm.calls import fused_collective, router_collective

    assert router_collective(KIMI_K3).name == "kimi_topk16"
    assert fused_collective(KIMI_K3).name == "all_gather_pair_kimi_topk"
    vllm = dataclasses.replace(KIMI_K3, numerics="vllm")
    assert fused_collective(vllm).name == "all_gather_pair_kimi_topk"
    other = dataclasses.replace(KIMI_K3, scale=2.0)
    assert fused_collective(other).name == "all_gather_pair_topk"
    names = [key for s in (KIMI_K3, other) for key in fused_collective(s).variants()]
    assert len(set(map(str, names))) == len(names)


def test_a_bias_is_given_if_and_only_if_the_router_has_one():
    logits, _ = rows_of(QWEN3_MOE, 1)
    with pytest.raises(InvalidArgumentError, match="bias=False") as caught:
        router_topk(logits, torch.zeros(128), QWEN3_MOE)
    assert caught.value.op == "router_topk"
    with pytest.raises(InvalidArgumentError):
        router_topk(logits, None, PRESETS["glm-4.5-air"])
    with pytest.raises(InvalidArgumentError, match="is no RouterSpec"):
        router_topk(logits, None, "qwen3-moe")


def test_equal_shares_of_what_does_not_divide_are_refused():
    spec = PRESETS["kimi-k2"]
    with local_world(5, "cpu", config=small()) as world:
        for group in world.groups[:4]:
            with pytest.raises(InvalidArgumentError, match=r"\[rows, 77\]"):
                group.all_gather_pair_topk(
                    torch.zeros(1, 8), torch.zeros(1, 76), torch.zeros(384), spec=spec
                )


def test_every_plan_fits_its_kernel():
    """As many scalars as the kernel takes, a kernel that exists, and blocks for every row."""
    from pcie_comm.calls import fused_collective
    from pcie_comm.kernels.collective import PlanInfo, TensorMeta
    from pcie_comm.kernels.plan_checks import check_plan, make_plan

    for spec, world, protocol in itertools.product(
        SPECS.values(), (1, 2, 3, 4, 8, 16), ("push", "pull", "tagged", "auto")
    ):
        if spec.num_experts % world:
            continue
        plugin = fused_collective(spec)
        for rows in (0, 1, 7, 64):
            info = PlanInfo(0, world, protocol, (4 << 20) // world, 64, 16)
            kimi = plugin.name == "all_gather_pair_kimi_topk"
            width, local = 3584 // world if kimi else 40, spec.num_experts // world
            metas = [
                TensorMeta((rows, width), "bfloat16", (width, 1), 2),
                TensorMeta((rows, local), "float32", (local, 1), 4),
                TensorMeta((spec.num_experts,), "float32", (1,), 4),
            ]
            plan = make_plan(plugin, info, metas[: plugin.num_inputs])
            check_plan(plugin, plan, info, plan.staged_nbytes)
            assert plan.kernel in plugin.variants()
            assert len(plan.scalars) == plugin.num_scalars(plan.kernel)
            assert plan.scalars[1] * plan.scalars[3] >= rows

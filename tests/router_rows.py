"""Routers and rows that tests share: published models, and parameters that none has."""

from __future__ import annotations

import torch

from pcie_comm import RouterSpec
from pcie_comm.kernels.router_presets import PRESETS

OTHERS = {
    "nemotron": RouterSpec(512, 22, scale=5.0),
    "softmax with bias": RouterSpec(96, 6, score="softmax"),
    "softmax groups": RouterSpec(160, 6, score="softmax", groups=8, topk_groups=3, bias=False),
    "not renormalised": RouterSpec(
        64, 6, score="softmax", bias=False, renormalize=False, scale=16.0
    ),
    "largest": RouterSpec(1024, 32, score="softmax", groups=16, topk_groups=8),
    "one": RouterSpec(1, 1),
    "odd": RouterSpec(37, 5, eps=0.0),
    "vllm": RouterSpec(72, 6, numerics="vllm"),
    "many without bias": RouterSpec(640, 8, bias=False),
    "chosen, with eps": RouterSpec(
        64, 5, score="softmax_topk", bias=False, renormalize=False, eps=0.5
    ),
}
SPECS = {**PRESETS, **OTHERS}


def rows_of(
    spec: RouterSpec, rows: int, *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, spec.num_experts, generator=generator)
    bias = torch.randn(spec.num_experts, generator=generator) * 0.05
    return logits, bias if spec.bias else None


def hard_rows(spec: RouterSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ties, numbers that are not finite, and fewer valid experts than are selected."""
    logits, bias = rows_of(spec, 24, seed=1)
    logits[:8] = (logits[:8] * 2).round() / 2  # ties
    logits[8:16][
        torch.rand(8, spec.num_experts, generator=torch.Generator().manual_seed(2)) < 0.3
    ] = torch.nan
    logits[10, ::2] = torch.inf
    logits[11, 1::2] = -torch.inf
    logits[16] = torch.nan
    logits[17] = -torch.inf
    logits[18] = 0.0
    logits[19, 1:] = torch.nan
    logits[20, : spec.num_experts // 2] = torch.inf
    logits[21] = 300.0
    logits[22] = -300.0
    logits[23, ::3] = -0.0
    return logits, bias

"""The reductions in plain torch; see reference.py. In the order of ranks, in fp32, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_of_ranks(shards: Sequence[Tensor]) -> Tensor:
    """Return the fp32 sum, contiguous, added up from the first to the last."""
    total = shards[0].to(torch.float32).clone(memory_format=torch.contiguous_format)
    for shard in shards[1:]:
        total = total + shard.to(torch.float32)
    return total


def merge_by_lse(partials: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """Merge partial attention by its log-sum-exp.

    Args:
        partials: [rows, heads, dim] per rank.
        lses: [rows, heads] fp32 per rank; where one is not finite, its partial counts for nothing,
            whatever it holds.

    Returns:
        [rows, heads, dim] fp32; 0 where no log-sum-exp is finite.
    """
    stacked = torch.stack([lse.to(torch.float32) for lse in lses])
    finite = stacked.isfinite()
    best = torch.where(finite, stacked, float("-inf")).amax(0)
    best = torch.where(best.isfinite(), best, 0.0)
    merged = torch.zeros(partials[0].shape, dtype=torch.float32, device=best.device)
    total = torch.zeros_like(best)
    for partial, lse, there in zip(partials, stacked, finite, strict=True):
        weight = torch.where(there, torch.exp(lse - best), 0.0)
        values = torch.where(there.unsqueeze(-1), partial.to(torch.float32), 0.0)
        merged = merged + weight.unsqueeze(-1) * values
        total = total + weight
    divisor = torch.where(total > 0, total, 1.0)
    return merged / divisor.unsqueeze(-1)


def add_and_normalise(
    total: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of the new residual, and the new residual.

    Args:
        total: [rows, hidden] fp32.
        residual: [rows, hidden]; the sum is rounded to its dtype before it is normalised.
        weight: [hidden].
        eps: Added to the mean of the squares.
    """
    updated = (total + residual.to(torch.float32)).to(residual.dtype)
    values = updated.to(torch.float32)
    mean = (values * values).sum(-1, keepdim=True) / values.shape[-1]
    scaled = values * (1.0 / torch.sqrt(mean + eps)) * weight.to(torch.float32)
    return scaled.to(residual.dtype), updated


def largest_id(shards: Sequence[Tensor]) -> Tensor:
    """Return where a row of column shards is largest, int64: the lowest id of those that tie.

    A NaN is not chosen while the row has a number; of a row of NaN alone, 0 is.
    """
    logits = torch.cat(list(shards), dim=1).to(torch.float32)
    number = ~logits.isnan()
    best = torch.where(number, logits, float("-inf")).amax(1, keepdim=True)
    chosen = number & (logits == best)
    ids = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    first = torch.where(chosen, ids, logits.shape[1]).amin(1)
    return torch.where(number.any(1), first, 0)

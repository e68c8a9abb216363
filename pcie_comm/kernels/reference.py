"""The collectives in plain torch: what runs on a CPU, and what kernels are compared with.

Every function takes tensors on any device, returns new contiguous tensors there, and accepts
zero rows. A row's result depends on that row alone, to the bit, whatever the batch around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pcie_comm.errors import InvalidArgumentError
from pcie_comm.kernels.router_spec import RouterSpec


def router_topk(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """Select ``spec.top_k`` experts per row and weigh them.

    Args:
        logits: [rows, num_experts] fp32, any strides.
        bias: [num_experts] fp32, on the device of ``logits``; None if the router has none.
        spec: The router; its module states the contract.

    Returns:
        weights [rows, top_k] fp32 and ids [rows, top_k] int32, best first. The scores are summed
        in the order of the kernels, see topk.sum_by_halves: the sum has one value everywhere.

    Raises:
        InvalidArgumentError: Shape, dtype or device does not fit.
    """
    _check_router_inputs(logits, bias, spec)
    valid = torch.isfinite(logits) if bias is None else torch.isfinite(logits) & bias.isfinite()
    score = torch.where(valid, score_of(logits, spec), 0.0)
    # Only a non-valid expert has -inf. Adding 0 makes -0 a +0: some sorts tell them apart.
    choice = torch.where(valid, score if bias is None else score + bias, float("-inf")) + 0.0
    if spec.groups > 1:
        valid = valid & _in_best_groups(choice, spec)
        choice = torch.where(valid, choice, float("-inf"))
        score = torch.where(valid, score, 0.0)
    # A stable sort keeps equal choices in id order, for the valid and for the non-valid ones.
    ranked = torch.sort(choice, dim=-1, descending=True, stable=True).indices
    ids = ranked[:, : spec.top_k]
    picked = score.gather(1, ids)
    if spec.score == "softmax_topk":
        above = _by_row(torch.exp, picked - picked[:, :1])
        picked = torch.where(valid.gather(1, ids), above, 0.0)
    weights = _weights(picked, spec)
    if spec.numerics == "vllm":
        weights = torch.where(valid.any(1, keepdim=True), weights, 1.0 / spec.top_k)
    return weights, ids.to(torch.int32)


def score_of(logits: Tensor, spec: RouterSpec) -> Tensor:
    """Return the scores of all experts; what is not finite is left to the caller."""
    if spec.score == "sigmoid":
        return _by_row(_sigmoid_from_tanh if spec.numerics == "vllm" else torch.sigmoid, logits)
    if spec.score == "sqrtsoftplus":
        return _by_row(lambda row: torch.nn.functional.softplus(row).sqrt(), logits)
    if spec.score == "softmax":
        return _softmax(logits)
    return logits


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over the finite logits, added up in the order of the kernels, see router_rows.py."""
    finite = logits.isfinite()
    best = torch.where(finite, logits, float("-inf")).amax(1, keepdim=True)
    above = torch.where(finite, _by_row(torch.exp, logits - best), 0.0)
    width = -(-logits.shape[1] // 32) * 32
    padded = torch.nn.functional.pad(above, (0, width - logits.shape[1]))
    steps = padded.reshape(len(logits), width // 32, 32)
    total = torch.zeros_like(steps[:, 0])
    for step in steps.unbind(1):
        total = total + step
    for half in (16, 8, 4, 2, 1):
        total = total[:, :half] + total[:, half : 2 * half]
    return above / total


def _in_best_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    """Return which experts belong to the groups that stay."""
    size = spec.num_experts // spec.groups
    grouped = choice.reshape(len(choice), spec.groups, size)  # not -1: there may be no rows
    best = grouped.sort(dim=-1, descending=True).values
    score = best[..., 0] + best[..., 1] + 0.0 if spec.bias else best[..., 0]
    order = score.sort(dim=-1, descending=True, stable=True).indices[:, : spec.topk_groups]
    stays = torch.zeros_like(score, dtype=torch.bool).scatter_(1, order, True)
    return stays.repeat_interleave(size, dim=1)


def _weights(picked: Tensor, spec: RouterSpec) -> Tensor:
    """Return the weights of selected scores, best first; 0 where the divisor is."""
    if not spec.renormalize and spec.score != "softmax_topk":
        return picked * spec.scale
    total = _sum_by_halves(picked)
    eps = spec.eps if spec.renormalize else 0.0
    divisor = (total + eps).unsqueeze(1)
    return torch.where(divisor > 0, picked * spec.scale / divisor, 0.0)


def _sum_by_halves(picked: Tensor) -> Tensor:
    """Return the sums of rows [rows, width], in the order of topk.sum_by_halves."""
    half = 1 << max(picked.shape[1] - 1, 1).bit_length() >> 1
    while half:
        upper = picked[:, half : 2 * half]
        lower = picked[:, :half]
        lower = torch.cat([lower[:, : upper.shape[1]] + upper, lower[:, upper.shape[1] :]], 1)
        picked, half = lower, half >> 1
    return picked[:, 0]


def gather_columns(shards: Sequence[Tensor]) -> Tensor:
    """Put the ranks' column shards side by side, rank 0 first, every byte as it was.

    Args:
        shards: One [rows, width] tensor per rank, in rank order, alike in shape and dtype.

    Returns:
        [rows, world_size * width].

    Raises:
        InvalidArgumentError: There is no shard, or shards differ in shape, dtype or device.
    """
    return _concatenate_bytes(shards, ("rows", "width"))


def gather_heads(shards: Sequence[Tensor]) -> Tensor:
    """Put the ranks' attention heads together, rank 0 first, every byte as it was.

    Args:
        shards: One [rows, heads / world_size, dim] tensor per rank, in rank order, alike in
            shape and dtype.

    Returns:
        [rows, heads, dim].

    Raises:
        InvalidArgumentError: There is no shard, or shards differ in shape, dtype or device.
    """
    return _concatenate_bytes(shards, ("rows", "heads", "dim"))


def gather_dense(shards: Sequence[Tensor], uneven: bool = False) -> Tensor:
    """Put the ranks' shards together along their second dimension, every byte as it was.

    Args:
        shards: One [rows, width, ...] tensor per rank, in rank order, alike in shape and dtype.
        uneven: Widths may differ.
    """
    axes = ("rows", "width", *(f"size {i}" for i in range(2, shards[0].ndim)))
    return _concatenate_bytes(shards, axes, uneven)


def _by_row(formula: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Return an elementwise function of values [rows, width]; a row's bits depend on it alone."""
    if values.device.type != "cpu" or values.shape[0] == 0:
        return formula(values.contiguous())
    # One call per row. Over a batch, torch splits the elements between threads, and the last
    # few of each part take a scalar exp that differs from the vector one by an ulp: in torch
    # 2.13 with 3 threads, 4 of 257 x 896 sigmoids. A row is below the size that is split.
    return torch.stack([formula(row) for row in values.contiguous()])


def _sigmoid_from_tanh(logits: Tensor) -> Tensor:
    return 0.5 * torch.tanh(0.5 * logits) + 0.5


def _check_router_inputs(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> None:
    experts = spec.num_experts
    wanted = f"fp32 logits [rows, {experts}]"
    given = f"logits={_describe(logits)}"
    problem = ""
    if bias is not None:
        wanted += f" and fp32 bias [{experts}] on one device"
        given += f", bias={_describe(bias)}"
        if tuple(bias.shape) != (experts,):
            problem = "shape"
        elif bias.dtype != torch.float32:
            problem = "dtype"
        elif logits.device != bias.device:
            problem = "device"
    if logits.ndim != 2 or logits.shape[1] != experts:
        problem = "shape"
    elif logits.dtype != torch.float32:
        problem = problem or "dtype"
    if (bias is not None) != spec.bias:
        problem = "bias"
        given = f"bias={'None' if bias is None else _describe(bias)}, spec.bias={spec.bias}"
    if problem:
        raise InvalidArgumentError(
            f"wrong {problem}: {given}, num_experts={experts}; pass {wanted}", op="router_topk"
        )


def _concatenate_bytes(
    shards: Sequence[Tensor], axes: Sequence[str], uneven: bool = False
) -> Tensor:
    """Concatenate along axis 1. As bytes, because torch's support of fp8 is patchy."""
    wanted = f"pass one [{', '.join(axes)}] tensor per rank, alike in shape, dtype and device"
    if not shards:
        raise InvalidArgumentError(f"nothing to gather: shards=0; {wanted}")
    first = shards[0]
    for rank, shard in enumerate(shards):
        ours, theirs = (
            [*one.shape[:1], *one.shape[2 if uneven else 1 :], one.dtype, one.device]
            for one in (shard, first)
        )
        alike = ours == theirs
        if shard.ndim != len(axes) or not alike:
            raise InvalidArgumentError(
                f"shard of rank {rank} does not fit: shard={_describe(shard)}, "
                f"rank 0={_describe(first)}; {wanted}"
            )
    # Not contiguous(): it passes a tensor of one column whose stride the byte view refuses.
    packed = (shard.clone(memory_format=torch.contiguous_format) for shard in shards)
    as_bytes = [shard.view(torch.uint8) for shard in packed]
    return torch.cat(as_bytes, dim=1).view(first.dtype)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"

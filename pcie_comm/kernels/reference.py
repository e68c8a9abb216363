"""The collectives in plain torch: what runs on a CPU, and what kernels are compared with.

Every function takes tensors on any device, returns new contiguous tensors there, and accepts
zero rows. A row's result depends on that row alone, to the bit, whatever the batch around it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcie_comm.errors import InvalidArgumentError
from pcie_comm.kernels.router_spec import RouterSpec


def router_topk(logits: Tensor, bias: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """Select ``spec.top_k`` experts per row and weigh them.

    Args:
        logits: [rows, num_experts] fp32, any strides.
        bias: [num_experts] fp32, on the device of ``logits``.
        spec: The router; its module states the contract.

    Returns:
        weights [rows, top_k] fp32 and ids [rows, top_k] int32, best first. The scores are summed
        in selection order, one after the other, so that the sum has one value.

    Raises:
        InvalidArgumentError: Shape, dtype or device does not fit.
    """
    _check_router_inputs(logits, bias, spec)
    valid = torch.isfinite(logits) & torch.isfinite(bias)
    score = torch.where(valid, _sigmoid(logits, spec.numerics), 0.0)
    # Only a non-valid expert has -inf. Adding 0 makes -0 a +0: some sorts tell them apart.
    choice = torch.where(valid, score + bias, float("-inf")) + 0.0
    # A stable sort keeps equal choices in id order, for the valid and for the non-valid ones.
    ranked = torch.sort(choice, dim=-1, descending=True, stable=True).indices
    ids = ranked[:, : spec.top_k]
    picked = score.gather(1, ids)
    total = torch.zeros_like(picked[:, 0])
    for column in picked.unbind(1):
        total = total + column
    weights = picked * spec.scale / (total + spec.eps).unsqueeze(1)
    if spec.numerics == "vllm":
        weights = torch.where(valid.any(1, keepdim=True), weights, 1.0 / spec.top_k)
    return weights, ids.to(torch.int32)


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


def _sigmoid(logits: Tensor, numerics: str) -> Tensor:
    formula = _sigmoid_from_tanh if numerics == "vllm" else torch.sigmoid
    if logits.device.type != "cpu" or logits.shape[0] == 0:
        return formula(logits.contiguous())
    # One call per row. Over a batch, torch splits the elements between threads, and the last
    # few of each part take a scalar exp that differs from the vector one by an ulp: in torch
    # 2.13 with 3 threads, 4 of 257 x 896 sigmoids. A row is below the size that is split.
    return torch.stack([formula(row) for row in logits.contiguous()])


def _sigmoid_from_tanh(logits: Tensor) -> Tensor:
    return 0.5 * torch.tanh(0.5 * logits) + 0.5


def _check_router_inputs(logits: Tensor, bias: Tensor, spec: RouterSpec) -> None:
    experts = spec.num_experts
    if logits.ndim != 2 or logits.shape[1] != experts or tuple(bias.shape) != (experts,):
        problem = "shape"
    elif logits.dtype != torch.float32 or bias.dtype != torch.float32:
        problem = "dtype"
    elif logits.device != bias.device:
        problem = "device"
    else:
        return
    raise InvalidArgumentError(
        f"wrong {problem}: logits={_describe(logits)}, bias={_describe(bias)}, "
        f"num_experts={experts}; pass fp32 logits [rows, {experts}] and fp32 bias [{experts}] "
        "on one device",
        op="router_topk",
    )


def _concatenate_bytes(shards: Sequence[Tensor], axes: tuple[str, ...]) -> Tensor:
    """Concatenate along axis 1. As bytes, because torch's support of fp8 is patchy."""
    wanted = f"pass one [{', '.join(axes)}] tensor per rank, alike in shape, dtype and device"
    if not shards:
        raise InvalidArgumentError(f"nothing to gather: shards=0; {wanted}")
    first = shards[0]
    for rank, shard in enumerate(shards):
        alike = (shard.shape, shard.dtype, shard.device) == (first.shape, first.dtype, first.device)
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

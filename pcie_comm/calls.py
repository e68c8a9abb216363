"""Calls beyond those of Kimi K3, as methods of a group and of a channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import InvalidArgumentError
from .kernels.registry import Collective, find
from .kernels.router_spec import KIMI_K3, RouterSpec


def router_collective(spec: RouterSpec) -> Collective:
    """Return the stand-alone plugin of a router, the same object for the same spec."""
    check_spec(spec)
    if spec not in _routers:
        from .kernels.router import RouterTopk

        _routers[spec] = RouterTopk(spec)
    return _routers[spec]


def fused_collective(spec: RouterSpec) -> Collective:
    """Return the fused plugin of a router, the same object for the same spec."""
    if spec is KIMI_K3:
        return find("all_gather_pair_kimi_topk")  # without the cost of hashing the spec
    check_spec(spec)
    if spec not in _fused:
        from .kernels.all_gather_pair_topk import AllGatherPairTopk

        _fused[spec] = AllGatherPairTopk(spec)
    return _fused[spec]


_routers: dict[RouterSpec, Collective] = {}
_fused: dict[RouterSpec, Collective] = {}


def check_spec(spec: object) -> None:
    """Check that `spec=` is a router.

    Raises:
        InvalidArgumentError: It is not.
    """
    if not isinstance(spec, RouterSpec):
        raise InvalidArgumentError(f"spec={spec!r} is no RouterSpec; give one, or leave it out")


def router_inputs(router: Collective, spec: RouterSpec, *tensors: Any) -> tuple[Any, ...]:
    """Return the inputs of a router's plugin: the last one is the bias, if the router has one.

    Raises:
        InvalidArgumentError: There is a bias, and should be none.
    """
    if spec.bias:
        return tensors
    if tensors[-1] is not None:
        raise InvalidArgumentError(
            "correction_bias is given, and the router has bias=False; leave it None",
            op=router.name,
        )
    return tensors[:-1]


class Calls:
    """What `channel.Collectives` offers beside the collectives of Kimi K3."""

    _issue: Callable[[Collective, tuple[torch.Tensor, ...], Any], Any]

    def all_gather_pair_topk(
        self,
        local_down: torch.Tensor,
        local_router: torch.Tensor,
        correction_bias: torch.Tensor | None,
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        *,
        spec: RouterSpec,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gather the down row and select experts, in one launch.

        Collective, on the current stream, capturable after `prepare(spec)`. Ids and weights are
        those of `router_topk` on the gathered router row, bit for bit, and byte-equal on all ranks.

        Args:
            local_down: [rows, w], bf16, fp16, fp32 or fp8; rows at any stride.
            local_router: [rows, num_experts/W] fp32 logits; rows at any stride.
            correction_bias: [num_experts] fp32, the same on every rank; None without `spec.bias`.
            out: down [rows, W*w], weights [rows, top_k] fp32, ids [rows, top_k] int32.
            spec: The router; `pcie_comm.kernels.router_presets` has those of published models.

        Returns:
            down, weights, ids; the latter two best first.

        Raises:
            InvalidArgumentError: Shape, dtype, device, stride or size; nothing was enqueued.
            UnsupportedError: The experts do not divide by the world size.
            BrokenError: The channel failed earlier.
        """
        router = fused_collective(spec)
        tensors = router_inputs(router, spec, local_down, local_router, correction_bias)
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self._issue(router, tensors, out)
        return results

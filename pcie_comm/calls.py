"""The gathers and the fused operation of any router, as methods of a group and of a channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from . import tracing
from .errors import InvalidArgumentError
from .kernels.collective import Collective, check_collective
from .kernels.registry import find
from .kernels.router_spec import KIMI_K3, RouterSpec


def router_collective(spec: RouterSpec) -> Collective:
    """Return the stand-alone plugin of a router, the same object for the same spec."""
    check_spec(spec)
    if spec not in _routers:
        from .kernels.router import RouterTopk

        _routers[spec] = RouterTopk(spec)
    return _routers[spec]


def fused_collective(spec: RouterSpec, width: int | None = None) -> Collective:
    """Return the fused plugin of a router, the same object for the same spec and width."""
    if spec is KIMI_K3 and width is None:
        return find("all_gather_pair_kimi_topk")  # without the cost of hashing the spec
    check_spec(spec)
    if width is not None:
        check_width(width)
    known = _fused.get((spec, width))
    if known is None:
        from .kernels.all_gather_pair_topk import AllGatherPairTopk

        known = _fused[spec, width] = AllGatherPairTopk(spec, width)
    return known


def pair_of(widths: object) -> Collective:
    """Return the plugin for gathered rows of these widths, the same object for the same ones.

    Raises:
        InvalidArgumentError: They are no two positive integers.
    """
    right = type(widths) is tuple and set(map(type, widths)) == {int}
    known = _pairs.get(widths) if right else None
    if known is None:
        from .kernels.all_gather_pair import AllGatherPair

        made = AllGatherPair(widths)  # type: ignore[arg-type]
        known = _pairs.setdefault(made.columns, made)
    return known


def heads_of(heads: object) -> Collective:
    """Return the plugin for so many heads, the same object for the same number.

    Raises:
        InvalidArgumentError: It is no positive integer.
    """
    known = _heads.get(heads) if type(heads) is int else None
    if known is None:
        from .kernels.all_gather_heads import AllGatherHeads

        known = _heads[heads] = AllGatherHeads(heads)  # type: ignore[arg-type]
    return known


_routers: dict[RouterSpec, Collective] = {}
_fused: dict[tuple[RouterSpec, int | None], Collective] = {}
_pairs: dict[object, Collective] = {}
_heads: dict[object, Collective] = {}


def check_spec(spec: object) -> None:
    """Check that `spec=` is a router.

    Raises:
        InvalidArgumentError: It is not.
    """
    if not isinstance(spec, RouterSpec):
        raise InvalidArgumentError(f"spec={spec!r} is no RouterSpec; give one, or leave it out")


def check_width(width: object) -> None:
    """Check that `width=` is the width of a row.

    Raises:
        InvalidArgumentError: It is not.
    """
    if type(width) is not int or width < 1:
        raise InvalidArgumentError(f"width={width!r} is no width of a row; give 1 or more, or None")


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
    """The gathers, and the fused operation of any router, as methods of a group and a channel.

    Attributes:
        handle: Names the channel that serves the calls, to operators of `torch.ops.pcie_comm`.
        _issue: `Channel.issue` of the channel that serves the calls. An attribute rather than a
            method: a call passes through as few frames as possible.
    """

    handle: str
    _issue: Callable[[Collective, tuple[torch.Tensor, ...], Any], Any]

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles: two would own the same slabs."""
        raise TypeError(
            f"a {type(self).__name__} can be neither copied nor pickled; build one where it is used"
        )

    def run(self, collective: Collective | str, *tensors: torch.Tensor, out: Any = None) -> Any:
        """Run a plugin, registered or not, or a registered one by its name.

        Collective, on the current stream, capturable after `prepare`. Rows 0 on every rank is
        legal.

        Args:
            collective: The plugin, or the name of a registered one.
            tensors: Its inputs, on the group's device.
            out: A tensor, or a sequence of them, to write to; allocated if None.

        Returns:
            One tensor, or a tuple of them, as the plugin declares.

        Raises:
            InvalidArgumentError: The plugin, or a check of `out`, refuses, or there is none of that
                name; nothing was enqueued.
            UnsupportedError: The plugin fails, or asks for what its channel does not have.
            BrokenError: The channel failed earlier; the first failure is its cause.
            ClosedError: The channel is closed.
        """
        if isinstance(collective, str):
            collective = find(collective).for_inputs(len(tensors))
        if is_dynamo_compiling():
            return tracing.call_plugin(self, collective, tensors, out)
        check_collective(collective)
        return self._issue(collective, tensors, out)

    def all_gather_pair(
        self,
        local_first: torch.Tensor,
        local_second: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        widths: tuple[int, int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather two tensors by columns in one launch; bytes are moved, never converted.

        Collective, on the current stream, capturable after `prepare`.

        Args:
            local_first: [rows, w1], bf16, fp16, fp32 or fp8; rows at any stride.
            local_second: [rows, w2], likewise, of any of these dtypes.
            out: [rows, W*w1] and [rows, W*w2], contiguous; allocated if None.
            widths: Of both gathered rows, where they do not divide by W: shards are then those of
                torch.tensor_split. The same on every rank.

        Returns:
            Both gathered tensors, column shards in rank order.

        Raises:
            InvalidArgumentError: Shape, dtype, device, stride or size; nothing was enqueued.
            BrokenError: The channel failed earlier.
        """
        tensors = (local_first, local_second)
        results: tuple[torch.Tensor, torch.Tensor]
        if is_dynamo_compiling():
            results = tracing.call(self, "all_gather_pair", tensors, out, widths=widths)
            return results
        plugin = find("all_gather_pair") if widths is None else pair_of(widths)
        results = self._issue(plugin, tensors, out)
        return results

    def all_gather_heads(
        self,
        local_heads: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        heads: int | None = None,
    ) -> torch.Tensor:
        """Gather attention heads: [rows, heads/W, dim] -> [rows, heads, dim].

        Collective, on the current stream, capturable after `prepare`.

        Args:
            local_heads: [rows, heads/W, dim], bf16, fp16 or fp8; rows at any stride.
            out: [rows, heads, dim], contiguous; allocated if None.
            heads: In all, where they do not divide by W: shards are then those of
                torch.tensor_split. The same on every rank.

        Raises:
            InvalidArgumentError: Shape, dtype, device, stride or size; nothing was enqueued.
            BrokenError: The channel failed earlier.
        """
        gathered: torch.Tensor
        if is_dynamo_compiling():
            gathered = tracing.call(self, "all_gather_heads", (local_heads,), out, heads=heads)
            return gathered
        plugin = find("all_gather_heads") if heads is None else heads_of(heads)
        gathered = self._issue(plugin, (local_heads,), out)
        return gathered

    def all_gather_pair_topk(
        self,
        local_down: torch.Tensor,
        local_router: torch.Tensor,
        correction_bias: torch.Tensor | None,
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        *,
        spec: RouterSpec,
        width: int | None = None,
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
                Experts that do not divide by W lie as torch.tensor_split cuts them.
            width: Of the gathered down row, where it does not divide by W: its shards are then
                those of torch.tensor_split. The same on every rank.

        Returns:
            down, weights, ids; the latter two best first.

        Raises:
            InvalidArgumentError: Shape, dtype, device, stride or size; nothing was enqueued.
            UnsupportedError: There are fewer experts than ranks.
            BrokenError: The channel failed earlier.
        """
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        tensors: tuple[Any, ...] = (local_down, local_router, correction_bias)
        if is_dynamo_compiling():
            results = tracing.call_fused(self, spec, tensors, out, width)
            return results
        router = fused_collective(spec, width)
        results = self._issue(router, router_inputs(router, spec, *tensors), out)
        return results

"""What stands in for a call while torch.compile traces it: a torch operator and a handle.

An operator takes tensors and plain values. So a channel has a handle, a string that names it in
this process while it lives: `NUMBER/NAME`, for example `0/default`. Numbers are never used twice.

The operators themselves are in torch_ops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from .errors import ClosedError, InvalidArgumentError
from .kernels.router_spec import KIMI_K3, RouterSpec

if TYPE_CHECKING:
    from .calls import Calls
    from .channel import Channel
    from .kernels.collective import Collective

unordered = ""
"""Why calls cannot be traced; empty where they can."""

_channels: WeakValueDictionary[str, Channel] = WeakValueDictionary()
_published = 0


def publish(name: str, channel: Channel) -> str:
    """Return a handle for a channel. The channel is not kept alive by it."""
    global _published
    handle = f"{_published}/{name}"
    _published += 1
    _channels[handle] = channel
    return handle


def resolve(handle: str) -> Channel:
    """Return the channel of a handle.

    Raises:
        ClosedError: Its group is gone, or closed.
        InvalidArgumentError: No channel of this process ever had it.
    """
    channel = _channels.get(handle)
    if channel is not None:
        if channel.closed:
            raise ClosedError(f"channel {handle!r} is closed", rank=channel.info.rank)
        return channel
    number = handle.partition("/")[0]
    if number.isdecimal() and len(number) < 20 and int(number) < _published:
        raise ClosedError(f"channel {handle!r} is gone: its group was closed and dropped")
    raise InvalidArgumentError(
        f"group={handle!r} names no channel of this process; give the `handle` of a group or "
        "channel that lives"
    )


def call(lane: Calls, op: str, tensors: tuple[Any, ...], out: Any, **options: Any) -> Any:
    """Put a call into the graph that is being traced; see the method of that name.

    With `out` the operator's results are copied there. The operator that writes to `out` itself
    would save the copy, but the compiler may move it past other calls of the channel: only
    operators without mutation keep their order (torch_ops.py).

    Raises:
        ValueError: Not on this version of torch; see `give`.
    """
    _check_ordered(op)
    operator = getattr(torch.ops.pcie_comm, op)
    return give(op, operator(lane.handle, *_detached(tensors), **options), out)


def _detached(tensors: tuple[Any, ...]) -> list[Any]:
    """Return inputs of which results remember nothing: they have no gradient, as in eager calls."""
    return [None if tensor is None else tensor.detach() for tensor in tensors]


def _check_ordered(op: str) -> None:
    if unordered:
        raise ValueError(f"{op} cannot be compiled: {unordered}; call it outside, eagerly")


def give(op: str, results: Any, out: Any) -> Any:
    """Return results, or copy them to `out` and return that.

    Raises:
        ValueError: `out` does not fit. The compiler reports it; it cannot trace this library's
            own errors, which take more than a text.
    """
    if out is None:
        return results
    single = isinstance(results, torch.Tensor)
    values: Sequence[torch.Tensor] = (results,) if single else results
    targets = (out,) if isinstance(out, torch.Tensor) else out
    if len(targets) != len(values):
        raise ValueError(f"{op}: out= needs {len(values)} tensors, got {len(targets)}")
    for index, value in enumerate(values):
        target = targets[index]
        if target.shape != value.shape or target.dtype != value.dtype:
            raise ValueError(f"{op}: out[{index}] has another shape or dtype than the result")
        target.copy_(value)
    return out


def call_plugin(lane: Calls, plugin: Collective, tensors: tuple[Any, ...], out: Any) -> Any:
    """Put a call of a plugin into the graph: by its own operator, if it is registered.

    Raises:
        ValueError: See `call`.
    """
    if plugin.registered and plugin.name.isidentifier():
        return call(lane, plugin.name, tensors, out)
    _check_ordered(plugin.name)
    results = torch.ops.pcie_comm.run(lane.handle, plugin.handle, _detached(tensors))
    return give(plugin.name, results[0] if len(results) == 1 else tuple(results), out)


def call_fused(
    lane: Calls, spec: RouterSpec, tensors: tuple[Any, ...], out: Any, width: int | None = None
) -> Any:
    """Put the fused operation of any router into the graph."""
    if spec.token == KIMI_K3.token and width is None:
        return call(lane, "all_gather_pair_kimi_topk", tensors, out)
    return call(lane, "all_gather_pair_topk", tensors, out, spec=spec.token, width=width)


def call_router(spec: RouterSpec, tensors: tuple[Any, ...], out: Any) -> Any:
    """Put a router without communication into the graph."""
    if spec.token == KIMI_K3.token:
        return give("kimi_topk16", torch.ops.pcie_comm.kimi_topk16(*_detached(tensors)), out)
    results = torch.ops.pcie_comm.router_topk(*_detached(tensors), spec=spec.token)
    return give("router_topk", results, out)

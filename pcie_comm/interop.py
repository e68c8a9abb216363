"""Arrays of other libraries, through DLPack: in and out without a copy.

A call whose inputs or outputs are no torch tensors comes here. Each array is seen as a torch tensor
of the same memory, the call runs on those, and its results are handed back as arrays of the kind
that came in: the kind of the first input that is no torch tensor.

Streams: a library that exports device memory makes torch's current stream wait for its own, and
the way back makes its own wait for torch's. So results may be used there at once, without
synchronising. A capture must run on one stream: make torch's current one the library's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from .errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from .channel import Channel
    from .kernels.collective import Collective


def issue(lane: Channel, collective: Collective, arrays: Sequence[Any], out: Any) -> Any:
    """Run a call on arrays; see Channel.issue.

    Returns:
        `out` itself, or arrays of the caller's kind.

    Raises:
        InvalidArgumentError: An array cannot be seen as a torch tensor.
        UnsupportedError: The caller's library has no array of a result's dtype. Nothing was
            enqueued, as for every check.
    """
    op = collective.name
    tensors = tuple(_seen(array, f"input {i}", op) for i, array in enumerate(arrays))
    if out is not None:
        given = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        targets = tuple(
            _seen(array, f"out[{i}]", op, written=True) for i, array in enumerate(given)
        )
        lane.issue(collective, tensors, targets)
        for array, target in zip(given, targets, strict=True):
            if array is not target and target.is_cuda:
                importer(array)(target)  # its library's stream waits for the call
        return out
    foreign = next(array for array in arrays if not isinstance(array, torch.Tensor))
    hand_back = importer(foreign)
    for dtype in lane.result_dtypes(collective, tensors):
        _check_kind(hand_back, foreign, dtype, lane.device, op)
    results = lane.issue(collective, tensors, None)
    if isinstance(results, torch.Tensor):
        return hand_back(results)
    return tuple(hand_back(result) for result in results)


def device_of(array: Any) -> torch.device:
    """Return where an array with DLPack lies; what it lies on besides CPU and CUDA is `meta`."""
    kind, index = array.__dlpack_device__()
    return {1: torch.device("cpu"), 2: torch.device("cuda", index)}.get(kind, torch.device("meta"))


def _seen(array: Any, what: str, op: str, *, written: bool = False) -> torch.Tensor:
    """Return a torch tensor of an array's own memory."""
    if isinstance(array, torch.Tensor):
        return array
    strides = getattr(array, "strides", None) or ()
    if any(isinstance(stride, int) and stride < 0 for stride in strides):
        # Before torch sees it: its own error ends the process.
        raise _unusable(array, what, op, f"negative strides, {strides}")
    if written and not getattr(getattr(array, "flags", None), "writeable", True):
        raise _unusable(array, what, op, "it is read-only")
    try:
        return from_dlpack(array)
    except (
        AssertionError,  # torch was built without the array's device
        AttributeError,
        BufferError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise _unusable(array, what, op, error) from error


def _unusable(array: Any, what: str, op: str, why: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{what} is a {type(array).__name__} that torch cannot see as a tensor ({why}); "
        "give a writable array in memory of the group's device",
        op=op,
    )


def importer(array: Any) -> Callable[[torch.Tensor], Any]:
    """Return what makes an array of `array`'s kind from a tensor, without a copy.

    A library is asked by the array API standard, else by a `from_dlpack` of its own. What has
    neither gets torch tensors, which are arrays with DLPack themselves.
    """
    package = sys.modules.get(type(array).__module__.partition(".")[0])
    if getattr(package, "__name__", "") == "numpy":
        return torch.Tensor.numpy  # numpy.from_dlpack may return what cannot be written
    found = getattr(package, "from_dlpack", None)
    if hasattr(array, "__array_namespace__"):
        found = getattr(array.__array_namespace__(), "from_dlpack", found)
    return found if callable(found) else _as_it_is


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _check_kind(
    hand_back: Callable[[torch.Tensor], Any],
    array: Any,
    dtype: torch.dtype,
    device: torch.device,
    op: str,
) -> None:
    try:
        hand_back(torch.empty(1, dtype=dtype, device=device))
    except Exception as error:  # every library has its own
        raise UnsupportedError(
            f"a result of {op} has dtype={dtype}, of which {type(array).__module__} makes no array "
            f"({error}); give torch tensors, or out= with a view of another dtype's memory",
            reason=f"no {type(array).__name__} of {dtype}",
            op=op,
        ) from error

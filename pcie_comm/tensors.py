"""What the runtime asks of torch tensors: metadata for plans, checks of `out=`, byte views."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import InvalidArgumentError
from .kernels.collective import OutputSpec, TensorMeta

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
        "bool",
    )
}


data_ptr = torch.Tensor.data_ptr

_NO_MEMORY = (
    "is no strided array in memory (layout, quantized, nested, negated lazily, fake, wrapped by a "
    "transform); give a plain tensor"
)


class ForeignError(InvalidArgumentError):
    """An input or an output is an array of another library: interop.py takes such calls over."""


def not_a_tensor(text: str, value: object, op: str | None = None) -> InvalidArgumentError:
    """Return the error for something that is no torch.Tensor."""
    kind = ForeignError if hasattr(value, "__dlpack__") else InvalidArgumentError
    return kind(f"{text} {type(value).__name__}, expected a torch.Tensor", op=op)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a plan's dtype name.

    Raises:
        InvalidArgumentError: There is none of that name, or no plan may use it.
    """
    if name not in _DTYPES:
        raise InvalidArgumentError(f"dtype={name!r} is unknown; use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is an array in memory: shape, strides, address.

    Fake tensors, those that a transform such as vmap wraps, and other classes with a dispatch of
    their own are not.
    """
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    lazy = tensor.is_neg() or tensor.is_conj()  # its bytes are not its numbers
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested or lazy)


def alignment_of(tensor: object) -> int:
    """Return the largest power of two, at most 16, that divides a tensor's address.

    Raises:
        InvalidArgumentError: Not a tensor, or one without an address.
    """
    if not isinstance(tensor, torch.Tensor):
        raise not_a_tensor("out= holds a", tensor)
    if not is_plain(tensor):
        raise InvalidArgumentError(f"out= holds a {type(tensor).__name__} that {_NO_MEMORY}")
    low_bits = tensor.data_ptr() & 15
    return low_bits & -low_bits if low_bits else 16


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Return what a plan may know of a tensor."""
    return TensorMeta(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        # Those of an empty tensor mean nothing, and are 0 if it was a NumPy array.
        strides=tensor.stride() if tensor.numel() else torch.empty(tensor.shape).stride(),
        itemsize=tensor.itemsize,
        alignment=alignment_of(tensor),
    )


def key_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a cheap hashable that decides `meta_of`, the device and whether it is plain."""
    kind = (type(tensor), tensor.is_neg(), tensor.data_ptr() & 15)
    return (kind, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _current_stream_handle(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# torch's own compiler launches through these: a tenth of the cost of the public wrappers, which
# serve where a build of torch lacks them.
current_stream_handle = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream_handle)
is_capturing = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def check_inputs(op: str, tensors: Sequence[object], count: int, device: torch.device) -> None:
    """Check number, type and device of a call's inputs.

    Raises:
        InvalidArgumentError: Names the input and what it is.
    """
    if len(tensors) != count:
        raise InvalidArgumentError(f"expected {count} tensors, got {len(tensors)}", op=op)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise not_a_tensor(f"input {index} is a", tensor, op)
        if tensor.device != device:
            raise InvalidArgumentError(
                f"input {index} is on device={tensor.device}, the group is on {device}; "
                "move the tensor or build the group there",
                op=op,
            )
        if not is_plain(tensor):
            raise InvalidArgumentError(
                f"input {index} is a {type(tensor).__name__} that {_NO_MEMORY}", op=op
            )
        _check_aligned(op, f"input {index}", tensor)


def _check_aligned(op: str, what: str, tensor: torch.Tensor) -> None:
    """Check that a tensor begins where its elements may: what came through DLPack need not."""
    if tensor.data_ptr() % min(tensor.itemsize, 16):
        raise InvalidArgumentError(
            f"{what} begins at address={tensor.data_ptr():#x}, which is no multiple of its "
            f"itemsize={tensor.itemsize}; copy it",
            op=op,
        )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return first and last-plus-one address of a tensor's bytes."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def check_outputs(
    op: str,
    outputs: Sequence[object],
    specs: Sequence[OutputSpec],
    inputs: Sequence[torch.Tensor],
) -> None:
    """Check tensors given as `out=` against what the call writes.

    Raises:
        InvalidArgumentError: Number, shape, dtype, device or layout differs, or memory overlaps.
    """
    if len(outputs) != len(specs):
        raise InvalidArgumentError(f"out= needs {len(specs)} tensors, got {len(outputs)}", op=op)
    spans = [(f"input {i}", _span(tensor)) for i, tensor in enumerate(inputs)]
    for index, (out, spec) in enumerate(zip(outputs, specs, strict=True)):
        if not isinstance(out, torch.Tensor):
            raise InvalidArgumentError(
                f"out[{index}] is a {type(out).__name__}, expected a torch.Tensor", op=op
            )
        facts = f"shape={tuple(out.shape)}, dtype={out.dtype}, device={out.device}"
        if tuple(out.shape) != spec.shape or out.dtype != torch_dtype(spec.dtype):
            raise InvalidArgumentError(
                f"out[{index}] has {facts}, expected shape={spec.shape}, dtype={spec.dtype}", op=op
            )
        if out.device != inputs[0].device:
            raise InvalidArgumentError(
                f"out[{index}] has {facts}, expected device={inputs[0].device}", op=op
            )
        if not out.is_contiguous():
            raise InvalidArgumentError(
                f"out[{index}] is not contiguous ({facts}, strides={out.stride()})", op=op
            )
        _check_aligned(op, f"out[{index}]", out)
        start, stop = _span(out)
        for label, (other_start, other_stop) in spans:
            if start < other_stop and other_start < stop:
                raise InvalidArgumentError(
                    f"out[{index}] overlaps {label}: bytes {start:#x} to {stop:#x} and "
                    f"{other_start:#x} to {other_stop:#x}; give it memory of its own",
                    op=op,
                )
        spans.append((f"out[{index}]", (start, stop)))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with canonical strides.

    `contiguous()` would not do: torch calls a tensor contiguous whatever stride its dimensions of
    size 1 have, and then refuses to view its bytes.
    """
    return tensor.clone(memory_format=torch.contiguous_format)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    """Tell whether floating-point numbers differ by no more, relative and absolute; NaN is NaN."""
    if got.shape != want.shape or got.dtype != want.dtype or not want.dtype.is_floating_point:
        return False
    here, there = got.detach().cpu().double(), want.detach().cpu().double()
    return torch.allclose(here, there, rtol=tolerance, atol=tolerance, equal_nan=True)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense CPU tensor as a flat uint8 tensor that shares its memory."""
    return tensor.reshape(-1).view(torch.uint8)

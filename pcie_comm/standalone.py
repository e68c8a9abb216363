"""Routers without a group, on CPU or GPU tensors: router_topk, and kimi_topk16 of Kimi K3."""

from __future__ import annotations

import threading

import torch
from torch.compiler import is_dynamo_compiling

from . import interop, tracing
from .calls import router_collective, router_inputs
from .channel import Channel
from .config import Config
from .cuda_engine import CudaEngine
from .errors import InvalidArgumentError
from .host_engine import HostEngine
from .kernels.collective import PlanInfo
from .kernels.router_spec import KIMI_K3, RouterSpec
from .kernels.store import KernelStore
from .layout import SlabLayout
from .transport.base import PeerMap

_lanes: dict[torch.device, Channel] = {}
_opening = threading.Lock()


def _lane(device: torch.device) -> Channel:
    """Return the process's lane for calls without communication on a device."""
    with _opening:
        if device not in _lanes:
            config = Config()
            engine: CudaEngine | HostEngine
            if device.type == "cuda":
                store = KernelStore(config.kernels_dir, config.cache_dir)
                engine = CudaEngine(0, None, None, device, config, store)
            else:
                layout = SlabLayout(config.slot_nbytes, 1)
                engine = HostEngine(0, layout, PeerMap((), ()), "push", config.timeout_s)
            info = PlanInfo(0, 1, "push", 0, config.max_rows, 1)
            _lanes[device] = Channel("router_topk", info, device, engine)
        return _lanes[device]


def _device_of(logits: object, op: str) -> torch.device:
    """Return where the call runs; what is no tensor is refused there."""
    device = torch.device("cpu")
    if isinstance(logits, torch.Tensor):
        device = logits.device
    elif hasattr(logits, "__dlpack_device__"):
        device = interop.device_of(logits)
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(
            f"router_logits is on device={device}; move it to a CPU or a CUDA device",
            op=op,
        )
    return device


def lane_for(logits: object) -> Channel:
    """Return the lane that serves a call with these logits.

    Raises:
        InvalidArgumentError: They are neither on a CPU nor on a CUDA device.
    """
    return _lane(_device_of(logits, "kimi_topk16"))


def router_topk(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    spec: RouterSpec,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the experts of each row. No communication.

    Stream: torch's current stream. Capture: yes, after one call outside a capture.

    Args:
        router_logits: [rows, num_experts] fp32, any number of rows at any stride.
        correction_bias: [num_experts] fp32; None without `spec.bias`.
        spec: The router; `pcie_comm.kernels.router_presets` has those of published models.
        out: weights [rows, top_k] fp32 and ids [rows, top_k] int32, contiguous; allocated if None.

    Returns:
        weights and ids, best expert first; always `top_k` different ids in range.

    Raises:
        InvalidArgumentError: Shape, dtype, device or stride; nothing was enqueued.
        CompileError: The kernel is not loaded and the stream is capturing, or does not build.

    Source: the router contract in `pcie_comm.kernels.router_spec`.
    """
    if is_dynamo_compiling():
        weights, ids = tracing.call_router(spec, (router_logits, correction_bias), out)
        return weights, ids
    router = router_collective(spec)
    lane = _lane(_device_of(router_logits, router.name))
    tensors = router_inputs(router, spec, router_logits, correction_bias)
    weights, ids = lane.issue(router, tensors, out)
    return weights, ids


def kimi_topk16(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    spec: RouterSpec = KIMI_K3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select 16 of 896 experts per row. No communication.

    Stream: torch's current stream. Capture: yes, after one call outside a capture.

    Args:
        router_logits: [rows, 896] fp32, any number of rows at any stride.
        correction_bias: [896] fp32.
        out: weights [rows, 16] fp32 and ids [rows, 16] int32, contiguous; allocated if None.
        spec: The router; `RouterSpec(896, 16, numerics="vllm")` for vLLM's sigmoid.

    Returns:
        weights and ids, best expert first; always 16 different ids in range.

    Raises:
        InvalidArgumentError: Shape, dtype, device or stride; nothing was enqueued.
        CompileError: The kernel is not loaded and the stream is capturing, or does not build.

    Source: the router contract in `pcie_comm.kernels.router_spec`.
    """
    return router_topk(router_logits, correction_bias, spec, out)

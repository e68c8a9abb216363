"""kimi_topk16: the router alone, without communication. The same selection as the fused op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError
from .registry import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta
from .router_spec import KIMI_K3, RouterSpec

if TYPE_CHECKING:
    import torch


def check_router(op: str, logits: TensorMeta, bias: TensorMeta, experts: int, total: int) -> None:
    """Check a router's inputs: logits [rows, experts] fp32, bias [total] fp32.

    Raises:
        InvalidArgumentError: Shape, dtype or stride does not fit.
    """
    for label, meta, shape in (
        ("router_logits", logits, f"[rows, {experts}]"),
        ("correction_bias", bias, f"[{total}]"),
    ):
        facts = f"shape={meta.shape}, dtype={meta.dtype}, strides={meta.strides}"
        width = experts if label == "router_logits" else total
        ndim = 2 if label == "router_logits" else 1
        if len(meta.shape) != ndim or meta.shape[-1] != width:
            raise InvalidArgumentError(f"{label} needs shape {shape} ({facts})", op=op)
        if meta.dtype != "float32":
            raise InvalidArgumentError(f"{label} needs dtype float32 ({facts})", op=op)
        if width > 1 and meta.strides[-1] != 1:
            raise InvalidArgumentError(
                f"{label} needs a contiguous last dimension ({facts}); call .contiguous()", op=op
            )


class RouterTopk(Collective):
    """[rows, 896] logits and [896] bias -> weights [rows, 16] and ids [rows, 16]."""

    name = "kimi_topk16"
    num_inputs = 2
    block = 1024

    def __init__(self, spec: RouterSpec = KIMI_K3) -> None:
        self.spec = spec

    def num_outputs(self) -> int:
        return 2

    def num_scalars(self, key: KernelKey) -> int:
        return 1

    def variants(self) -> Sequence[KernelKey]:
        return [KernelKey(self.name, (numerics,)) for numerics in ("torch", "vllm")]

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan. Scalars: row stride of the logits in bytes. Any number of rows."""
        logits, bias = tensors
        check_router(self.name, logits, bias, self.spec.num_experts, self.spec.num_experts)
        rows = logits.shape[0]
        return Plan(
            op=self.name,
            outputs=self.output_specs(info, *tensors),
            kernel=KernelKey(self.name, (self.spec.numerics,)),
            grid=rows,
            scalars=(logits.strides[0] * logits.itemsize,),
            facts=(rows,),
        )

    def output_specs(self, info: PlanInfo, *tensors: TensorMeta) -> tuple[OutputSpec, ...]:
        shape = (tensors[0].shape[0], self.spec.top_k)
        return (OutputSpec(shape, "float32"), OutputSpec(shape, "int32"))

    def kernel(self, key: KernelKey) -> Any:
        from .router_kernels import router_kernel

        return router_kernel(replace(self.spec, numerics=str(key.variant[0])), self.block)

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        from .reference import router_topk

        logits, bias = shards[0]
        return router_topk(logits, bias, self.spec)


COLLECTIVES = (RouterTopk(),)

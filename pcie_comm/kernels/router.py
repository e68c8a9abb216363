"""router_topk: the router alone, without communication. The same selection as the fused op.

With KIMI_K3 its name is kimi_topk16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError
from .collective import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta
from .router_spec import KIMI_K3, RouterSpec

if TYPE_CHECKING:
    import torch


BLOCK = 256
"""Threads of a block that selects from a whole row, a quarter of the experts at a time or all."""

WIDE_BLOCK = 1024
"""Threads of a block that holds up to 1024 experts at once."""

WIDE_EXPERTS = 512
"""Above this many experts, a block holds all of them at once, if the router allows it."""


def is_kimi(spec: RouterSpec) -> bool:
    """Tell whether a router is that of Kimi K3, in any numerics."""
    return replace(spec, numerics="torch") == KIMI_K3


def variant_of(spec: RouterSpec) -> str:
    """Return what tells the kernels of one name apart."""
    return spec.numerics if is_kimi(spec) else spec.token


def is_wide(spec: RouterSpec) -> bool:
    """Tell whether a row is selected by as many threads as it has experts, all at once.

    And, in the fused form, whether every rank selects from its own experts what it sends: cheaper
    than sending their logits only where there are many.
    """
    many = spec.num_experts > WIDE_EXPERTS and spec.num_experts % 64 == 0
    return many and spec.is_local and spec.bias and spec.top_k <= 16


def check_router(
    op: str, logits: TensorMeta, bias: TensorMeta | None, experts: int, total: int
) -> None:
    """Check a router's inputs: logits [rows, experts] fp32, bias [total] fp32 or None.

    Raises:
        InvalidArgumentError: Shape, dtype or stride does not fit.
    """
    for label, meta, shape in (
        ("router_logits", logits, f"[rows, {experts}]"),
        ("correction_bias", bias, f"[{total}]"),
    ):
        if meta is None:
            continue
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
    """[rows, experts] logits and [experts] bias -> weights [rows, top_k] and ids [rows, top_k].

    A router without a bias takes the logits alone.
    """

    communicates = False

    def __init__(self, spec: RouterSpec = KIMI_K3) -> None:
        self.spec = spec
        self.name = "kimi_topk16" if is_kimi(spec) else "router_topk"
        self.num_inputs = 2 if spec.bias else 1
        self.block = WIDE_BLOCK if is_wide(spec) else BLOCK

    def num_outputs(self) -> int:
        return 2

    def num_scalars(self, key: KernelKey) -> int:
        return 1

    def variants(self) -> Sequence[KernelKey]:
        if not is_kimi(self.spec):
            return [KernelKey(self.name, (variant_of(self.spec),))]
        return [KernelKey(self.name, (numerics,)) for numerics in ("torch", "vllm")]

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan. Scalars: row stride of the logits in bytes. Any number of rows."""
        spec, logits = self.spec, tensors[0]
        bias = tensors[1] if spec.bias else None
        check_router(self.name, logits, bias, spec.num_experts, spec.num_experts)
        rows = logits.shape[0]
        return Plan(
            op=self.name,
            outputs=self.output_specs(info, *tensors),
            kernel=KernelKey(self.name, (variant_of(spec),)),
            grid=rows,
            scalars=(logits.strides[0] * logits.itemsize,),
            facts=(rows,),
        )

    def output_specs(self, info: PlanInfo, *tensors: TensorMeta) -> tuple[OutputSpec, ...]:
        shape = (tensors[0].shape[0], self.spec.top_k)
        return (OutputSpec(shape, "float32"), OutputSpec(shape, "int32"))

    def kernel(self, key: KernelKey) -> Any:
        if not is_wide(self.spec):
            from .row_kernels import row_router_kernel

            return row_router_kernel(self.spec, self.block)
        from .router_kernels import router_kernel

        spec = self.spec
        if is_kimi(spec):
            spec = replace(spec, numerics=str(key.variant[0]))
        return router_kernel(spec, self.block)

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        from .reference import router_topk

        logits = shards[0][0]
        return router_topk(logits, shards[0][1] if self.spec.bias else None, self.spec)


COLLECTIVES = (RouterTopk(),)

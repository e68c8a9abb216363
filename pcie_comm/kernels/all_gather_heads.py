"""all_gather_heads: attention heads, gathered along the head dimension in one launch.

[rows, heads/W, dim] is, byte for byte, a column gather of rows of heads/W * dim elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError
from .columns import BLOCK, check_columns, gather_variants, plan_gather
from .registry import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta

if TYPE_CHECKING:
    import torch


class AllGatherHeads(Collective):
    """[rows, heads/W, dim] per rank -> [rows, heads, dim] on every rank."""

    name = "all_gather_heads"
    num_inputs = 1
    block = BLOCK
    row_inputs = (0,)

    def num_scalars(self, key: KernelKey) -> int:
        return 7

    def variants(self) -> Sequence[KernelKey]:
        return gather_variants(self.name)

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan. Scalars: rows, policy.pace, and those of columns.column_scalars."""
        (meta,) = tensors
        check_columns(self.name, "local_heads", meta, ndim=3, max_rows=info.max_rows)
        if meta.dtype == "float32":
            raise InvalidArgumentError(
                "local_heads has dtype=float32; heads are bf16, fp16 or fp8", op=self.name
            )
        return plan_gather(self.name, info, tensors, self.output_specs(info, meta))

    def output_specs(self, info: PlanInfo, *tensors: TensorMeta) -> tuple[OutputSpec, ...]:
        rows, heads, dim = tensors[0].shape
        return (OutputSpec((rows, heads * info.world_size, dim), tensors[0].dtype),)

    def kernel(self, key: KernelKey) -> Any:
        from .gather_kernels import gather_kernel

        protocol, pack = key.variant
        return gather_kernel(1, protocol=str(protocol), pack=int(pack), threads=self.block)

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        from .reference import gather_heads

        return (gather_heads([shard[0] for shard in shards]),)


COLLECTIVES = (AllGatherHeads(),)

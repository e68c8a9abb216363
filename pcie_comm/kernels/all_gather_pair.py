"""all_gather_pair: two tensors, gathered by columns in one launch.

Message flow: both shards are staged one behind the other in one segment, one flag per peer covers
both. Bytes on the wire per rank and peer: rows * (row_nbytes_1 + row_nbytes_2) + 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .columns import BLOCK, check_columns, gather_variants, plan_gather
from .registry import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta

if TYPE_CHECKING:
    import torch


class AllGatherPair(Collective):
    """[rows, w1] and [rows, w2] per rank -> [rows, W*w1] and [rows, W*w2] on every rank."""

    name = "all_gather_pair"
    num_inputs = 2
    block = BLOCK
    row_inputs = (0, 1)

    def num_outputs(self) -> int:
        return 2

    def num_scalars(self, key: KernelKey) -> int:
        return 12

    def variants(self) -> Sequence[KernelKey]:
        return gather_variants(self.name)

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan. Scalars: rows, policy.pace, column_scalars of each tensor."""
        for label, meta in zip(("local_first", "local_second"), tensors, strict=True):
            check_columns(self.name, label, meta, ndim=2, max_rows=info.max_rows)
        return plan_gather(self.name, info, tensors, self.output_specs(info, *tensors))

    def output_specs(self, info: PlanInfo, *tensors: TensorMeta) -> tuple[OutputSpec, ...]:
        return tuple(
            OutputSpec((meta.shape[0], meta.shape[1] * info.world_size), meta.dtype)
            for meta in tensors
        )

    def kernel(self, key: KernelKey) -> Any:
        from .gather_kernels import gather_kernel

        protocol, pack = key.variant
        return gather_kernel(2, protocol=str(protocol), pack=int(pack), threads=self.block)

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        from .reference import gather_columns

        return tuple(gather_columns([shard[i] for shard in shards]) for i in range(2))


COLLECTIVES = (AllGatherPair(),)

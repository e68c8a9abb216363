"""lse_reduce_scatter: merges the partial attention of context-parallel ranks, heads scattered.

Message flow: that of reduce_scatter, with the log-sum-exp of the same heads staged behind each
part. Blocks split a part by whole heads. Bytes on the wire per rank and peer: the part, and 4 for
each of its rows' heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError
from ..layout import STAGED_ALIGNMENT, align_up, divisor
from .collective import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta
from .columns import BLOCK, check_columns, share, stride_nbytes
from .reductions import Parts, check_reduced, divided, plan_reduction, reduce_variants

if TYPE_CHECKING:
    import torch


class LseReduceScatter(Collective):
    """partial [rows, heads, dim], lse [rows, heads] fp32 -> merged [rows, heads/W, dim].

    `sum(exp(lse_r - max) * partial_r) / sum(exp(lse_r - max))` over the ranks r whose log-sum-exp
    is finite, in rank order, in fp32, rounded once; 0 where none is. Of the others, the partial is
    not read. Natural logarithms.
    """

    name = "lse_reduce_scatter"
    num_inputs = 2
    tolerance = 2.0**-7
    block = BLOCK
    row_inputs = (0, 1)

    def num_scalars(self, key: KernelKey) -> int:
        return 16

    def variants(self) -> Sequence[KernelKey]:
        return [key for key in reduce_variants(self.name) if key.variant[0] != "tagged"]

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan; the scalars are those of lse_kernels.lse_kernel."""
        partial, lse = tensors
        world = info.world_size
        check_reduced(self.name, "partial", partial, info.max_rows, ndim=3)
        check_columns(self.name, "lse", lse, ndim=2, max_rows=info.max_rows, dtypes=("float32",))
        if lse.shape != partial.shape[:2]:
            raise InvalidArgumentError(
                f"lse needs shape {partial.shape[:2]} (shape={lse.shape})", op=self.name
            )
        rows, heads, dim = partial.shape
        local = divided(self.name, "heads", heads, world)
        outputs = (OutputSpec((rows, local, dim), partial.dtype),)
        return self._planned(info, partial, lse, local, outputs)

    def plan_columns(
        self, info: PlanInfo, part: int, parts: int, *tensors: TensorMeta
    ) -> tuple[Plan, tuple[int, ...]] | None:
        """See Collective.plan_columns. Of every owner's heads the same part."""
        partial, lse = tensors
        local = partial.shape[1] // info.world_size
        if parts > local:
            return None
        begin, end = share(local, part, parts)
        offset = begin * partial.shape[2] * partial.itemsize
        plan = self._planned(info, partial, lse, end - begin, ())
        return plan, (offset, begin * 4, offset)

    def _planned(
        self,
        info: PlanInfo,
        partial: TensorMeta,
        lse: TensorMeta,
        local: int,
        outputs: tuple[OutputSpec, ...],
    ) -> Plan:
        """Plan a call, or one of `local` heads of each owner's. Tensors are checked."""
        rows, heads, dim = partial.shape
        head_nbytes, apart = dim * partial.itemsize, heads // info.world_size
        parts = Parts(
            local * head_nbytes,
            apart=apart * head_nbytes,
            count=info.world_size,
            beside=align_up(rows * local * 4, STAGED_ALIGNMENT),
            item=head_nbytes,
            tagged=False,
        )
        plan = plan_reduction(self.name, info, partial, outputs, parts)
        per_block = plan.scalars[5] // head_nbytes
        return replace(
            plan,
            scalars=(
                *plan.scalars,
                stride_nbytes(lse),
                local,
                divisor(local),
                head_nbytes,
                divisor(head_nbytes),
                per_block,
                divisor(per_block),
                apart,
            ),
            exchanged=(0, 1),
        )

    def kernel(self, key: KernelKey) -> Any:
        from .lse_kernels import lse_kernel

        protocol, pack, dtype = key.variant
        return lse_kernel(str(dtype), push=protocol == "push", pack=int(pack), threads=self.block)

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        return self.reference_for(0, shards)

    def reference_for(
        self, rank: int, shards: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        from .reference_sums import merge_by_lse

        partial = shards[0][0]
        width = partial.shape[1] // len(shards)
        parts = [[tensor.narrow(1, rank * width, width) for tensor in shard] for shard in shards]
        merged = merge_by_lse([part[0] for part in parts], [part[1] for part in parts])
        return (merged.to(partial.dtype),)

    def example_inputs(
        self, world_size: int, rows: int, seed: int
    ) -> Sequence[Sequence[torch.Tensor]]:
        from .examples import draw

        heads = 2 * world_size
        return draw(world_size, rows, seed, ((heads, 128), "bfloat16"), ((heads,), "float32"))


COLLECTIVES = (LseReduceScatter(),)

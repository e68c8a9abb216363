"""all_reduce and reduce_scatter: sums over ranks, one shot, in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..policy import shots_of_sum
from .collective import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta
from .columns import BLOCK, row_nbytes, share_of_bytes
from .reductions import Parts, check_reduced, divided, plan_reduction, reduce_variants

if TYPE_CHECKING:
    import torch

    from .pieces import Piece


class _Reduction(Collective):
    """What the two share."""

    num_inputs = 1
    block = BLOCK
    row_inputs = (0,)
    scatter = False

    def num_scalars(self, key: KernelKey) -> int:
        return 8 if self.scatter else 7

    def variants(self) -> Sequence[KernelKey]:
        return reduce_variants(self.name)

    def kernel(self, key: KernelKey) -> Any:
        from .reduce_kernels import reduce_kernel

        protocol, pack, dtype = key.variant
        return reduce_kernel(
            str(dtype),
            scatter=self.scatter,
            protocol=str(protocol),
            pack=int(pack),
            threads=self.block,
        )

    def example_inputs(
        self, world_size: int, rows: int, seed: int
    ) -> Sequence[Sequence[torch.Tensor]]:
        from .examples import draw

        width = 256 * world_size if self.scatter else 2048
        return draw(world_size, rows, seed, ((width,), "bfloat16"))


class AllReduce(_Reduction):
    """[rows, ...] per rank -> the sum over ranks, on every rank, of the same shape and dtype.

    Numbers are added in fp32, rank 0 first, and rounded once: equal bytes on all ranks. Much is
    summed in two shots, of the same bytes; see policy.shots_of_sum.
    """

    name = "all_reduce"
    made_of = ("reduce_scatter", "all_gather")

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan."""
        (local,) = tensors
        check_reduced(self.name, "local", local, info.max_rows)
        outputs = (OutputSpec(local.shape, local.dtype),)
        return plan_reduction(self.name, info, local, outputs, Parts(row_nbytes(local)))

    def plan_columns(
        self, info: PlanInfo, part: int, parts: int, *tensors: TensorMeta
    ) -> tuple[Plan, tuple[int, ...]] | None:
        """See Collective.plan_columns. A part of a row is a row."""
        (local,) = tensors
        begin, end = share_of_bytes(row_nbytes(local), part, parts)
        if begin == end:  # there are more parts than packs
            return None
        numbers = (end - begin) // local.itemsize
        plan = self.plan(info, replace(local, shape=(1, numbers), strides=(numbers, 1)))
        return plan, (begin, begin)

    def plan_pieces(self, info: PlanInfo, *tensors: TensorMeta) -> Sequence[Piece] | None:
        from .two_shots import two_shots

        (local,) = tensors
        nbytes = local.shape[0] * row_nbytes(local)
        if shots_of_sum(nbytes, info.world_size, info.segment_nbytes) == 1:
            return None
        return list(two_shots(self, info, local))

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        from .reference_sums import sum_of_ranks

        return (sum_of_ranks([shard[0] for shard in shards]).to(shards[0][0].dtype),)


class ReduceScatter(_Reduction):
    """[rows, W*w, ...] per rank -> rank r gets columns r*w to (r+1)*w of the sum: [rows, w, ...].

    Bytes are those of all_reduce.
    """

    name = "reduce_scatter"
    scatter = True

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan."""
        (local,) = tensors
        world = info.world_size
        check_reduced(self.name, "local", local, info.max_rows)
        width = divided(self.name, "columns", local.shape[1], world)
        outputs = (OutputSpec((local.shape[0], width, *local.shape[2:]), local.dtype),)
        size = row_nbytes(local) // world
        parts = Parts(size, apart=size, count=world)
        return plan_reduction(self.name, info, local, outputs, parts)

    def plan_columns(
        self, info: PlanInfo, part: int, parts: int, *tensors: TensorMeta
    ) -> tuple[Plan, tuple[int, ...]] | None:
        """See Collective.plan_columns. Of every owner's columns the same part."""
        (local,) = tensors
        size = row_nbytes(local) // info.world_size
        begin, end = share_of_bytes(size, part, parts)
        if begin == end:  # there are more parts than packs
            return None
        one = Parts(end - begin, apart=size, count=info.world_size)
        return plan_reduction(self.name, info, local, (), one), (begin, begin)

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        return self.reference_for(0, shards)

    def reference_for(
        self, rank: int, shards: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        from .reference_sums import sum_of_ranks

        local = shards[0][0]
        width = local.shape[1] // len(shards)
        parts = [shard[0].narrow(1, rank * width, width) for shard in shards]
        return (sum_of_ranks(parts).to(local.dtype),)


COLLECTIVES = (AllReduce(), ReduceScatter())

"""all_gather: any number of tensors in one launch. barrier: one word of every rank.

Message flow and bytes: those of all_gather_pair, with more tensors behind one flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError
from .columns import BLOCK, check_columns, gather_variants, plan_gather
from .registry import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta

if TYPE_CHECKING:
    import torch

MAX_TENSORS = 8
EVERY_DTYPE = (
    *("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "uint8", "int16", "int32", "int64", "bool"),
)


class AllGather(Collective):
    """[rows, w, ...] per tensor and rank -> [rows, W*w, ...] per tensor, column shards in order.

    Of any dtype, each of its own; bytes are moved, never converted.

    Args:
        count: Number of tensors, 1 to 8. Registered is the one for a single tensor;
            `group.run("all_gather", ...)` takes any number.
    """

    name = "all_gather"
    block = BLOCK

    def __init__(self, count: int = 1) -> None:
        self.num_inputs = count
        self.row_inputs = range(count)

    def for_inputs(self, count: int) -> Collective:
        if not 1 <= count <= MAX_TENSORS:
            raise InvalidArgumentError(
                f"all_gather takes 1 to {MAX_TENSORS} tensors, got {count}", op=self.name
            )
        return GATHERS[count]

    def num_outputs(self) -> int:
        return self.num_inputs

    def num_scalars(self, key: KernelKey) -> int:
        return 2 + 5 * self.num_inputs

    def variants(self) -> Sequence[KernelKey]:
        keys = gather_variants(self.name)
        return [KernelKey(key.op, (*key.variant, self.num_inputs)) for key in keys]

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan. Scalars: as of all_gather_pair."""
        for index, meta in enumerate(tensors):
            dimensions = max(len(meta.shape), 2)
            label = f"tensor {index}"
            check_columns(
                self.name,
                label,
                meta,
                ndim=dimensions,
                max_rows=info.max_rows,
                dtypes=EVERY_DTYPE,
            )
        outputs = tuple(
            OutputSpec(
                (meta.shape[0], meta.shape[1] * info.world_size, *meta.shape[2:]), meta.dtype
            )
            for meta in tensors
        )
        return plan_gather(self.name, info, tensors, outputs, (self.num_inputs,))

    def kernel(self, key: KernelKey) -> Any:
        from .gather_kernels import gather_kernel

        protocol, pack = key.variant[:2]
        return gather_kernel(
            self.num_inputs, protocol=str(protocol), pack=int(pack), threads=self.block
        )

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        from .reference import gather_dense

        return tuple(gather_dense([shard[i] for shard in shards]) for i in range(self.num_inputs))


class Barrier(AllGather):
    """[1, 1] int32 per rank, a word to the others -> [1, W] int32: every rank's word.

    A rank has the result when all ranks have made the call. It orders nothing but that.
    """

    name = "barrier"

    def __init__(self) -> None:
        super().__init__()
        self.row_inputs = ()

    def for_inputs(self, count: int) -> Collective:
        return self

    def variants(self) -> Sequence[KernelKey]:
        narrow = [("push", 4), ("pull", 4), ("push", 1), ("pull", 1), ("tagged", 1)]
        return [KernelKey(self.name, (*variant, 1)) for variant in narrow]

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        (word,) = tensors
        if word.shape != (1, 1) or word.dtype != "int32":
            raise InvalidArgumentError(
                f"barrier takes a [1, 1] int32 (shape={word.shape}, dtype={word.dtype})",
                op=self.name,
            )
        return super().plan(info, word)


GATHERS = {count: AllGather(count) for count in range(1, MAX_TENSORS + 1)}
COLLECTIVES = (GATHERS[1], Barrier())

"""all_gather: any number of tensors in one launch. barrier: one word of every rank.

Message flow and bytes: those of all_gather_pair, with more tensors behind one flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InvalidArgumentError
from .collective import Collective, KernelKey, Plan, PlanInfo, TensorMeta
from .columns import check_columns
from .gathers import Gather

if TYPE_CHECKING:
    import torch

MAX_TENSORS = 8
EVERY_DTYPE = (
    *("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "uint8", "int16", "int32", "int64", "bool"),
)


class AllGather(Gather):
    """[rows, w, ...] per tensor and rank -> [rows, W*w, ...] per tensor, column shards in order.

    Of any dtype, each of its own; bytes are moved, never converted.

    Args:
        count: Number of tensors, 1 to 8. Registered is the one for a single tensor;
            `group.run("all_gather", ...)` takes any number.
        widths: Per tensor, of the gathered row, if shards are those of torch.tensor_split.
    """

    name = "all_gather"

    def __init__(self, count: int = 1, widths: Sequence[int] | None = None) -> None:
        self.num_inputs = count
        self.row_inputs = range(count)
        self.kind = (count,)
        self._take(widths)

    def for_inputs(self, count: int) -> Collective:
        if not 1 <= count <= MAX_TENSORS:
            raise InvalidArgumentError(
                f"all_gather takes 1 to {MAX_TENSORS} tensors, got {count}", op=self.name
            )
        return GATHERS[count]

    def family(self) -> Sequence[Collective]:
        return tuple(GATHERS.values())

    def prepared_by(self) -> str:
        return f'"{self.name}", tensors={self.num_inputs}'

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan, and Gather.planned for the scalars."""
        labels = [f"tensor {index}" for index in range(len(tensors))]
        for label, meta in zip(labels, tensors, strict=True):
            check_columns(
                self.name,
                label,
                meta,
                ndim=max(len(meta.shape), 2),
                max_rows=info.max_rows,
                dtypes=EVERY_DTYPE,
            )
        return self.planned(info, tensors, labels)

    def example_inputs(
        self, world_size: int, rows: int, seed: int
    ) -> Sequence[Sequence[torch.Tensor]]:
        from .examples import draw

        kinds = [((512,), ("bfloat16", "float32")[i % 2]) for i in range(self.num_inputs)]
        return draw(world_size, rows, seed, *kinds)


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

    def family(self) -> Sequence[Collective]:
        return (self,)

    def prepared_by(self) -> str:
        return f'"{self.name}"'

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

    def example_inputs(
        self, world_size: int, rows: int, seed: int
    ) -> Sequence[Sequence[torch.Tensor]]:
        from .examples import draw

        return [[one.int()] for (one,) in draw(world_size, 1, seed, ((1,), "float32"))]


GATHERS = {count: AllGather(count) for count in range(1, MAX_TENSORS + 1)}
COLLECTIVES = (GATHERS[1], Barrier())

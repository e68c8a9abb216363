"""What the plain gathers share: shards by columns, equal or those of torch.tensor_split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError
from .collective import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta
from .columns import BLOCK, gather_variants, plan_gather
from .uneven import UNEVEN, Shares, check_share, plan_part, plan_uneven, uneven_variants

if TYPE_CHECKING:
    import torch

EVEN_SCALARS, UNEVEN_SCALARS = 5, 10
"""Scalars of one tensor: columns.column_scalars, and with those of uneven.Shares."""


class Gather(Collective):
    """Tensors gathered along their second dimension in one launch.

    Attributes:
        columns: Per tensor, the columns of the gathered row; None: W times those of a rank.
        kind: Compile-time facts behind protocol and pack.
    """

    block = BLOCK
    columns: tuple[int, ...] | None = None
    kind: tuple[int, ...] = ()

    def _take(self, columns: Sequence[int] | None) -> None:
        """Take the columns of gathered rows.

        Raises:
            InvalidArgumentError: They are no positive integers, or not as many as tensors.
        """
        if columns is None:
            return
        given: object = columns
        right = isinstance(given, (tuple, list)) and len(given) == self.num_inputs
        if not right or not all(type(one) is int and one > 0 for one in columns):
            raise InvalidArgumentError(
                f"widths={columns!r} are no widths of gathered rows; give a positive integer for "
                f"each of the {self.num_inputs} tensors",
                op=self.name,
            )
        self.columns = tuple(columns)

    def num_outputs(self) -> int:
        return self.num_inputs

    def num_scalars(self, key: KernelKey) -> int:
        each = UNEVEN_SCALARS if UNEVEN in key.variant else EVEN_SCALARS
        return 2 + each * self.num_inputs

    def variants(self) -> Sequence[KernelKey]:
        even = gather_variants(self.name)
        return [
            *(KernelKey(key.op, (*key.variant, *self.kind)) for key in even),
            *uneven_variants(self.name, self.kind),
        ]

    def planned(self, info: PlanInfo, tensors: Sequence[TensorMeta], labels: Sequence[str]) -> Plan:
        """Plan a call whose tensors are checked but for their widths.

        Scalars: rows, policy.pace, those of columns.column_scalars for each tensor; of uneven
        shards, for each also those of uneven.Shares.

        Raises:
            InvalidArgumentError: Rows differ, or a tensor is not this rank's share.
        """
        outputs = self.output_specs(info, *tensors)
        if self.columns is None:
            return plan_gather(self.name, info, tensors, outputs, self.kind)
        shares = [
            Shares.of(meta, one, info.world_size)
            for meta, one in zip(tensors, self.columns, strict=True)
        ]
        for label, meta, one in zip(labels, tensors, shares, strict=True):
            check_share(self.name, label, meta, one, info.rank)
        return plan_uneven(self.name, info, tensors, outputs, shares, self.kind)[0]

    def plan_columns(
        self, info: PlanInfo, part: int, parts: int, *tensors: TensorMeta
    ) -> tuple[Plan, tuple[int, ...]]:
        """See Collective.plan_columns. Every tensor's row is cut into as many parts."""
        return plan_part(self.name, info, tensors, self.kind, (part, parts), self.columns)

    def output_specs(self, info: PlanInfo, *tensors: TensorMeta) -> tuple[OutputSpec, ...]:
        widths = self.columns or [meta.shape[1] * info.world_size for meta in tensors]
        return tuple(
            OutputSpec((meta.shape[0], width, *meta.shape[2:]), meta.dtype)
            for meta, width in zip(tensors, widths, strict=True)
        )

    def kernel(self, key: KernelKey) -> Any:
        from .gather_kernels import gather_kernel

        protocol, pack = key.variant[:2]
        return gather_kernel(
            self.num_inputs,
            protocol=str(protocol),
            pack=int(pack),
            threads=self.block,
            uneven=UNEVEN in key.variant,
        )

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        from .reference import gather_dense

        uneven = self.columns is not None
        columns = [[shard[i] for shard in shards] for i in range(self.num_inputs)]
        return tuple(gather_dense(column, uneven) for column in columns)

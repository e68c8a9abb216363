"""Host side of gathers whose ranks have different widths, and of parts of wide rows. Pure.

Widths are those of torch.tensor_split: of W ranks, the first `columns % W` have a column more.
Plans count with the widest rank, so staged bytes, grid and signature are equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import InvalidArgumentError
from ..layout import STAGED_ALIGNMENT, align_up, divisor
from ..policy import choose_protocol, gather_grid, pace
from .collective import KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta
from .columns import share, share_of_bytes, stride_nbytes

UNEVEN = "uneven"
"""Ends the variant of the kernels."""

PACKS = {"push": (16, 2, 1), "pull": (16, 2, 1), "tagged": (8, 1)}


@dataclass(frozen=True)
class Shares:
    """How the columns of a gathered row lie on ranks.

    Attributes:
        columns: Of the gathered row.
        unit: Bytes of a column.
        world_size: Number of ranks.
    """

    columns: int
    unit: int
    world_size: int

    @classmethod
    def of(cls, meta: TensorMeta, columns: int, world_size: int) -> Shares:
        """Return the shares of a gathered tensor, of which a rank has `meta`."""
        return cls(columns, math.prod(meta.shape[2:]) * meta.itemsize, world_size)

    @property
    def extra(self) -> int:
        """Ranks that have a column more."""
        return self.columns % self.world_size

    def columns_of(self, rank: int) -> int:
        """Return how many columns a rank has."""
        begin, end = share(self.columns, rank, self.world_size)
        return end - begin

    @property
    def widest(self) -> int:
        """Bytes of the longest rank's row."""
        return self.columns_of(0) * self.unit

    @property
    def lack(self) -> int:
        """By how many bytes the rows of other ranks are shorter."""
        return self.unit if self.extra else 0

    def scalars(self, begin: int, end: int) -> tuple[int, ...]:
        """Return what a kernel is told beside columns.column_scalars, of the bytes in a range."""
        shorter = self.widest - self.lack
        return (
            self.columns * self.unit,
            self.columns // self.world_size * self.unit,
            self.extra,
            self.unit if self.extra else 0,
            end - max(begin, min(end, shorter)),
        )


def check_share(op: str, label: str, meta: TensorMeta, shares: Shares, rank: int) -> None:
    """Check that a tensor is the rank's share.

    Raises:
        InvalidArgumentError: It has another width, or some rank has no column.
    """
    wanted, found = shares.columns_of(rank), meta.shape[1]
    if shares.columns < shares.world_size or wanted != found:
        raise InvalidArgumentError(
            f"{label} has width={found} on rank {rank}; of {shares.columns} columns in all it has "
            f"{wanted}: shards are those of torch.tensor_split, and none is empty "
            f"(shape={meta.shape}, world_size={shares.world_size})",
            op=op,
        )


def uneven_variants(op: str, kind: Sequence[int | str] = ()) -> list[KernelKey]:
    """Return the kernels of a gather of uneven shards."""
    return [
        KernelKey(op, (protocol, pack, *kind, UNEVEN))
        for protocol, packs in PACKS.items()
        for pack in packs
    ]


def uneven_pack(
    info: PlanInfo,
    packs: Mapping[str, Sequence[int]],
    protocol: str,
    tensors: Sequence[TensorMeta],
    shares: Sequence[Shares],
) -> int:
    """Return the widest pack that suits every rank's rows, so every address of any shard."""
    sizes = [stride_nbytes(meta) for meta in tensors]
    for one in shares:
        sizes += [one.widest, one.lack, one.columns * one.unit]
    limit = min([info.output_alignment, *(meta.alignment for meta in tensors)])
    return next(p for p in packs[protocol] if p <= limit and all(size % p == 0 for size in sizes))


def plan_uneven(
    op: str,
    info: PlanInfo,
    tensors: Sequence[TensorMeta],
    outputs: tuple[OutputSpec, ...],
    shares: Sequence[Shares],
    kind: tuple[int, ...] = (),
    part: tuple[int, int] = (0, 1),
) -> tuple[Plan, tuple[int, ...]]:
    """Plan a gather of uneven shards, or of a part of a single row.

    Args:
        op: Name of the collective.
        info: Of the group.
        tensors: This rank's.
        outputs: Of the whole call.
        shares: Of each tensor.
        kind: Ends the kernel's variant, but for UNEVEN.
        part: Which part of the rows, and of how many.

    Returns:
        The plan, and where inputs and outputs begin, in bytes.

    Raises:
        InvalidArgumentError: Rows differ.
    """
    rows, world = tensors[0].shape[0], info.world_size
    if any(meta.shape[0] != rows for meta in tensors):
        raise InvalidArgumentError(
            f"the tensors have different rows={[meta.shape[0] for meta in tensors]}", op=op
        )
    spans = [share_of_bytes(one.widest, *part) for one in shares]
    sizes = [end - begin for begin, end in spans]
    staged = sum(align_up(rows * size, STAGED_ALIGNMENT) for size in sizes)
    protocol = choose_protocol(info.protocol, staged, world, info.segment_nbytes, info.limits)
    if protocol == "tagged" and part[1] > 1:
        protocol = "push"  # what is cut is large
    grid = gather_grid(protocol, [rows * size for size in sizes], world, info.max_blocks)
    pack = uneven_pack(info, PACKS, protocol, tensors, shares)
    scalars = [rows, pace(protocol, staged, world, grid.blocks, info.limits)]
    for meta, one, span, chunk in zip(tensors, shares, spans, grid.chunks, strict=True):
        scalars += uneven_scalars(meta, one, span, protocol, chunk, pack)
    plan = Plan(
        op=op,
        outputs=outputs,
        kernel=KernelKey(op, (protocol, pack, *kind, UNEVEN)),
        grid=grid.blocks,
        scalars=tuple(scalars),
        staged_nbytes=staged * 2 if protocol == "tagged" else staged,
        exchanged=tuple(range(len(tensors))),
        facts=(protocol, UNEVEN, *part, *((one.shape, one.dtype) for one in outputs)),
        shards=shapes_of(tensors, shares),
    )
    return plan, tuple(begin for begin, _ in spans) * 2


def uneven_scalars(
    meta: TensorMeta, one: Shares, span: tuple[int, int], protocol: str, chunk: int, pack: int
) -> tuple[int, ...]:
    """Return what a kernel is told of a tensor: columns.column_scalars, and those of its shares.

    Args:
        meta: This rank's.
        one: Its shares.
        span: The bytes of each row that the launch moves.
        protocol: Of the call.
        chunk: As of column_scalars.
        pack: As of column_scalars.
    """
    size, item = span[1] - span[0], 8 if protocol == "tagged" else pack
    split = (divisor(max(size, 1)), chunk, divisor(chunk // item))
    return (size, stride_nbytes(meta), *split, *one.scalars(*span))


def shapes_of(
    tensors: Sequence[TensorMeta], shares: Sequence[Shares]
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return by rank the shapes of all ranks' shares."""
    return tuple(
        tuple(
            (meta.shape[0], one.columns_of(rank), *meta.shape[2:])
            for meta, one in zip(tensors, shares, strict=True)
        )
        for rank in range(shares[0].world_size)
    )


def plan_part(
    op: str,
    info: PlanInfo,
    tensors: Sequence[TensorMeta],
    kind: tuple[int, ...],
    part: tuple[int, int],
    columns: Sequence[int] | None,
) -> tuple[Plan, tuple[int, ...]]:
    """Plan a part of a row of a gather; see Collective.plan_columns.

    `columns` are those of each gathered row, if shards are uneven; the rest is as of plan_uneven.
    """
    world = info.world_size
    total = columns or [meta.shape[1] * world for meta in tensors]
    shares = [Shares.of(meta, one, world) for meta, one in zip(tensors, total, strict=True)]
    return plan_uneven(op, info, tensors, (), shares, kind, part)

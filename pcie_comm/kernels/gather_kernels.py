"""The kernels of all_gather_pair and all_gather_heads: tensors that share a flag per peer."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ..layout import PACK_NBYTES
from .all_gather import ColumnGather, Columns
from .protocol import Lane, LaneArgs, Staging, no_wait
from .tagged import TaggedGather


def columns_of(count: int, lane: Lane, tensors: tuple, scalars: tuple) -> list[Columns]:
    """Return the launch's tensors; scalars: rows, `count` row sizes, `count` strides, in bytes."""
    rows = Int32(scalars[0])
    staged = Int64(0)
    columns = []
    for i in range(count):
        row_nbytes = Int32(scalars[1 + i])
        columns.append(
            Columns(
                source=tensors[i],
                source_stride=scalars[1 + count + i],
                output=tensors[count + i],
                output_stride=row_nbytes * lane.world_size,
                row_nbytes=row_nbytes,
                rows=rows,
                staged=staged,
            )
        )
        units = (rows * row_nbytes + Int32(PACK_NBYTES - 1)) >> Int32(4)
        staged += Int64(units) * PACK_NBYTES
    return columns


def gather_kernel(count: int, *, protocol: str, pack: int, threads: int) -> Any:
    """Return the kernel that gathers `count` tensors; its scalars: see columns_of."""
    if protocol == "tagged":
        return _tagged_kernel(count, pack, threads)

    @cute.kernel
    def gather(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads)
        staging = Staging(lane, protocol == "push")
        columns = columns_of(count, lane, tensors, scalars)
        gathers = [ColumnGather(staging, c, lane.block, lane.grid, pack) for c in columns]
        if lane.ok != Uint32(0):
            for i in cutlass.range_constexpr(count):
                gathers[i].stage()
        ok = lane.exchange(lane.ok)
        if ok != Uint32(0):
            for i in cutlass.range_constexpr(count):
                gathers[i].collect()

    return gather


def _tagged_kernel(count: int, pack: int, threads: int) -> Any:
    @cute.kernel
    def gather_tagged(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads, tagged=True)
        columns = columns_of(count, lane, tensors, scalars)
        gathers = [TaggedGather(lane, c, lane.block, lane.grid, pack) for c in columns]
        lane.announce()
        for i in cutlass.range_constexpr(count):
            gathers[i].stage()
        for i in cutlass.range_constexpr(count):
            gathers[i].copy_own()
        confirmed = lane.confirm()
        ok = gathers[0].collect(lane.ok, confirmed, True)
        if cutlass.const_expr(count == 2):
            gathers[1].collect(ok, no_wait(), False)

    return gather_tagged

"""The kernels of all_gather_pair and all_gather_heads: tensors that share a flag per peer."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ..layout import STAGED_ALIGNMENT
from .all_gather import ColumnGather, Columns
from .protocol import WARP, Lane, LaneArgs, Staging, merge_waits, no_wait
from .tagged import TaggedGather
from .uneven_columns import UnevenColumns


def columns_of(
    count: int, lane: Lane, tensors: tuple, scalars: tuple, kind: type[Columns]
) -> list[Columns]:
    """Return the launch's tensors; scalars: rows, pace, kind.NUM_SCALARS for each."""
    rows = Int32(scalars[0])
    staged = Int64(0)
    columns = []
    for i in range(count):
        begin = 2 + i * kind.NUM_SCALARS
        of_tensor = scalars[begin : begin + kind.NUM_SCALARS]
        columns.append(kind.of(lane, rows, staged, tensors[i], tensors[count + i], of_tensor))
        padded = (columns[i].nbytes + Int32(STAGED_ALIGNMENT - 1)) & Int32(-STAGED_ALIGNMENT)
        staged += Int64(padded)
    return columns


def gather_kernel(
    count: int, *, protocol: str, pack: int, threads: int, uneven: bool = False
) -> Any:
    """Return the kernel that gathers `count` tensors; its scalars: see columns_of."""
    kind = UnevenColumns if uneven else Columns
    if protocol == "tagged":
        tagged = _tagged_kernel if count <= 2 else _tagged_kernel_of_many
        return tagged(count, pack, threads, kind)

    @cute.kernel
    def gather(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads)
        staging = Staging(lane, protocol == "push")
        columns = columns_of(count, lane, tensors, scalars, kind)
        gathers = [ColumnGather(staging, c, lane.block, pack) for c in columns]
        lane.enter()
        if protocol == "push":
            lane.await_turn(lane.block, Int32(scalars[1]))
        if lane.ok != Uint32(0):
            for i in cutlass.range_constexpr(count):
                gathers[i].stage()
        ok = lane.exchange(lane.ok)
        if ok != Uint32(0):
            for i in cutlass.range_constexpr(count):
                gathers[i].collect()

    return gather


def _tagged_kernel(count: int, pack: int, threads: int, kind: type[Columns]) -> Any:
    @cute.kernel
    def gather_tagged(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads, tagged=True)
        columns = columns_of(count, lane, tensors, scalars, kind)
        gather = TaggedGather(lane, columns, lane.block, pack)
        first = gather.transfer(lane.thread)
        words = gather.load(first)
        lane.enter()
        patient = Int32(scalars[1])
        late = no_wait()
        if lane.thread >= Int32(threads - WARP):
            late = lane.watch_flags(patient)
        else:
            gather.send(first, words)
            gather.stage(Int32(1))
            lane.be_patient(patient)
            late = gather.collect(lane.ok)
        lane.leave(late)

    return gather_tagged


def _tagged_kernel_of_many(count: int, pack: int, threads: int, kind: type[Columns]) -> Any:
    """Tensor after tensor: all are pushed before the first one is awaited."""

    @cute.kernel
    def gather_many_tagged(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads, tagged=True)
        columns = columns_of(count, lane, tensors, scalars, kind)
        gathers = [TaggedGather(lane, (c,), lane.block, pack) for c in columns]
        lane.enter()
        patient = Int32(scalars[1])
        late = no_wait()
        if lane.thread >= Int32(threads - WARP):
            late = lane.watch_flags(patient)
        else:
            for i in cutlass.range_constexpr(count):
                gathers[i].stage(Int32(0))
            lane.be_patient(patient)
            ok = lane.ok
            for i in cutlass.range_constexpr(count):
                ok, wait = gathers[i].collect_next(ok, i == 0)
                ok = ok & Uint32(wait.code == Uint32(0))
                late = merge_waits(late, wait)
        lane.leave(late)

    return gather_many_tagged

"""The kernels of all_gather_pair and all_gather_heads: tensors that share a flag per peer."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ..layout import STAGED_ALIGNMENT
from .all_gather import NUM_SCALARS, ColumnGather, Columns
from .protocol import WARP, Lane, LaneArgs, Staging, merge_waits, no_wait
from .tagged import TaggedGather


def columns_of(count: int, lane: Lane, tensors: tuple, scalars: tuple) -> list[Columns]:
    """Return the launch's tensors; scalars: rows, pace, NUM_SCALARS for each."""
    rows = Int32(scalars[0])
    staged = Int64(0)
    columns = []
    for i in range(count):
        begin = 2 + i * NUM_SCALARS
        of_tensor = scalars[begin : begin + NUM_SCALARS]
        columns.append(Columns.of(lane, rows, staged, tensors[i], tensors[count + i], of_tensor))
        padded = (columns[i].nbytes + Int32(STAGED_ALIGNMENT - 1)) & Int32(-STAGED_ALIGNMENT)
        staged += Int64(padded)
    return columns


def gather_kernel(count: int, *, protocol: str, pack: int, threads: int) -> Any:
    """Return the kernel that gathers `count` tensors; its scalars: see columns_of."""
    if protocol == "tagged":
        return (_tagged_kernel if count <= 2 else _tagged_kernel_of_many)(count, pack, threads)

    @cute.kernel
    def gather(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads)
        staging = Staging(lane, protocol == "push")
        columns = columns_of(count, lane, tensors, scalars)
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


def _tagged_kernel(count: int, pack: int, threads: int) -> Any:
    @cute.kernel
    def gather_tagged(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads, tagged=True)
        gather = TaggedGather(lane, columns_of(count, lane, tensors, scalars), lane.block, pack)
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


def _tagged_kernel_of_many(count: int, pack: int, threads: int) -> Any:
    """Tensor after tensor: all are pushed before the first one is awaited."""

    @cute.kernel
    def gather_many_tagged(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads, tagged=True)
        columns = columns_of(count, lane, tensors, scalars)
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

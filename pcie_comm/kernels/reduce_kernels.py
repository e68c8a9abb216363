"""The kernels of all_reduce and reduce_scatter; see reduce.py."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64, Uint32, cute

from .all_gather import Columns
from .protocol import WARP, Lane, LaneArgs, Staging, no_wait
from .reduce import Slices, TaggedSlices


def reduce_kernel(dtype: str, *, scatter: bool, protocol: str, pack: int, threads: int) -> Any:
    """Return the kernel.

    Its scalars: rows, policy.pace, those of columns.column_scalars; with `scatter`, how far the
    columns of two owners are apart in the input.
    """
    if protocol == "tagged":
        return _tagged_kernel(dtype, scatter, pack, threads)

    @cute.kernel
    def reduce(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads)
        staging = Staging(lane, protocol == "push")
        columns = part_of(lane, tensors[0], tensors[1], scalars)
        apart = scalars[7] if scatter else 0
        slices = Slices(staging, columns, dtype, scatter=scatter, pack=pack, apart=apart)
        lane.enter()
        if protocol == "push":
            lane.await_turn(lane.block, Int32(scalars[1]))
        if lane.ok != Uint32(0):
            slices.stage()
        ok = lane.exchange(lane.ok)
        if ok != Uint32(0):
            slices.collect()

    return reduce


def _tagged_kernel(dtype: str, scatter: bool, pack: int, threads: int) -> Any:
    @cute.kernel
    def reduce_tagged(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads, tagged=True)
        columns = part_of(lane, tensors[0], tensors[1], scalars)
        apart = scalars[7] if scatter else 0
        slices = TaggedSlices(lane, columns, dtype, scatter=scatter, loads=pack, apart=apart)
        lane.enter()
        patient = Int32(scalars[1])
        late = no_wait()
        if lane.thread >= Int32(threads - WARP):
            late = lane.watch_flags(patient)
        else:
            slices.send()
            lane.be_patient(patient)
            late = slices.collect_units(lane.ok)
        lane.leave(late)

    return reduce_tagged


def part_of(lane: Lane, source: Int64, output: Int64, scalars: tuple) -> Columns:
    """Return a part that is staged first, from scalars as reduce_kernel states them."""
    return Columns.of(lane, Int32(scalars[0]), Int64(0), source, output, scalars[2:7])

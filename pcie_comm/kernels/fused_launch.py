"""The flow of a fused launch: some blocks route, the others gather the down rows.

A router, RouterBlock or GatheredRouter, says what its blocks load, send and select; this file says
when. Message flow of a launch, on every block:

    prefetch                     inputs that need no peer; overlaps the wait for the predecessor
    enter
    contribute, or stage         to the peers' slots or the own one, or as tagged units
    exchange, or the waits       of tagged push, in which each reader polls the data itself
    collect
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass import Int32, Uint32, cute

from .all_gather import ColumnGather
from .protocol import Lane, LaneArgs, Staging, no_wait
from .router_kernels import WORKERS, clear_ids
from .router_spec import RouterSpec
from .tagged import TaggedGather


def fused_launch(
    router_kind: Any,
    split_tensors: Callable,
    spec: RouterSpec,
    *,
    protocol: str,
    pack: int,
    threads: int,
) -> Any:
    """Return a kernel that selects by a kind of router, and gathers.

    `router_kind` is made from a Staging, rows and `spec`, and has prefetch, contribute and collect.
    `split_tensors` takes the lane, `spec`, tensors and scalars, and returns rows, for the router,
    and the Columns of the gather. The kernel's second and third scalars: router blocks,
    policy.pace of the gather's blocks.
    """
    if protocol == "tagged":
        return _tagged_launch(router_kind, split_tensors, spec, pack, threads)

    @cute.kernel
    def gather_select(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads)
        staging = Staging(lane, protocol == "push")
        rows, columns = split_tensors(lane, spec, tensors, scalars)
        router_blocks = Int32(scalars[1])
        router = router_kind(staging, rows, spec)
        gather = ColumnGather(staging, columns, lane.block - router_blocks, pack)
        fetched = router.prefetch()
        lane.enter()
        if protocol == "push":
            lane.await_turn(lane.block - router_blocks, Int32(scalars[2]))
        if lane.ok != Uint32(0):
            if lane.block >= router_blocks:
                gather.stage()
            elif lane.thread < Int32(WORKERS):
                router.contribute(fetched)
        ok = lane.exchange(lane.ok)
        if ok != Uint32(0):
            if lane.block >= router_blocks:
                gather.collect()
            elif lane.thread < Int32(WORKERS):
                router.collect(ok)
        else:
            clear_ids(lane, rows.ids, rows.first_row, rows.last_row, spec.top_k * 4)

    return gather_select


def _tagged_launch(
    router_kind: Any, split_tensors: Callable, spec: RouterSpec, pack: int, threads: int
) -> Any:
    @cute.kernel
    def gather_select_tagged(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads, tagged=True)
        rows, columns = split_tensors(lane, spec, tensors, scalars)
        router_blocks = Int32(scalars[1])
        router = router_kind(Staging(lane, True), rows, spec, tagged=True)
        gather = TaggedGather(lane, (columns,), lane.block - router_blocks, pack)
        fetched = router.prefetch()
        patient = Int32(scalars[2])
        lane.enter()
        late = no_wait()
        if lane.thread >= Int32(WORKERS):
            late = lane.watch_flags(patient)
        elif lane.block < router_blocks:
            router.contribute(fetched)
            lane.be_patient(patient)
            late = router.collect(lane.ok)
        else:
            gather.stage(Int32(0))
            lane.be_patient(patient)
            late = gather.collect(lane.ok)
        lane.leave(late)

    return gather_select_tagged

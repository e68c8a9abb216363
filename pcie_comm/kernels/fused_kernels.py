"""The fused kernel: gather the down rows and select experts, in one launch.

Message flow on a router block (the first `router_blocks` of the grid):

    levels 1 and 2 over experts this rank owns -> 16 records per group and row, staged
    exchange, or the announcement of tagged push
    levels 3 and 4 over the lists of all ranks -> weights and ids

Under tagged push a block's groups and its rows have nothing to do with each other, so that one row
is spread over as many blocks as there is work; under push and pull a block collects what the same
block of its peers staged, hence whole rows. The other blocks gather the down rows exactly as
all_gather does. Order of a segment: records of row 0 group 0, row 0 group 1, ..., then the down
rows. Bytes on the wire per rank, row and peer: 128 per owned group (16 / world_size of them, or
14 / world_size), 256 with tags, plus the down shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute

from . import primitives as prim
from . import scalars as num
from .all_gather import Columns
from .fused_launch import fused_launch
from .protocol import DeviceObject, Lane, Staging, Wait, merge_waits, no_wait
from .router_kernels import PAIR, QUARTERS, WORKERS, Final, Pair, sync_workers
from .router_spec import RouterSpec
from .tagged import await_unit
from .topk import (
    IMAGES_NBYTES,
    LIST_NBYTES,
    LISTS,
    RECORD_NBYTES,
    TOP_K,
    emit,
    judge,
    place_image,
    place_record,
    rank_in_others,
    read_record,
)


@dataclass(frozen=True)
class RouterRows:
    """The router's part of a fused launch, and of it what one block does.

    `groups` is what one rank owns, a power of two: 1 << `group_shift`. A row is merged from
    groups * world_size lists. A task is a group of a row. Strides in bytes.
    """

    logits: Int64
    stride: Int64
    biases: Int64
    weights: Int64
    ids: Int64
    first_row: Int32
    last_row: Int32
    first_task: Int32
    last_task: Int32
    group_shift: Int32
    group_size: Int32


class RouterBlock(DeviceObject):
    """Levels 1 to 4 of a fused router block."""

    def __init__(
        self, staging: Staging, rows: RouterRows, spec: RouterSpec, tagged: bool = False
    ) -> None:
        self.staging = staging
        self.lane = staging.lane
        self.tagged = tagged
        self.rows = rows
        self.spec = spec
        self.pair = Pair(QUARTERS)
        self.final = Final()
        self.bias_address = prim.shared_address(cute.arch.alloc_smem(Uint32, spec.num_experts, 16))
        self.working = Uint32(self.lane.thread < Int32(WORKERS))

    def _expert(self, task: Int32) -> Int32:
        """Return which of this rank's experts a lane judges for a task."""
        group = task & ((Int32(1) << self.rows.group_shift) - Int32(1))
        width = self.rows.group_size >> Int32(2)
        return group * self.rows.group_size + self.pair.list * width + self.pair.seat

    def _seated(self) -> cutlass.Boolean:
        """Tell whether a lane judges an expert of every group."""
        return self.pair.seat < (self.rows.group_size >> Int32(2))

    def _fetch(self, task: Int32) -> tuple:
        """Load logit and bias of the expert that a lane judges for a task."""
        rows = self.rows
        local = self._expert(task)
        seated = Uint32(self._seated() & (task < rows.last_task)) & self.working
        own = (self.lane.rank << rows.group_shift) * rows.group_size
        row = num.wide(task >> rows.group_shift) * rows.stride
        return (
            prim.load_f32(rows.logits + row + num.wide(local) * 4, seated),
            prim.load_f32(rows.biases + num.wide(own + local) * 4, seated),
        )

    def prefetch(self) -> tuple:
        """Load what `contribute` needs first: the first task's logit and bias, and all biases."""
        return self._fetch(self.rows.first_task + self.pair.index), self._fetch_biases()

    def _fetch_biases(self) -> tuple:
        """Load all biases, some by each worker."""
        wanted = self.working & Uint32(self.rows.first_row < self.rows.last_row)
        return tuple(
            prim.load_f32(self.rows.biases + num.wide(expert) * 4, wanted & Uint32(inside))
            for expert, inside in self._bias_places()
        )

    def _bias_places(self) -> list:
        places = range(0, self.spec.num_experts, WORKERS)
        experts = [self.lane.thread + Int32(begin) for begin in places]
        return [(expert, expert < Int32(self.spec.num_experts)) for expert in experts]

    def contribute(self, fetched: tuple) -> None:
        """Give peers what they select from. Participants: workers. `fetched` is of `prefetch`."""
        (logit, bias), biases = fetched
        self._keep_biases(biases)
        self._stage(logit, bias)
        if self.tagged:
            sync_workers()

    @cute.jit
    def _keep_biases(self, biases: tuple) -> None:
        """Store the biases for level 3. A barrier of the workers must follow."""
        places = self._bias_places()
        for i in cutlass.range_constexpr(len(biases)):
            expert, inside = places[i]
            if inside:
                address = self.bias_address + expert * Int32(4)
                prim.store_shared_u32(address, num.float_bits(biases[i]))

    @cute.jit
    def _stage(self, logit: Float32, bias: Float32) -> None:
        """Levels 1 and 2: rank the own experts of every task, stage 16 records per group.

        `logit` and `bias` are those of the first task. A pair that has no task left meets the same
        barriers: racecheck orders warps by how many they have met.
        """
        rows = self.rows
        own = (self.lane.rank << rows.group_shift) * rows.group_size
        for first in cutlass.range(rows.first_task, rows.last_task, QUARTERS, unroll=1):
            task = first + self.pair.index
            if task < rows.last_task:
                image, record = judge(logit, bias, own + self._expert(task), self.spec)
                image = num.select(self._seated(), image, Uint32(0))
                rank = self.pair.rank_group(image)
                place_record(self.pair.records, rank, record)
                self.pair.sync()
                self._send(task)
            else:
                self.pair.sync()
                self.pair.sync()
            logit, bias = self._fetch(task + Int32(QUARTERS))

    @cute.jit
    def _send(self, index: Int32) -> None:
        """Stage the pair's 16 records as list `index` of this rank's segment."""
        pair = self.pair
        lane = self.lane
        if cutlass.const_expr(self.tagged):
            record = prim.load_shared_u64(pair.records + pair.seat * Int32(RECORD_NBYTES))
            words = (Uint32(record), Uint32(record >> Uint64(32)))
            offset = self._unit_offset(lane.rank, index, pair.seat)
            turns = (lane.world_size + Int32(LISTS - 1)) >> Int32(2)
            for turn in cutlass.range(turns, unroll=1):
                step = Int32(1) + pair.list + turn * Int32(LISTS)
                enabled = Uint32(step <= lane.world_size) & lane.ok
                ahead = num.minimum(step, lane.world_size)
                slab = lane.peer_of_lane(lane.wrap(lane.rank + ahead))
                slab = num.select(ahead == lane.world_size, lane.mirror, slab)
                prim.store_unit(slab + offset, words, lane.epoch, enabled)
        else:
            pack = pair.place & Int32(7)
            words = prim.load_shared_v4(pair.records + pack * Int32(16))
            offset = num.wide(index) * LIST_NBYTES + num.wide(pack) * 16
            self.staging.put(offset, words, 16, pair.place >> Int32(3), PAIR // 8)

    def _unit_offset(self, writer: Int32, index: Int32, seat: Int32) -> Int64:
        """Return the offset of a record's unit in any slab."""
        segment = self.lane.slot_offset + num.wide(writer) * self.lane.segment_nbytes
        return segment + num.wide(index * Int32(TOP_K) + seat) * 16

    @cute.jit
    def collect(self, ok: Uint32) -> Wait:
        """Levels 3 and 4 of the block's rows. Participants: workers.

        Requires: `exchange` returned `ok`, or, with tags: this concludes the launch before the
        first row is written, that is after every peer's flag has been seen. Returns how the waits
        ended.
        """
        rows, pair, final = self.rows, self.pair, self.final
        turns = rows.last_row - rows.first_row
        if cutlass.const_expr(self.tagged):
            turns = num.maximum(turns, Int32(1))
        late = no_wait()
        for turn in cutlass.range(turns, unroll=1):
            row = rows.first_row + turn
            there = Uint32(row < rows.last_row)
            record, present, wait = self._fetch_record(row, ok & there)
            late = merge_waits(late, wait)
            image = read_record(record, self.bias_address, self.spec.num_experts)
            image = num.select(present != Uint32(0), image, Uint32(0))
            rank = pair.seat
            for level in cutlass.range(2, unroll=1):
                quarters = level != Int32(0)
                lists = num.select(quarters, final.images, pair.images)
                own = num.select(quarters, pair.index, pair.list)
                place_image(lists + own * Int32(IMAGES_NBYTES), rank, image)
                sync_workers()
                rank = rank_in_others(lists, own, rank, image)
            place_record(final.records, rank, record)
            if turn == Int32(0):
                ok = self._conclude(ok, late)
            else:
                sync_workers()
            if cute.arch.warp_idx() == Int32(0):
                if there != Uint32(0):
                    offset = num.wide(row) * (self.spec.top_k * 4)
                    lane = cute.arch.lane_idx()
                    emit(final.records, lane, rows.weights + offset, rows.ids + offset, self.spec)
        return late

    @cute.jit
    def _conclude(self, ok: Uint32, wait: Wait) -> Uint32:
        """Conclude the launch, where that was not done by an exchange. A barrier of the workers."""
        if cutlass.const_expr(self.tagged):
            ok = self.lane.conclude(ok, wait)
        else:
            sync_workers()
        return ok

    @cute.jit
    def _fetch_record(self, row: Int32, enabled: Uint32) -> tuple:
        """Return this lane's record of a row, 1 or 0 for present, and how the wait ended."""
        lane = self.lane
        list_index = self.pair.index * Int32(LISTS) + self.pair.list
        peer = list_index >> self.rows.group_shift
        index = (row << self.rows.group_shift) + list_index - (peer << self.rows.group_shift)
        present = enabled & Uint32(peer < lane.world_size)
        peer = num.minimum(peer, lane.world_size - Int32(1))
        if cutlass.const_expr(self.tagged):
            base = num.select(peer == lane.rank, lane.mirror, lane.own)
            address = base + self._unit_offset(peer, index, self.pair.seat)
            (low, high), wait = await_unit(lane, address, peer, present)
            record = (Uint64(high) << Uint64(32)) | Uint64(low)
        else:
            offset = num.wide(index) * LIST_NBYTES + num.wide(self.pair.seat) * RECORD_NBYTES
            record = prim.load_peer_u64(self.staging.source(peer) + offset)
            wait = no_wait()
        return record, present, wait


def fused_kernel(spec: RouterSpec, *, protocol: str, pack: int, threads: int) -> Any:
    """Return the kernel of all_gather_pair_topk.

    Its scalars: rows, router blocks, policy.pace of the gather's blocks, rows per router block,
    tasks per router block, log2 of the groups per rank, experts per group, router row stride in
    bytes; then those of the down row, see columns.column_scalars.
    """
    return fused_launch(
        RouterBlock, split_tensors, spec, protocol=protocol, pack=pack, threads=threads
    )


def split_tensors(
    lane: Lane, spec: RouterSpec, tensors: tuple, scalars: tuple
) -> tuple[RouterRows, Columns]:
    """Return the two halves of a fused launch's arguments."""
    down, logits, biases, down_out, weights, ids = tensors
    rows, _, _, rows_per_block, tasks_per_block, group_shift, group_size = (
        Int32(s) for s in scalars[:7]
    )
    tasks = rows << group_shift
    first_row = num.minimum(lane.block * rows_per_block, rows)
    first_task = num.minimum(lane.block * tasks_per_block, tasks)
    router = RouterRows(
        logits=logits,
        stride=scalars[7],
        biases=biases,
        weights=weights,
        ids=ids,
        first_row=first_row,
        last_row=num.minimum(first_row + rows_per_block, rows),
        first_task=first_task,
        last_task=num.minimum(first_task + tasks_per_block, tasks),
        group_shift=group_shift,
        group_size=group_size,
    )
    staged = num.wide(tasks) * LIST_NBYTES
    columns = Columns.of(lane, rows, staged, down, down_out, scalars[8:])
    return router, columns

"""The two kernels that select: stand-alone, and fused with the gather. Levels: see topk.py.

Fused, message flow on a router block (the first `router_blocks` of the grid):

    levels 1 and 2 over the experts this rank owns -> 16 records per group and row, staged
    exchange, or the announcement of tagged push
    levels 3 and 4 over the lists of all ranks -> weights and ids

The other blocks gather the down rows exactly as all_gather does. Order of a segment: records of
row 0 group 0, row 0 group 1, ..., then the down rows. Bytes on the wire per rank, row and peer:
128 per owned group (16 / world_size of them, or 14 / world_size), 256 with tags, plus the down
shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute

from . import primitives as prim
from .all_gather import ColumnGather, Columns
from .protocol import DeviceObject, Lane, LaneArgs, Staging, Wait, merge_waits, no_wait
from .router_spec import RouterSpec
from .tagged import TaggedGather, await_units
from .topk import (
    HALF_GROUP,
    LIST_NBYTES,
    RECORD_NBYTES,
    TOP_K,
    SortedList,
    emit,
    judge,
    place_record,
    rank_by_counting,
    rank_in,
    rank_in_others,
    read_record,
)

WARP = 32
NUM_LISTS = 16
"""Lists a row is merged from: 16, of which the last two stay empty with 14 groups."""

QUARTERS = 4
QUARTER = NUM_LISTS // QUARTERS * TOP_K
"""Candidates of a quarter, and of the last level: one a lane of two warps."""

ROWS_AT_ONCE = 8
"""Rows a fused router block merges between two barriers."""

PAIR_NBYTES = 2 * HALF_GROUP * 8 + 2 * TOP_K * (8 + 4) + TOP_K * RECORD_NBYTES


class Pair(DeviceObject):
    """Two neighbouring warps that work on one group, quarter or row; shared memory of their own.

    Attributes:
        index, count: Which pair, of how many in the block.
        lane: Within the warp. half: 0 or 1, which warp. place: 0 to 63, within the pair.
        keys: Of 64 candidates.
        lists: Two sorted lists of 16: keys, keys, scores, scores.
        records: 16 records, the result.
    """

    def __init__(self, threads: int) -> None:
        self.lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        self.half = warp & Int32(1)
        self.index = warp >> Int32(1)
        self.count = threads // WARP // 2
        self.place = self.half * Int32(WARP) + self.lane
        area = cute.arch.alloc_smem(Uint64, self.count * PAIR_NBYTES // 8, 16)
        self.keys = prim.shared_address(area) + self.index * Int32(PAIR_NBYTES)
        self.lists = self.keys + Int32(2 * HALF_GROUP * 8)
        self.scores = self.lists + Int32(2 * TOP_K * 8)
        self.records = self.scores + Int32(2 * TOP_K * 4)

    def sync(self) -> None:
        """Barrier of the pair."""
        cute.arch.barrier(barrier_id=self.index + Int32(1), number_of_threads=2 * WARP)

    @cute.jit
    def rank_group(
        self,
        logits: Int64,
        biases: Int64,
        first: Int32,
        size: Int32,
        spec: cutlass.Constexpr,
    ) -> tuple:
        """Levels 1 and 2: return rank, key and score of a candidate of one group.

        `logits` and `biases` are the addresses of the group's expert `first`; `size` its experts.
        Participants: both warps. The result is for the first warp: its lanes hold the 32
        candidates that its two halves sent on, ranked among themselves.
        """
        width = size >> Int32(1)
        offset = self.half * width + self.lane
        key = Uint64(0)
        score = Float32(0.0)
        if self.lane < width:
            logit = prim.bits_float(prim.load_u32(logits + Int64(offset) * 4))
            bias = prim.bits_float(prim.load_u32(biases + Int64(offset) * 4))
            key, score = judge(logit, bias, first + offset, spec.numerics)
        mine = self.keys + self.half * Int32(HALF_GROUP * 8)
        prim.store_shared_u64(mine + self.lane * Int32(8), key)
        cute.arch.sync_warp()
        rank = rank_by_counting(mine, key)
        self._list(self.half).place(rank, key, score)
        self.sync()
        place = self.lane & Int32(TOP_K - 1)
        side = self.lane >> Int32(4)
        key = prim.load_shared_u64(self.lists + self.lane * Int32(8))
        score = prim.bits_float(prim.load_shared_u32(self.scores + self.lane * Int32(4)))
        other = self.lists + (Int32(1) - side) * Int32(TOP_K * 8)
        return place + rank_in(other, key), key, score

    def _list(self, half: Int32) -> SortedList:
        return SortedList(
            self.lists + half * Int32(TOP_K * 8), self.scores + half * Int32(TOP_K * 4)
        )

    @cute.jit
    def finish_row(
        self, lists: SortedList, weights: Int64, ids: Int64, spec: cutlass.Constexpr
    ) -> None:
        """Level 4: merge four sorted lists and write a row's outputs. Participants: both warps."""
        key = prim.load_shared_u64(lists.keys + self.place * Int32(8))
        score = prim.bits_float(prim.load_shared_u32(lists.scores + self.place * Int32(4)))
        rank = rank_in_others(lists.keys, self.place, key)
        place_record(self.records, rank, key, score)
        self.sync()
        if self.half == Int32(0):
            emit(self.records, self.lane, weights, ids, spec)
        self.sync()  # before the pair's next row overwrites the records


def lists_at(keys: Int32, scores: Int32, first: Int32) -> SortedList:
    """Return the sorted lists that start at candidate `first`."""
    return SortedList(keys + first * Int32(8), scores + first * Int32(4))


def router_kernel(spec: RouterSpec, threads: int) -> Any:
    """Return the stand-alone kernel: one block of 16 warps per row.

    Its scalars: row stride of the logits in bytes.
    """
    size = spec.num_experts // NUM_LISTS

    @cute.kernel
    def select_topk(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        prim.follow_predecessor()
        logits, biases, weights, ids = tensors
        pair = Pair(threads)
        row = cute.arch.block_idx()[0]
        every = NUM_LISTS * TOP_K
        keys = prim.shared_address(cute.arch.alloc_smem(Uint64, every + QUARTER, 16))
        scores = prim.shared_address(cute.arch.alloc_smem(Uint32, every + QUARTER, 16))

        for group in cutlass.range(pair.index, NUM_LISTS, pair.count, unroll=1):
            expert = Int32(group) * Int32(size)
            address = logits + Int64(row) * scalars[0] + Int64(expert) * 4
            rank, key, score = pair.rank_group(
                address, biases + Int64(expert) * 4, expert, Int32(size), spec
            )
            if pair.half == Int32(0):
                lists_at(keys, scores, Int32(group) * Int32(TOP_K)).place(rank, key, score)
            pair.sync()
        cute.arch.sync_threads()

        if pair.index < Int32(QUARTERS):
            quarter = lists_at(keys, scores, pair.index * Int32(QUARTER))
            key = prim.load_shared_u64(quarter.keys + pair.place * Int32(8))
            score = prim.bits_float(prim.load_shared_u32(quarter.scores + pair.place * Int32(4)))
            rank = rank_in_others(quarter.keys, pair.place, key)
            merged = Int32(every) + pair.index * Int32(TOP_K)
            lists_at(keys, scores, merged).place(rank, key, score)
        cute.arch.sync_threads()

        if pair.index == Int32(0):
            offset = Int64(row) * (TOP_K * 4)
            last = lists_at(keys, scores, Int32(every))
            pair.finish_row(last, weights + offset, ids + offset, spec)

    return select_topk


@dataclass(frozen=True)
class RouterRows:
    """The router's part of a fused launch, for the rows of one block.

    `groups` is what one rank owns, a power of two: 1 << `group_shift`. `lists` is what a row is
    merged from: groups * world_size. Strides in bytes.
    """

    logits: Int64
    stride: Int64
    biases: Int64
    weights: Int64
    ids: Int64
    first_row: Int32
    num_rows: Int32
    group_shift: Int32
    group_size: Int32


class RouterBlock(DeviceObject):
    """Levels 1 to 3 of a fused router block. Every method: all threads of the block take part."""

    def __init__(
        self, staging: Staging, rows: RouterRows, spec: RouterSpec, tagged: bool = False
    ) -> None:
        self.staging = staging
        self.tagged = tagged
        self.rows = rows
        self.spec = spec
        self.pair = Pair(staging.lane.threads)
        bias = cute.arch.alloc_smem(Uint32, spec.num_experts, 16)
        keys = cute.arch.alloc_smem(Uint64, ROWS_AT_ONCE * QUARTER, 16)
        scores = cute.arch.alloc_smem(Uint32, ROWS_AT_ONCE * QUARTER, 16)
        self.bias_address = prim.shared_address(bias)
        self.keys = prim.shared_address(keys)
        self.scores = prim.shared_address(scores)

    @cute.jit
    def stage(self) -> None:
        """Levels 1 and 2: rank the own experts of every row, stage 16 records per group."""
        rows = self.rows
        groups = Int32(1) << rows.group_shift
        tasks = rows.num_rows << rows.group_shift
        for task in cutlass.range(self.pair.index, tasks, self.pair.count, unroll=1):
            row = rows.first_row + (task >> rows.group_shift)
            group = task & (groups - Int32(1))
            local = group * rows.group_size
            expert = (self.staging.lane.rank << rows.group_shift) * rows.group_size + local
            rank, key, score = self.pair.rank_group(
                rows.logits + Int64(row) * rows.stride + Int64(local) * 4,
                rows.biases + Int64(expert) * 4,
                expert,
                rows.group_size,
                self.spec,
            )
            if self.pair.half == Int32(0):
                place_record(self.pair.records, rank, key, score)
                cute.arch.sync_warp()
                self._send((row << rows.group_shift) + group)
            self.pair.sync()

    @cute.jit
    def _send(self, index: Int32) -> None:
        """Stage the pair's 16 records as list `index` of this rank's segment."""
        lane = self.pair.lane
        if cutlass.const_expr(self.tagged):
            place = lane & Int32(TOP_K - 1)
            half = lane >> Int32(4)
            record = prim.load_shared_u64(self.pair.records + place * Int32(RECORD_NBYTES))
            words = (Uint32(record), Uint32(record >> Uint64(32)))
            channel = self.staging.lane
            offset = self._unit_offset(channel.rank, index, place)
            turns = (channel.world_size + Int32(1)) >> Int32(1)
            for turn in cutlass.range(turns, unroll=1):
                step = Int32(1) + half + turn * Int32(2)
                enabled = Uint32(step <= channel.world_size) & channel.ok
                ahead = prim.minimum(step, channel.world_size)
                slab = self.staging.lane.peer_of_lane(self.staging.lane.wrap(channel.rank + ahead))
                prim.store_unit(slab + offset, words, channel.epoch, enabled)
        else:
            pack = lane & Int32(7)
            words = prim.load_shared_v4(self.pair.records + pack * Int32(16))
            offset = Int64(index) * LIST_NBYTES + Int64(pack) * 16
            self.staging.put(offset, words, 16, lane >> Int32(3), 4)

    def _unit_offset(self, writer: Int32, index: Int32, place: Int32) -> Int64:
        """Return the offset of a record's unit in any slab."""
        lane = self.staging.lane
        segment = lane.slot_offset + Int64(writer) * lane.segment_nbytes
        return segment + Int64(index * Int32(TOP_K) + place) * 16

    @cute.jit
    def load_bias(self) -> None:
        """Copy the biases to shared memory for level 3, while the peers are on their way."""
        lane = self.staging.lane
        for expert in cutlass.range(lane.thread, self.spec.num_experts, lane.threads, unroll=1):
            value = prim.load_u32(self.rows.biases + Int64(expert) * 4)
            prim.store_shared_u32(self.bias_address + Int32(expert) * Int32(4), value)

    @cute.jit
    def collect(self, ok: Uint32, confirmed: Wait) -> None:
        """Levels 3 and 4 of all rows.

        Requires: `exchange` returned `ok`, or, with tags: this concludes the launch between the
        first rows' levels, so nothing is written before every peer's flag has been seen.
        """
        last = self.rows.num_rows
        if cutlass.const_expr(self.tagged):
            last = prim.maximum(last, Int32(1))
        for begin in cutlass.range(0, last, ROWS_AT_ONCE, unroll=1):
            count = prim.minimum(self.rows.num_rows - begin, Int32(ROWS_AT_ONCE))
            tasks = prim.select(ok != Uint32(0), count * Int32(QUARTERS), Int32(0))
            wait = no_wait()
            for task in cutlass.range(self.pair.index, tasks, self.pair.count, unroll=1):
                wait = merge_waits(wait, self._merge_quarter(begin, task))
            if cutlass.const_expr(self.tagged):
                if begin == Int32(0):
                    ok = self.staging.lane.conclude(ok, merge_waits(confirmed, wait))
                else:
                    self.staging.lane.give_up(wait)
                    cute.arch.sync_threads()
            else:
                cute.arch.sync_threads()
            rows = prim.select(ok != Uint32(0), count, Int32(0))
            for local in cutlass.range(self.pair.index, rows, self.pair.count, unroll=1):
                row = Int64(self.rows.first_row + begin + local) * (TOP_K * 4)
                lists = lists_at(self.keys, self.scores, local * Int32(QUARTER))
                self.pair.finish_row(lists, self.rows.weights + row, self.rows.ids + row, self.spec)
            cute.arch.sync_threads()

    @cute.jit
    def _merge_quarter(self, begin: Int32, task: Int32) -> Wait:
        """Level 3: merge lists 4q to 4q + 3 of one row. Participants: both warps of a pair."""
        local = task >> Int32(2)
        quarter = task - local * Int32(QUARTERS)
        record, present, wait = self._fetch(self.rows.first_row + begin + local, quarter)
        key, score = read_record(record, self.bias_address, self.spec.num_experts)
        key = prim.select(present != Uint32(0), key, Uint64(0))
        place = self.pair.place
        prim.store_shared_u64(self.pair.keys + place * Int32(8), key)
        self.pair.sync()
        rank = rank_in_others(self.pair.keys, place, key)
        start = local * Int32(QUARTER) + quarter * Int32(TOP_K)
        lists_at(self.keys, self.scores, start).place(rank, key, score)
        self.pair.sync()
        return wait

    @cute.jit
    def _fetch(self, row: Int32, quarter: Int32) -> tuple:
        """Return this lane's record of a quarter, 1 or 0 for present, and how the wait ended."""
        lane = self.staging.lane
        list_index = quarter * Int32(QUARTERS) + (self.pair.place >> Int32(4))
        peer = list_index >> self.rows.group_shift
        index = (row << self.rows.group_shift) + list_index - (peer << self.rows.group_shift)
        present = Uint32(peer < lane.world_size)
        peer = prim.minimum(peer, lane.world_size - Int32(1))
        place = self.pair.place & Int32(TOP_K - 1)
        if cutlass.const_expr(self.tagged):
            address = lane.own + self._unit_offset(peer, index, place)
            data, wait = await_units(lane, (address,), (peer,), (present,))
            low, high = data[0]
            record = (Uint64(high) << Uint64(32)) | Uint64(low)
        else:
            offset = Int64(index) * LIST_NBYTES + Int64(place) * RECORD_NBYTES
            record = prim.load_peer_u64(self.staging.source(peer) + offset)
            wait = no_wait()
        return record, present, wait


def fused_kernel(spec: RouterSpec, *, protocol: str, pack: int, threads: int) -> Any:
    """Return the kernel of all_gather_pair_topk.

    Its scalars: rows, router blocks, rows per router block, log2 of the groups per rank, experts
    per group, router row stride, down row bytes, down row stride; strides in bytes.
    """
    tagged = protocol == "tagged"

    @cute.kernel
    def gather_select(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads, tagged)
        staging = Staging(lane, protocol == "push")
        rows, columns = split_tensors(lane, tensors, scalars)
        router_blocks = Int32(scalars[1])
        router = RouterBlock(staging, rows, spec, tagged)
        part, parts = lane.block - router_blocks, lane.grid - router_blocks
        if cutlass.const_expr(tagged):
            gather = TaggedGather(lane, columns, part, parts, pack)
        else:
            gather = ColumnGather(staging, columns, part, parts, pack)
        if cutlass.const_expr(tagged):
            lane.announce()
            if lane.block < router_blocks:
                router.stage()
                router.load_bias()
                cute.arch.sync_threads()
            else:
                gather.stage()
                gather.copy_own()
            confirmed = lane.confirm()
            if lane.block < router_blocks:
                router.collect(lane.ok, confirmed)
            else:
                gather.collect(lane.ok, confirmed, True)
        else:
            if lane.ok != Uint32(0):
                if lane.block < router_blocks:
                    router.stage()
                    router.load_bias()
                else:
                    gather.stage()
            ok = lane.exchange(lane.ok)
            if ok != Uint32(0):
                if lane.block < router_blocks:
                    router.collect(ok, no_wait())
                else:
                    gather.collect()

    return gather_select


def split_tensors(lane: Lane, tensors: tuple, scalars: tuple) -> tuple[RouterRows, Columns]:
    """Return the two halves of a fused launch's arguments."""
    down, logits, biases, down_out, weights, ids = tensors
    rows, _, rows_per_block, group_shift, group_size = (Int32(s) for s in scalars[:5])
    row_nbytes = Int32(scalars[6])
    first_row = prim.minimum(lane.block * rows_per_block, rows)
    router = RouterRows(
        logits=logits,
        stride=scalars[5],
        biases=biases,
        weights=weights,
        ids=ids,
        first_row=first_row,
        num_rows=prim.minimum(rows - first_row, rows_per_block),
        group_shift=group_shift,
        group_size=group_size,
    )
    columns = Columns(
        source=down,
        source_stride=scalars[7],
        output=down_out,
        output_stride=row_nbytes * lane.world_size,
        row_nbytes=row_nbytes,
        rows=rows,
        staged=Int64(rows << group_shift) * LIST_NBYTES,
    )
    return router, columns

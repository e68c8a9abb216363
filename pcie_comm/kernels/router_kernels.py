"""The two kernels that select: stand-alone, and fused with the gather. Levels: see topk.py.

Fused, message flow on a router block (the first `router_blocks` of the grid):

    level 1 over the experts this rank owns -> 16 records per group and row, 128 bytes, staged
    exchange (one flag per peer covers all rows of the block)
    level 2 and 3 over the lists of all ranks -> weights and ids

The other blocks gather the down rows exactly as all_gather does. Order of a segment: records of
row 0 group 0, row 0 group 1, ..., then the down rows. Bytes on the wire per rank, row and peer:
128 per owned group (16 / world_size of them, or 14 / world_size) plus the down shard.
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
    CONTEST,
    LIST_NBYTES,
    RECORD_NBYTES,
    TOP_K,
    SortedList,
    contest,
    emit,
    judge,
    place_record,
    read_record,
)

WARP = 32
LIST_SLOTS = 16
"""Lists a row is merged from: 16, of which the last two stay empty with 14 groups."""

QUARTERS = 4
ROWS_AT_ONCE = 8
"""Rows a fused router block merges between two barriers."""

ROW_KEYS_NBYTES = CONTEST * 8
ROW_SCORES_NBYTES = CONTEST * 4


class Warp(DeviceObject):
    """One warp's place in its block, and 640 bytes of shared memory of its own."""

    def __init__(self, threads: int) -> None:
        self.lane = cute.arch.lane_idx()
        self.index = cute.arch.warp_idx()
        self.count = threads // WARP
        area = cute.arch.alloc_smem(Uint64, self.count * (CONTEST + TOP_K), 16)
        self.keys = prim.shared_address(area) + self.index * Int32((CONTEST + TOP_K) * 8)
        self.records = self.keys + Int32(CONTEST * 8)

    @cute.jit
    def load_experts(
        self, logits: Int64, biases: Int64, first: Int32, size: Int32, spec: cutlass.Constexpr
    ) -> tuple:
        """Judge the experts `first` to `first + size`, two per lane, and share their keys.

        `logits` and `biases` are the addresses of the group's first expert. Participants: the
        warp, which must be done with the keys of the contest before.
        """
        keys = []
        scores = []
        for half in cutlass.range_constexpr(2):
            place = self.lane + Int32(WARP * half)
            key = Uint64(0)
            score = Float32(0.0)
            if place < size:
                logit = prim.bits_float(prim.load_u32(logits + Int64(place) * 4))
                bias = prim.bits_float(prim.load_u32(biases + Int64(place) * 4))
                key, score = judge(logit, bias, first + place, spec.numerics)
            prim.store_shared_u64(self.keys + place * Int32(8), key)
            keys.append(key)
            scores.append(score)
        cute.arch.sync_warp()
        return keys[0], scores[0], keys[1], scores[1]


@cute.jit
def finish_row(
    warp: Warp, keys: Int32, scores: Int32, weights: Int64, ids: Int64, spec: cutlass.Constexpr
) -> None:
    """Level 3: merge four sorted lists of 16 and write the row's outputs. Participants: a warp."""
    first = prim.load_shared_u64(keys + warp.lane * Int32(8))
    second = prim.load_shared_u64(keys + (warp.lane + Int32(WARP)) * Int32(8))
    first_rank, second_rank = contest(keys, first, second, Int32(CONTEST))
    for half in cutlass.range_constexpr(2):
        place = warp.lane + Int32(WARP * half)
        score = prim.bits_float(prim.load_shared_u32(scores + place * Int32(4)))
        key = (first, second)[half]
        place_record(warp.records, (first_rank, second_rank)[half], key, score)
    cute.arch.sync_warp()
    emit(warp.records, warp.lane, weights, ids, spec)


def router_kernel(spec: RouterSpec, threads: int) -> Any:
    """Return the stand-alone kernel: one block of 16 warps per row, one group per warp.

    Its scalars: row stride of the logits in bytes.
    """
    size = spec.num_experts // LIST_SLOTS

    @cute.kernel
    def select_topk(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        prim.follow_predecessor()
        logits, biases, weights, ids = tensors
        warp = Warp(threads)
        row = cute.arch.block_idx()[0]
        level2_keys = prim.shared_address(cute.arch.alloc_smem(Uint64, LIST_SLOTS * TOP_K, 16))
        level2_scores = prim.shared_address(cute.arch.alloc_smem(Uint32, LIST_SLOTS * TOP_K, 16))
        level3_keys = prim.shared_address(cute.arch.alloc_smem(Uint64, CONTEST, 16))
        level3_scores = prim.shared_address(cute.arch.alloc_smem(Uint32, CONTEST, 16))

        expert = warp.index * Int32(size)
        address = logits + Int64(row) * scalars[0] + Int64(expert) * 4
        first, first_score, second, second_score = warp.load_experts(
            address, biases + Int64(expert) * 4, expert, Int32(size), spec
        )
        first_rank, second_rank = contest(warp.keys, first, second, Int32(size))
        begin = warp.index * Int32(TOP_K)
        winners = SortedList(level2_keys + begin * Int32(8), level2_scores + begin * Int32(4))
        winners.place(first_rank, first, first_score)
        winners.place(second_rank, second, second_score)
        cute.arch.sync_threads()

        if warp.index < Int32(QUARTERS):
            keys = level2_keys + warp.index * Int32(CONTEST * 8)
            scores = level2_scores + warp.index * Int32(CONTEST * 4)
            first = prim.load_shared_u64(keys + warp.lane * Int32(8))
            second = prim.load_shared_u64(keys + (warp.lane + Int32(WARP)) * Int32(8))
            first_rank, second_rank = contest(keys, first, second, Int32(CONTEST))
            begin = warp.index * Int32(TOP_K)
            merged = SortedList(level3_keys + begin * Int32(8), level3_scores + begin * Int32(4))
            for half in cutlass.range_constexpr(2):
                place = warp.lane + Int32(WARP * half)
                score = prim.bits_float(prim.load_shared_u32(scores + place * Int32(4)))
                merged.place((first_rank, second_rank)[half], (first, second)[half], score)
        cute.arch.sync_threads()

        if warp.index == Int32(0):
            offset = Int64(row) * (TOP_K * 4)
            finish_row(warp, level3_keys, level3_scores, weights + offset, ids + offset, spec)

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
        self.warp = Warp(staging.lane.threads)
        bias = cute.arch.alloc_smem(Uint32, spec.num_experts, 16)
        keys = cute.arch.alloc_smem(Uint64, ROWS_AT_ONCE * CONTEST, 16)
        scores = cute.arch.alloc_smem(Uint32, ROWS_AT_ONCE * CONTEST, 16)
        self.bias_address = prim.shared_address(bias)
        self.keys = prim.shared_address(keys)
        self.scores = prim.shared_address(scores)

    @cute.jit
    def stage(self) -> None:
        """Level 1: rank the own experts of every row, stage 16 records per group."""
        rows = self.rows
        groups = Int32(1) << rows.group_shift
        tasks = rows.num_rows << rows.group_shift
        for task in cutlass.range(self.warp.index, tasks, self.warp.count, unroll=1):
            row = rows.first_row + (task >> rows.group_shift)
            group = task & (groups - Int32(1))
            local = group * rows.group_size
            expert = (self.staging.lane.rank << rows.group_shift) * rows.group_size + local
            first, first_score, second, second_score = self.warp.load_experts(
                rows.logits + Int64(row) * rows.stride + Int64(local) * 4,
                rows.biases + Int64(expert) * 4,
                expert,
                rows.group_size,
                self.spec,
            )
            ranks = contest(self.warp.keys, first, second, rows.group_size)
            place_record(self.warp.records, ranks[0], first, first_score)
            place_record(self.warp.records, ranks[1], second, second_score)
            cute.arch.sync_warp()
            self._send((row << rows.group_shift) + group)

    @cute.jit
    def _send(self, index: Int32) -> None:
        """Stage the warp's 16 records as list `index` of this rank's segment."""
        lane = self.warp.lane
        if cutlass.const_expr(self.tagged):
            place = lane & Int32(TOP_K - 1)
            half = lane >> Int32(4)
            record = prim.load_shared_u64(self.warp.records + place * Int32(RECORD_NBYTES))
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
            words = prim.load_shared_v4(self.warp.records + pack * Int32(16))
            offset = Int64(index) * LIST_NBYTES + Int64(pack) * 16
            self.staging.put(offset, words, 16, lane >> Int32(3), 4)

    def _unit_offset(self, writer: Int32, index: Int32, place: Int32) -> Int64:
        """Return the offset of a record's unit in any slab."""
        lane = self.staging.lane
        segment = lane.slot_offset + Int64(writer) * lane.segment_nbytes
        return segment + Int64(index * Int32(TOP_K) + place) * 16

    @cute.jit
    def load_bias(self) -> None:
        """Copy the biases to shared memory for level 2, while the peers are on their way."""
        lane = self.staging.lane
        for expert in cutlass.range(lane.thread, self.spec.num_experts, lane.threads, unroll=1):
            value = prim.load_u32(self.rows.biases + Int64(expert) * 4)
            prim.store_shared_u32(self.bias_address + Int32(expert) * Int32(4), value)

    @cute.jit
    def collect(self, ok: Uint32, confirmed: Wait) -> None:
        """Levels 2 and 3 of all rows.

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
            for task in cutlass.range(self.warp.index, tasks, self.warp.count, unroll=1):
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
            for local in cutlass.range(self.warp.index, rows, self.warp.count, unroll=1):
                row = Int64(self.rows.first_row + begin + local) * (TOP_K * 4)
                finish_row(
                    self.warp,
                    self.keys + local * Int32(ROW_KEYS_NBYTES),
                    self.scores + local * Int32(ROW_SCORES_NBYTES),
                    self.rows.weights + row,
                    self.rows.ids + row,
                    self.spec,
                )
            cute.arch.sync_threads()

    @cute.jit
    def _merge_quarter(self, begin: Int32, task: Int32) -> Wait:
        """Level 2: merge lists 4q to 4q + 3 of one row. Participants: a warp."""
        local = task >> Int32(2)
        quarter = task - local * Int32(QUARTERS)
        row = self.rows.first_row + begin + local
        records, wait = self._fetch(row, quarter)
        found = []
        for half in cutlass.range_constexpr(2):
            record, present = records[half]
            key, score = read_record(record, self.bias_address)
            key = prim.select(present != Uint32(0), key, Uint64(0))
            place = self.warp.lane + Int32(WARP * half)
            prim.store_shared_u64(self.warp.keys + place * Int32(8), key)
            found.append((key, score))
        cute.arch.sync_warp()
        (first, first_score), (second, second_score) = found
        ranks = contest(self.warp.keys, first, second, Int32(CONTEST))
        start = local * Int32(CONTEST) + quarter * Int32(TOP_K)
        merged = SortedList(self.keys + start * Int32(8), self.scores + start * Int32(4))
        merged.place(ranks[0], first, first_score)
        merged.place(ranks[1], second, second_score)
        cute.arch.sync_warp()
        return wait

    @cute.jit
    def _fetch(self, row: Int32, quarter: Int32) -> tuple:
        """Return this lane's two records of a quarter, with 1 or 0 for present, and a Wait."""
        lane = self.staging.lane
        addresses, peers, present = [], [], []
        for half in cutlass.range_constexpr(2):
            place = self.warp.lane + Int32(WARP * half)
            list_index = quarter * Int32(QUARTERS) + (place >> Int32(4))
            peer = list_index >> self.rows.group_shift
            index = (row << self.rows.group_shift) + list_index - (peer << self.rows.group_shift)
            here = Uint32(peer < lane.world_size)
            peer = prim.minimum(peer, lane.world_size - Int32(1))
            record = place & Int32(TOP_K - 1)
            if cutlass.const_expr(self.tagged):
                addresses.append(lane.own + self._unit_offset(peer, index, record))
            else:
                offset = Int64(index) * LIST_NBYTES + Int64(record) * RECORD_NBYTES
                addresses.append(self.staging.source(peer) + offset)
            peers.append(peer)
            present.append(here)
        if cutlass.const_expr(self.tagged):
            data, wait = await_units(lane, tuple(addresses), tuple(peers), tuple(present))
            words = [(Uint64(high) << Uint64(32)) | Uint64(low) for low, high in data]
        else:
            words = [prim.load_peer_u64(address) for address in addresses]
            wait = no_wait()
        return tuple(zip(words, present, strict=True)), wait


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

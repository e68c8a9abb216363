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
from .protocol import DeviceObject, Lane, LaneArgs, Staging
from .router_spec import RouterSpec
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

    def __init__(self, staging: Staging, rows: RouterRows, spec: RouterSpec) -> None:
        self.staging = staging
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
            pack = self.warp.lane & Int32(7)
            words = prim.load_shared_v4(self.warp.records + pack * Int32(16))
            offset = Int64((row << rows.group_shift) + group) * LIST_NBYTES + Int64(pack) * 16
            self.staging.put(offset, words, 16, self.warp.lane >> Int32(3), 4)

    @cute.jit
    def load_bias(self) -> None:
        """Copy the biases to shared memory for level 2, while the peers are on their way."""
        lane = self.staging.lane
        for expert in cutlass.range(lane.thread, self.spec.num_experts, lane.threads, unroll=1):
            value = prim.load_u32(self.rows.biases + Int64(expert) * 4)
            prim.store_shared_u32(self.bias_address + Int32(expert) * Int32(4), value)

    @cute.jit
    def collect(self) -> None:
        """Levels 2 and 3 of all rows. Requires: `exchange` returned 1."""
        for begin in cutlass.range(0, self.rows.num_rows, ROWS_AT_ONCE, unroll=1):
            count = prim.minimum(self.rows.num_rows - begin, Int32(ROWS_AT_ONCE))
            tasks = count * Int32(QUARTERS)
            for task in cutlass.range(self.warp.index, tasks, self.warp.count, unroll=1):
                self._merge_quarter(begin, task)
            cute.arch.sync_threads()
            for local in cutlass.range(self.warp.index, count, self.warp.count, unroll=1):
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
    def _merge_quarter(self, begin: Int32, task: Int32) -> None:
        """Level 2: merge lists 4q to 4q + 3 of one row. Participants: a warp."""
        local = task // Int32(QUARTERS)
        quarter = task - local * Int32(QUARTERS)
        row = self.rows.first_row + begin + local
        found = []
        for half in cutlass.range_constexpr(2):
            place = self.warp.lane + Int32(WARP * half)
            list_index = quarter * Int32(QUARTERS) + place // Int32(TOP_K)
            peer = list_index >> self.rows.group_shift
            key = Uint64(0)
            score = Float32(0.0)
            if peer < self.staging.lane.world_size:
                group = list_index - (peer << self.rows.group_shift)
                index = (row << self.rows.group_shift) + group
                offset = Int64(index) * LIST_NBYTES
                offset += Int64(place & Int32(TOP_K - 1)) * RECORD_NBYTES
                record = prim.load_peer_u64(self.staging.source(peer) + offset)
                key, score = read_record(record, self.bias_address)
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


def fused_kernel(spec: RouterSpec, *, push: bool, pack: int, threads: int) -> Any:
    """Return the kernel of all_gather_pair_topk.

    Its scalars: rows, router blocks, rows per router block, log2 of the groups per rank, experts
    per group, router row stride, down row bytes, down row stride; strides in bytes.
    """

    @cute.kernel
    def gather_select(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        down, logits, biases, down_out, weights, ids = tensors
        lane = Lane(args, threads)
        staging = Staging(lane, push)
        rows, router_blocks, rows_per_block, group_shift, group_size = (
            Int32(scalar) for scalar in scalars[:5]
        )
        row_nbytes = Int32(scalars[6])
        first_row = prim.minimum(lane.block * rows_per_block, rows)
        block_rows = RouterRows(
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
        router = RouterBlock(staging, block_rows, spec)
        part = lane.block - router_blocks
        gather = ColumnGather(staging, columns, part, lane.grid - router_blocks, pack)
        routes = lane.block < router_blocks
        if lane.ok != Uint32(0):
            if routes:
                router.stage()
                router.load_bias()
            else:
                gather.stage()
        ok = lane.exchange(lane.ok)
        if ok != Uint32(0):
            if routes:
                router.collect()
            else:
                gather.collect()

    return gather_select

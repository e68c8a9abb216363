"""The kernels of vocab_argmax; the message flow is there."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute

from . import dtypes
from . import primitives as prim
from . import scalars as num
from .protocol import WARP, DeviceObject, Lane, LaneArgs, Staging, Wait, merge_waits, no_wait
from .router_kernels import WORKERS, clear_ids, sync_workers
from .tagged import await_unit
from .topk import image_of

SENDERS = 16
"""Threads that send a key, each to a peer."""

KEY_NBYTES = 8


class RowKeys(DeviceObject):
    """The rows of this block. Participants of every method: the first WORKERS threads."""

    def __init__(
        self, staging: Staging, tensors: tuple, scalars: tuple, dtype: str, pack: int
    ) -> None:
        self.staging = staging
        self.lane = staging.lane
        self.dtype = dtype
        self.pack = pack
        self.logits, self.ids = tensors
        rows, per_block = Int32(scalars[0]), Int32(scalars[1])
        self.first = num.minimum(self.lane.block * per_block, rows)
        self.last = num.minimum(self.first + per_block, rows)
        self.stride = scalars[2]
        self.packs = Int32(scalars[3])
        self.width = Int32(scalars[4])
        area = cute.arch.alloc_smem(Uint64, WORKERS // WARP, 16)
        self.keys = prim.shared_address(area)

    @cute.jit
    def best(self, row: Int32) -> Uint64:
        """Return the key of the own part of a row, in every thread."""
        per_pack = self.pack // (4 if self.dtype == "float32" else 2)
        begin = self.lane.rank * self.width
        key = Uint64(0)
        for item in cutlass.range(self.lane.thread, self.packs, WORKERS, unroll=1):
            address = self.logits + num.wide(row) * self.stride + num.wide(item) * self.pack
            numbers = dtypes.unpack(prim.load_pack(address, Uint32(1), self.pack), self.dtype)
            for place in cutlass.range_constexpr(per_pack):
                number = numbers[place]
                image = num.select(number == number, image_of(number + Float32(0.0)), Uint32(0))
                token = begin + item * Int32(per_pack) + Int32(place)
                key = num.maximum(key, (Uint64(image) << Uint64(32)) | Uint64(~Uint32(token)))
        key = _largest_of_warp(key, WARP)
        address = self.keys + cute.arch.warp_idx() * Int32(KEY_NBYTES)  # by a shuffle: all lanes
        if self.lane.lane == Int32(0):
            prim.store_shared_u64(address, key)
        sync_workers()
        for warp in cutlass.range_constexpr(WORKERS // WARP):
            key = num.maximum(key, prim.load_shared_u64(self.keys + Int32(KEY_NBYTES * warp)))
        sync_workers()  # before the next row's keys
        return key

    @cute.jit
    def stage(self) -> None:
        """Put the keys of the block's rows."""
        for row in cutlass.range(self.first, self.last, unroll=1):
            low, high = _words(self.best(row))
            if self.lane.thread < Int32(SENDERS):
                offset = num.wide(row) * KEY_NBYTES
                self.staging.put(offset, (low,), 4, self.lane.thread, SENDERS)
                self.staging.put(offset + Int64(4), (high,), 4, self.lane.thread, SENDERS)

    @cute.jit
    def collect(self) -> None:
        """Write the ids of the block's rows. Requires: `exchange` returned 1."""
        lane = self.lane
        peer = num.minimum(lane.lane, lane.world_size - Int32(1))
        if cute.arch.warp_idx() == Int32(0):
            for row in cutlass.range(self.first, self.last, unroll=1):
                address = self.staging.source(peer) + num.wide(row) * KEY_NBYTES
                self._write(row, prim.load_peer_u64(address), Uint32(1), Uint32(1))

    @cute.jit
    def send(self) -> None:
        """Push the keys of the block's rows as tagged units, the own one to the mirror."""
        lane = self.lane
        for row in cutlass.range(self.first, self.last, unroll=1):
            words = _words(self.best(row))
            step = lane.thread + Int32(1)
            enabled = Uint32(step <= lane.world_size) & lane.ok
            ahead = num.minimum(step, lane.world_size)
            peer = lane.peer_of_lane(lane.wrap(lane.rank + ahead))
            slab = num.select(ahead == lane.world_size, lane.mirror, peer)
            prim.store_unit(slab + self._unit(lane.rank, row), words, lane.epoch, enabled)

    def _unit(self, writer: Int32, row: Int32) -> Int64:
        lane = self.lane
        segment = lane.slot_offset + num.wide(writer) * lane.segment_nbytes
        return segment + num.wide(row) * 16

    @cute.jit
    def collect_units(self, ok: Uint32) -> Wait:
        """Await the keys of the block's rows, a lane per rank, and write the ids.

        Concludes the launch in the first turn, rows or none. Returns how the waits ended.
        """
        lane = self.lane
        peer = num.minimum(lane.lane, lane.world_size - Int32(1))
        base = num.select(peer == lane.rank, lane.mirror, lane.own)
        watching = Uint32(lane.thread < lane.world_size)
        turns = num.maximum(self.last - self.first, Int32(1))
        late = no_wait()
        for turn in cutlass.range(turns, unroll=1):
            row = self.first + turn
            there = ok & Uint32(row < self.last)
            words, wait = await_unit(lane, base + self._unit(peer, row), peer, there & watching)
            late = merge_waits(late, wait)
            key = (Uint64(words[1]) << Uint64(32)) | Uint64(words[0])
            if turn == Int32(0):
                ok = lane.conclude(ok, late)
            good = there & ok & prim.warp_all(late.code == Uint32(0))
            writing = Uint32((lane.thread < Int32(WARP)) & (row < self.last))
            self._write(row, key, good, writing)
        return late

    @cute.jit
    def _write(self, row: Int32, key: Uint64, good: Uint32, enabled: Uint32) -> None:
        """Write the best of the lanes' keys, or 0 if they are not `good`. By whole warps."""
        key = _largest_of_warp(key, SENDERS)
        if self.lane.lane == Int32(0) and enabled != Uint32(0):
            token = num.select(good != Uint32(0), ~Uint32(key), Uint32(0))
            prim.store_u64(self.ids + num.wide(row) * 8, Uint64(token))


def _words(key: Uint64) -> tuple[Uint32, Uint32]:
    return Uint32(key), Uint32(key >> Uint64(32))


def _largest_of_warp(key: Uint64, width: int) -> Uint64:
    """Return the largest key of each `width` lanes, in all of them."""
    step = width // 2
    while step:
        low, high = (cute.arch.shuffle_sync_bfly(word, step) for word in _words(key))
        key = num.maximum(key, (Uint64(high) << Uint64(32)) | Uint64(low))
        step //= 2
    return key


def argmax_kernel(dtype: str, *, protocol: str, pack: int, threads: int) -> Any:
    """Return the kernel. Its scalars: see VocabArgmax.plan."""
    if protocol == "tagged":
        return _tagged_kernel(dtype, pack, threads)

    @cute.kernel
    def argmax(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads)
        rows = RowKeys(Staging(lane, protocol == "push"), tensors, scalars, dtype, pack)
        lane.enter()
        if lane.ok != Uint32(0) and lane.thread < Int32(WORKERS):
            rows.stage()
        ok = lane.exchange(lane.ok)
        if ok != Uint32(0):
            if lane.thread < Int32(WORKERS):
                rows.collect()
        else:
            clear_ids(lane, rows.ids, rows.first, rows.last, 8)

    return argmax


def _tagged_kernel(dtype: str, pack: int, threads: int) -> Any:
    @cute.kernel
    def argmax_tagged(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads, tagged=True)
        rows = RowKeys(Staging(lane, True), tensors, scalars, dtype, pack)
        lane.enter()
        late = no_wait()
        if lane.thread >= Int32(WORKERS):
            late = lane.watch_flags(Int32(0))
        else:
            rows.send()
            late = rows.collect_units(lane.ok)
        lane.leave(late)

    return argmax_tagged

"""Kernels for the routers whose rows are selected as a whole, see router_rows.py.

Message flow on a router block of the fused kernel (the first `router_blocks` of the grid):

    stage the own logits of the block's rows     8-byte units, a row padded to whole ones
    exchange, or the announcement of tagged push
    put each row's logits into shared memory     peers' from the slot, the own ones from the input
    select                                       weights and ids

The other blocks gather the down rows exactly as all_gather does. Order of a segment: logits of row
0, row 1, ..., then the down rows. Bytes on the wire per rank, row and peer: 4 per owned expert,
rounded up to 8 in all, twice that with tags, plus the down shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ..layout import STAGED_ALIGNMENT
from . import primitives as prim
from . import scalars as num
from .all_gather import Columns
from .fused_launch import fused_launch
from .protocol import DeviceObject, Lane, LaneArgs, Staging, Wait, merge_waits, no_wait
from .router_kernels import WORKERS, sync_workers
from .router_rows import RowSelector
from .router_spec import RouterSpec
from .tagged import await_unit
from .uneven_columns import UnevenColumns

UNIT_SHIFT = 3
WORKER_SHIFT = WORKERS.bit_length() - 1


def row_router_kernel(spec: RouterSpec, threads: int) -> Any:
    """Return the stand-alone kernel: one block per row. Its scalars: row stride in bytes."""
    assert threads == WORKERS

    @cute.kernel
    def select_rows(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        prim.follow_predecessor()
        logits, weights, ids = tensors[0], tensors[-2], tensors[-1]
        row = num.wide(cute.arch.block_idx()[0])
        selector = RowSelector(spec)
        biases = selector.fetch_biases(tensors[1], Uint32(1)) if spec.bias else ()
        places = selector.places()
        values = [
            prim.load_f32(logits + row * scalars[0] + num.wide(expert) * 4, Uint32(inside))
            for expert, inside in places
        ]
        selector.keep_biases(biases)
        selector.clear()
        for i in cutlass.range_constexpr(len(places)):
            expert, inside = places[i]
            selector.keep(expert, num.float_bits(values[i]), inside)
        sync_workers()
        offset = row * (spec.top_k * 4)
        selector.select(weights + offset, ids + offset, Uint32(1))

    return select_rows


@dataclass(frozen=True)
class GatheredRows:
    """The router's part of a launch, and of it what one block does.

    Attributes:
        logits, stride: Of the own shard; the stride in bytes.
        experts: Owned by each rank; divisor: of it, see layout.divisor.
        units: 8-byte units of a staged row; units_divisor: of them.
        peer_shift: The smallest number of bits that hold world_size - 2, for the tagged form.
    """

    logits: Int64
    stride: Int64
    biases: Int64
    weights: Int64
    ids: Int64
    first_row: Int32
    last_row: Int32
    experts: Int32
    units: Int32
    units_divisor: Int64
    peer_shift: Int32

    def count(self, rank: Int32) -> Int32:
        """Return how many experts a rank owns."""
        return self.experts

    def first(self, rank: Int32) -> Int32:
        """Return a rank's first expert."""
        return rank * self.experts

    def there(self, local: Int32, rank: Int32, enabled: Uint32) -> Uint32:
        """Return `enabled`, or 0 for the first half of a unit that a rank has no expert for."""
        return enabled


@dataclass(frozen=True)
class UnevenRows(GatheredRows):
    """The same where the first `extra` ranks own an expert more than `experts`."""

    extra: Int32

    def count(self, rank: Int32) -> Int32:
        """Return how many experts a rank owns."""
        return self.experts + num.select(rank < self.extra, Int32(1), Int32(0))

    def first(self, rank: Int32) -> Int32:
        """Return a rank's first expert."""
        return rank * self.experts + num.minimum(rank, self.extra)

    def there(self, local: Int32, rank: Int32, enabled: Uint32) -> Uint32:
        """Return `enabled`, or 0 where a rank has no expert of this number."""
        return enabled & Uint32(local < self.count(rank))


class GatheredRouter(DeviceObject):
    """A router block. Participants of every method: workers."""

    def __init__(
        self, staging: Staging, rows: GatheredRows, spec: RouterSpec, tagged: bool = False
    ) -> None:
        self.staging = staging
        self.lane = staging.lane
        self.tagged = tagged
        self.rows = rows
        self.spec = spec
        self.selector = RowSelector(spec)

    def prefetch(self) -> tuple:
        """Load the biases if the block has rows, for `contribute`."""
        if not self.spec.bias:
            return ()
        working = self.lane.thread < Int32(WORKERS)
        wanted = Uint32(working & (self.rows.first_row < self.rows.last_row))
        return self.selector.fetch_biases(self.rows.biases, wanted)

    def contribute(self, biases: tuple) -> None:
        """Give peers the own logits of the block's rows. `biases` are of `prefetch`."""
        self.selector.keep_biases(biases)
        if self.tagged:
            self._send()
        else:
            self._stage()

    def _load_own(self, row: Int32, unit: Int32, enabled: Uint32) -> tuple:
        """Return two of the own logits of a row; the second one is 0 behind the last expert."""
        rows = self.rows
        local = unit << Int32(1)
        address = rows.logits + num.wide(row) * rows.stride + num.wide(local) * 4
        rank = self.lane.rank
        second = enabled & Uint32(local + Int32(1) < rows.count(rank))
        (low,) = prim.load_pack(address, rows.there(local, rank, enabled), 4)
        (high,) = prim.load_pack(address + Int64(4), second, 4)
        return low, high

    @cute.jit
    def _stage(self) -> None:
        """Put the own logits of the block's rows, for the peers."""
        rows = self.rows
        first = rows.first_row * rows.units
        last = rows.last_row * rows.units
        for unit in cutlass.range(first + self.lane.thread, last, WORKERS, unroll=1):
            row = num.quotient(unit, rows.units_divisor)
            words = self._load_own(row, unit - row * rows.units, Uint32(1))
            offset = num.wide(unit) << Int64(UNIT_SHIFT)
            self.staging.put(offset, (words[0],), 4, own=False)
            self.staging.put(offset + Int64(4), (words[1],), 4, own=False)

    @cute.jit
    def _send(self) -> None:
        """Push the own logits of the block's rows as tagged units, some threads for each peer."""
        rows, lane = self.rows, self.lane
        share = Int32(WORKER_SHIFT) - rows.peer_shift
        step = (lane.thread >> share) + Int32(1)
        place = lane.thread & ((Int32(1) << share) - Int32(1))
        there = Uint32(step < lane.world_size) & lane.ok
        peer = lane.wrap(lane.rank + num.minimum(step, lane.world_size - Int32(1)))
        slab = lane.peer(peer)
        first = rows.first_row * rows.units
        last = rows.last_row * rows.units
        for unit in cutlass.range(first + place, last, Int32(1) << share, unroll=1):
            row = num.quotient(unit, rows.units_divisor)
            words = self._load_own(row, unit - row * rows.units, there)
            prim.store_unit(slab + self._unit_offset(lane.rank, unit), words, lane.epoch, there)

    def _unit_offset(self, writer: Int32, unit: Int32) -> Int64:
        lane = self.lane
        segment = lane.slot_offset + num.wide(writer) * lane.segment_nbytes
        return segment + num.wide(unit) * 16

    @cute.jit
    def _keep(self, peer: Int32, unit: Int32, words: tuple, inside: Uint32) -> None:
        """Store the two logits of a peer's unit in shared memory."""
        local = unit << Int32(1)
        expert = self.rows.first(peer) + local
        there = self.rows.there(local, peer, inside) != Uint32(0)
        self.selector.keep(expert, words[0], there)
        paired = there & (local + Int32(1) < self.rows.count(peer))
        self.selector.keep(expert + Int32(1), words[1], paired)

    def _place(self, flat: Int32) -> tuple:
        """Return peer and unit of the `flat`-th unit of a gathered row, and 1 or 0 for inside."""
        rows, lane = self.rows, self.lane
        peer = num.quotient(flat, rows.units_divisor)
        inside = Uint32(peer < lane.world_size)
        peer = num.minimum(peer, lane.world_size - Int32(1))
        return peer, flat - num.quotient(flat, rows.units_divisor) * rows.units, inside

    def collect(self, ok: Uint32) -> Wait:
        """Select the block's rows. Returns how the waits ended.

        Requires: `exchange` returned `ok`, or, with tags: this concludes the launch before the
        first row is written.
        """
        if self.tagged:
            return self._collect_units(ok)
        self._collect_staged()
        return no_wait()

    @cute.jit
    def _collect_staged(self) -> None:
        rows, lane = self.rows, self.lane
        total = rows.units * lane.world_size
        for row in cutlass.range(rows.first_row, rows.last_row, unroll=1):
            self.selector.clear()
            for begin in cutlass.range(0, total, WORKERS, unroll=1):
                peer, unit, inside = self._place(begin + lane.thread)
                own = inside & Uint32(peer == lane.rank)
                words = self._load_own(row, unit, own)
                index = row * rows.units + unit
                address = self.staging.source(peer) + (num.wide(index) << Int64(UNIT_SHIFT))
                others = inside & ~own
                (low,) = prim.load_peer_pack(address, others, 4)
                (high,) = prim.load_peer_pack(address + Int64(4), others, 4)
                self._keep(peer, unit, (words[0] | low, words[1] | high), inside)
            sync_workers()
            self._select(row, Uint32(1))

    @cute.jit
    def _collect_units(self, ok: Uint32) -> Wait:
        """Await the units of the block's rows, and select. Returns how the waits ended.

        Concludes the launch before the first row is written, that is when every peer's flag has
        been seen. A block without rows does that, too.
        """
        rows, lane = self.rows, self.lane
        total = rows.units * lane.world_size
        turns = num.maximum(rows.last_row - rows.first_row, Int32(1))
        late = no_wait()
        for turn in cutlass.range(turns, unroll=1):
            row = rows.first_row + turn
            wanted = Uint32(row < rows.last_row)
            there = ok & wanted
            self.selector.clear()
            for begin in cutlass.range(0, total, WORKERS, unroll=1):
                peer, unit, inside = self._place(begin + lane.thread)
                inside = inside & there
                own = inside & Uint32(peer == lane.rank)
                words = self._load_own(row, unit, own)
                address = lane.own + self._unit_offset(peer, row * rows.units + unit)
                (low, high), wait = await_unit(lane, address, peer, inside & ~own)
                late = merge_waits(late, wait)
                self._keep(peer, unit, (words[0] | low, words[1] | high), inside)
            if turn == Int32(0):
                ok = lane.conclude(ok, late)
            else:
                sync_workers()
            self._select(row, wanted)
        return late

    def _select(self, row: Int32, enabled: Uint32) -> None:
        offset = num.wide(row) * (self.spec.top_k * 4)
        self.selector.select(self.rows.weights + offset, self.rows.ids + offset, enabled)


def gathered_kernel(
    spec: RouterSpec, *, protocol: str, pack: int, threads: int, uneven: bool = False
) -> Any:
    """Return the kernel of all_gather_pair_topk for routers that need whole rows.

    Its scalars: rows, router blocks, policy.pace of the gather's blocks, rows per router block,
    owned experts, units of a staged row, the same as a divisor, peer shift, router row stride in
    bytes; of uneven shards, how many ranks own one expert more; then those of the down row, see
    columns.column_scalars and uneven.uneven_scalars.
    """
    split = partial(split_tensors, uneven=uneven)
    return fused_launch(GatheredRouter, split, spec, protocol=protocol, pack=pack, threads=threads)


def split_tensors(
    lane: Lane, spec: RouterSpec, tensors: tuple, scalars: tuple, uneven: bool
) -> tuple[GatheredRows, Columns]:
    """Return the two halves of a launch's arguments."""
    down, logits = tensors[:2]
    down_out, weights, ids = tensors[-3:]
    rows, rows_per_block = Int32(scalars[0]), Int32(scalars[3])
    units = Int32(scalars[5])
    first_row = num.minimum(lane.block * rows_per_block, rows)
    more = {"extra": Int32(scalars[9])} if uneven else {}
    router = (UnevenRows if uneven else GatheredRows)(
        **more,
        logits=logits,
        stride=scalars[8],
        biases=tensors[2] if spec.bias else Int64(0),
        weights=weights,
        ids=ids,
        first_row=first_row,
        last_row=num.minimum(first_row + rows_per_block, rows),
        experts=Int32(scalars[4]),
        units=units,
        units_divisor=scalars[6],
        peer_shift=Int32(scalars[7]),
    )
    staged = rows * units << Int32(UNIT_SHIFT)
    aligned = (staged + Int32(STAGED_ALIGNMENT - 1)) & Int32(-STAGED_ALIGNMENT)
    kind, begin = (UnevenColumns, 10) if uneven else (Columns, 9)
    columns = kind.of(lane, rows, num.wide(aligned), down, down_out, scalars[begin:])
    return router, columns

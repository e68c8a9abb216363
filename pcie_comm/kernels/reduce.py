"""Reductions of rows: what all_reduce, reduce_scatter and their relatives do to bytes.

Every rank holds [rows, w] and wants the sum over ranks: of all columns, or of the columns that it
owns. Numbers are added in fp32 in the order of ranks, 0 first, and rounded once, so the result does
not depend on timing, protocol or grid, and is the same bytes wherever it is computed.

    stage     the own rows for every peer, or for each peer the columns that it owns
    exchange
    collect   a pack of every rank, in rank order, the own one from the input; add; write

A part is what one rank sends to one peer; its staged form is dense, as in all_gather. Bytes on the
wire per rank and peer: the part.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from . import dtypes
from . import primitives as prim
from . import scalars as num
from .all_gather import Columns
from .protocol import WARP, DeviceObject, Lane, Staging, Wait, merge_waits, no_wait
from .tagged import await_unit

IN_FLIGHT = 4
"""Ranks whose packs a thread loads before it adds the first."""

NOTHING = -0.0
"""Added to any number, it changes nothing, not even the sign of a zero."""


class Slices(DeviceObject):
    """The parts of one tensor, in `pack`-byte items, and of them the chunk of this block.

    Args:
        staging: The launch, and its protocol.
        columns: A part: row size, stride of the input's rows, the output, dense.
        dtype: Of the numbers.
        scatter: Whether each rank gets columns of its own; `row_nbytes` counts these then.
        apart: How far columns of two owners are apart in the input, in bytes, if scattered.
        pack: Bytes of an item; every address, stride and `row_nbytes` is a multiple of it.
    """

    def __init__(
        self,
        staging: Staging,
        columns: Columns,
        dtype: str,
        *,
        scatter: bool,
        pack: int,
        apart: Int64 | int = 0,
    ) -> None:
        self.apart = apart
        self.staging = staging
        self.lane = staging.lane
        self.columns = columns
        self.dtype = dtype
        self.scatter = scatter
        self.pack = pack
        shift = Int32(pack.bit_length() - 1)
        begin = num.minimum(self.lane.block * columns.chunk, columns.nbytes)
        end = num.minimum(begin + columns.chunk, columns.nbytes)
        self.first = begin >> shift
        self.count = (end >> shift) - self.first
        self.chunk = columns.chunk >> shift
        self.part = (columns.nbytes + Int32(63)) & Int32(-64)

    def source(self, owner: Int32, index: Int32) -> Int64:
        """Return where an item for `owner` lies in the own input."""
        columns = self.columns
        row, column = columns.split(index * Int32(self.pack))
        source = columns.source + num.wide(row) * columns.source_stride + num.wide(column)
        return source + num.wide(owner) * self.apart if self.scatter else source

    def load_own(self, owner: Int32, index: Int32, enabled: Uint32) -> tuple:
        """Load an item of the own input."""
        return prim.load_pack(self.source(owner, index), enabled, self.pack)

    @cute.jit
    def stage(self) -> None:
        """Put this block's chunk of every part. Participants: every thread of the block."""
        lane = self.lane
        if cutlass.const_expr(self.scatter):
            total = self.chunk * (lane.world_size - Int32(1))
            for flat in cutlass.range(lane.thread, total, lane.threads, unroll=1):
                ahead = num.quotient(flat, self.columns.chunk_divisor)
                local = flat - ahead * self.chunk
                enabled = Uint32(local < self.count)
                peer = lane.wrap(lane.rank + ahead + Int32(1))
                index = self.first + local
                words = self.load_own(peer, index, enabled)
                prim.store_pack(self._put_address(peer, index), words, enabled, self.pack)
        else:
            for local in cutlass.range(lane.thread, self.count, lane.threads, unroll=1):
                index = self.first + local
                words = self.load_own(lane.rank, index, Uint32(1))
                offset = self.columns.staged + num.wide(index) * self.pack
                self.staging.put(offset, words, self.pack, own=False)

    def _put_address(self, peer: Int32, index: Int32) -> Int64:
        lane = self.lane
        offset = lane.slot_offset + self.columns.staged + num.wide(index) * self.pack
        if self.staging.push:
            return lane.peer(peer) + offset + num.wide(lane.rank) * lane.segment_nbytes
        return lane.own + offset + num.wide(peer * self.part)

    def fetch(self, rank: Int32, index: Int32, enabled: Uint32) -> list:
        """Return the numbers of a rank's item for this one, the own ones from the input.

        Requires: `exchange` returned 1. Numbers of a disabled item: NOTHING.
        """
        lane = self.lane
        inside = enabled & Uint32(rank < lane.world_size)
        rank = num.minimum(rank, lane.world_size - Int32(1))
        own = inside & Uint32(rank == lane.rank)
        address = self.staging.source(rank) + self.columns.staged + num.wide(index) * self.pack
        if self.scatter and not self.staging.push:
            address += num.wide(lane.rank * self.part)
        words = prim.load_peer_pack(address, inside & ~own, self.pack)
        mine = self.load_own(lane.rank, index, own)
        words = tuple(a | b for a, b in zip(words, mine, strict=True))
        return _or_nothing(dtypes.unpack(words, self.dtype), inside)

    def nothing(self) -> tuple:
        """Return the sum of no items."""
        count = self.pack // (4 if self.dtype == "float32" else 2)
        return tuple(Float32(NOTHING) for _ in range(count))

    @cute.jit
    def total(self, index: Int32) -> tuple:
        """Return the sum of an item over all ranks, in fp32."""
        lane = self.lane
        sums = self.nothing()
        for base in cutlass.range(0, lane.world_size, IN_FLIGHT, unroll=1):
            items = []
            for step in cutlass.range_constexpr(IN_FLIGHT):
                items.append(self.fetch(base + Int32(step), index, Uint32(1)))
            for step in cutlass.range_constexpr(IN_FLIGHT):
                sums = tuple(a + b for a, b in zip(sums, items[step], strict=True))
        return sums

    @cute.jit
    def collect(self) -> None:
        """Add up this block's chunk and write it to the output."""
        lane = self.lane
        for local in cutlass.range(lane.thread, self.count, lane.threads, unroll=1):
            index = self.first + local
            sums = self.total(index)
            self.write(index, sums, Uint32(1))

    def write(self, index: Int32, values: tuple, enabled: Uint32) -> None:
        """Round an item and write it to the output, which is dense."""
        address = self.columns.output + num.wide(index) * self.pack
        words = dtypes.pack(list(values), self.dtype)
        prim.store_pack(address, words, enabled, self.pack)


class TaggedSlices(Slices):
    """The same with units of 8 bytes. Participants: all but the last warp of the block.

    Args:
        loads: Bytes per load of the input and store of the output: 8, or 4 where no more is sure.
    """

    def __init__(
        self,
        lane: Lane,
        columns: Columns,
        dtype: str,
        *,
        scatter: bool,
        loads: int,
        apart: Int64 | int,
    ) -> None:
        staging = Staging(lane, True)
        super().__init__(staging, columns, dtype, scatter=scatter, pack=8, apart=apart)
        self.loads = loads
        self.workers = lane.threads - WARP

    def load_own(self, owner: Int32, index: Int32, enabled: Uint32) -> tuple:
        """Load an item of the own input."""
        source = self.source(owner, index)
        if self.loads == 8:
            return prim.load_v2(source, enabled)
        (low,) = prim.load_pack(source, enabled, 4)
        (high,) = prim.load_pack(source + Int64(4), enabled, 4)
        return low, high

    def _unit(self, slab: Int64, writer: Int32, index: Int32) -> Int64:
        lane = self.lane
        segment = lane.slot_offset + num.wide(writer) * lane.segment_nbytes
        return slab + segment + self.columns.staged * 2 + num.wide(index) * 16

    @cute.jit
    def send(self) -> None:
        """Push this block's chunk of every part, peer by peer."""
        lane = self.lane
        total = self.chunk * (lane.world_size - Int32(1))
        for flat in cutlass.range(lane.thread, total, self.workers, unroll=1):
            ahead = num.quotient(flat, self.columns.chunk_divisor)
            local = flat - ahead * self.chunk
            enabled = Uint32(local < self.count) & lane.ok
            peer = lane.wrap(lane.rank + ahead + Int32(1))
            index = self.first + local
            words = self.load_own(peer, index, enabled)
            address = self._unit(lane.peer(peer), lane.rank, index)
            prim.store_unit(address, words, lane.epoch, enabled)

    @cute.jit
    def collect_units(self, ok: Uint32) -> Wait:
        """Add up this block's chunk, unit by unit as ranks follow one another.

        Concludes the launch before the first sum is written: the first turn does it. Returns how
        the waits ended.
        """
        lane = self.lane
        last = num.maximum(self.count, Int32(1))
        late = no_wait()
        for begin in cutlass.range(0, last, self.workers, unroll=1):
            local = begin + lane.thread
            enabled = ok & Uint32(local < self.count)
            index = self.first + local
            sums = self.nothing()
            for rank in cutlass.range(lane.world_size, unroll=1):
                own = enabled & Uint32(rank == lane.rank)
                mine = self.load_own(lane.rank, index, own)
                address = self._unit(lane.own, rank, index)
                words, wait = await_unit(lane, address, rank, enabled & ~own)
                late = merge_waits(late, wait)
                words = tuple(a | b for a, b in zip(words, mine, strict=True))
                item = dtypes.unpack(words, self.dtype)
                sums = tuple(a + b for a, b in zip(sums, item, strict=True))
            if begin == Int32(0):
                ok = lane.conclude(ok, late)
            address = self.columns.output + num.wide(index) * 8
            words = dtypes.pack(list(sums), self.dtype)
            enabled = enabled & ok & Uint32(late.code == Uint32(0))
            if cutlass.const_expr(self.loads == 8):
                prim.store_v2(address, words, enabled)
            else:
                prim.store_pack(address, (words[0],), enabled, 4)
                prim.store_pack(address + Int64(4), (words[1],), enabled, 4)
        return late


def _or_nothing(values: list, enabled: Uint32) -> list:
    return [num.select(enabled != Uint32(0), value, Float32(NOTHING)) for value in values]

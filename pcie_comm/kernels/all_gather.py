"""Column gather of one tensor: the byte mover of all_gather_pair, all_gather_heads and Kimi's op.

Every rank holds [rows, w] and wants [rows, world_size * w], rank-major. Only bytes move: the
kernel knows row sizes and strides, no dtype.

A tensor's staged form is dense: row r at byte r * row_nbytes. Blocks split it into equal chunks of
whole 16-byte units, so the split does not depend on the pack width a rank uses: ranks whose
tensors are aligned differently still exchange the same bytes between the same blocks.

Bytes on the wire per rank: push rows * row_nbytes to each peer; pull the same, fetched by each.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ..layout import PACK_NBYTES
from . import primitives as prim
from .protocol import DeviceObject, Staging

IN_FLIGHT = 4
"""Loads a thread issues before its first store; hides one trip behind another."""


@dataclass(frozen=True)
class Columns:
    """One gathered tensor: addresses and sizes, strides in bytes, `staged` its segment offset."""

    source: Int64
    source_stride: Int64
    output: Int64
    output_stride: Int32
    row_nbytes: Int32
    rows: Int32
    staged: Int64


class ColumnPart(DeviceObject):
    """The chunk of a staged tensor that block `part` of `parts` moves, in items of `item` bytes.

    Attributes:
        first, count: The chunk's items.
        nbytes: Of the whole staged tensor.
    """

    def __init__(self, columns: Columns, part: Int32, parts: Int32, item: int) -> None:
        self.row_nbytes = columns.row_nbytes
        self.nbytes = columns.rows * columns.row_nbytes
        units = (self.nbytes + Int32(PACK_NBYTES - 1)) >> Int32(4)
        chunk = prim.divide(units + parts - Int32(1), parts) * Int32(PACK_NBYTES)
        shift = Int32(item.bit_length() - 1)
        begin = prim.minimum(part * chunk, self.nbytes) + Int32(item - 1)
        end = prim.minimum((part + Int32(1)) * chunk, self.nbytes) + Int32(item - 1)
        self.first = begin >> shift
        self.count = (end >> shift) - self.first

    def split(self, byte: Int32) -> tuple[Int32, Int32]:
        """Return row, and byte within the row, of a byte of the staged form."""
        row = prim.divide(byte, self.row_nbytes)
        return row, byte - row * self.row_nbytes


class ColumnGather(DeviceObject):
    """Moves one tensor through a channel, in `pack`-byte units, by `part` of `parts` blocks.

    Requires: every address, stride and `row_nbytes` is a multiple of `pack`.
    """

    def __init__(
        self, staging: Staging, columns: Columns, part: Int32, parts: Int32, pack: int
    ) -> None:
        self.staging = staging
        self.columns = columns
        self.pack = pack
        self.part = ColumnPart(columns, part, parts, pack)
        self.first = self.part.first
        self.count = self.part.count

    def _split(self, index: Int32) -> tuple[Int32, Int32]:
        """Return row, and byte within the row, of pack `index`."""
        return self.part.split(index * Int32(self.pack))

    @cute.jit
    def stage(self) -> None:
        """Put this block's chunk of the own shard. Participants: every thread of the block."""
        lane = self.staging.lane
        columns = self.columns
        for local in cutlass.range(lane.thread, self.count, lane.threads, unroll=1):
            index = self.first + local
            row, column = self._split(index)
            address = columns.source + Int64(row) * columns.source_stride + Int64(column)
            words = prim.load_pack(address, Uint32(1), self.pack)
            offset = columns.staged + Int64(index) * self.pack
            self.staging.put(offset, words, self.pack)

    @cute.jit
    def collect(self) -> None:
        """Write this block's chunk of every rank's shard to the output.

        Participants: every thread of the block. Requires: `exchange` returned 1.
        """
        lane = self.staging.lane
        total = self.count * lane.world_size
        for begin in cutlass.range(lane.thread, total, lane.threads * IN_FLIGHT, unroll=1):
            packs = []
            for step in cutlass.range_constexpr(IN_FLIGHT):
                flat = begin + Int32(step * lane.threads)
                enabled = Uint32(flat < total)
                peer = prim.divide(flat, self.count)
                index = self.first + flat - peer * self.count
                source = self.staging.source(prim.minimum(peer, lane.world_size - Int32(1)))
                address = source + self.columns.staged + Int64(index) * self.pack
                words = prim.load_peer_pack(address, enabled, self.pack)
                packs.append((self._output(peer, index), words, enabled))
            for step in cutlass.range_constexpr(IN_FLIGHT):
                address, words, enabled = packs[step]
                prim.store_pack(address, words, enabled, self.pack)

    def _output(self, peer: Int32, index: Int32) -> Int64:
        row, column = self._split(index)
        columns = self.columns
        return (
            columns.output
            + Int64(row) * Int64(columns.output_stride)
            + Int64(peer * columns.row_nbytes + column)
        )

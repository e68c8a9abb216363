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
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from . import primitives as prim
from . import scalars as num
from .protocol import DeviceObject, Lane, Staging

IN_FLIGHT = 4
"""Loads a thread issues before its first store; hides one trip behind another."""


@dataclass(frozen=True)
class Columns:
    """One gathered tensor: addresses and sizes, strides in bytes, `staged` its segment offset.

    `chunk` is what one block moves of the staged form, whole 16-byte units. The divisors are
    those of layout.divisor: of the row size, and of the items in a chunk.
    """

    source: Int64
    source_stride: Int64
    output: Int64
    output_stride: Int32
    row_nbytes: Int32
    row_divisor: Int64
    chunk: Int32
    chunk_divisor: Int64
    nbytes: Int32
    staged: Int64

    NUM_SCALARS = 5

    @classmethod
    def of(
        cls, lane: Lane, rows: Int32, staged: Int64, source: Int64, output: Int64, scalars: tuple
    ) -> Columns:
        """Return the tensor that plan scalars describe, see columns.column_scalars."""
        row_nbytes = Int32(scalars[0])
        of_output = cls.output_fields(lane, row_nbytes, scalars[5:])
        return cls(
            source=source,
            source_stride=scalars[1],
            output=output,
            row_nbytes=row_nbytes,
            row_divisor=scalars[2],
            chunk=Int32(scalars[3]),
            chunk_divisor=scalars[4],
            nbytes=rows * row_nbytes,
            staged=staged,
            **of_output,
        )

    @classmethod
    def output_fields(cls, lane: Lane, row_nbytes: Int32, scalars: tuple) -> dict[str, Any]:
        """Return the fields that say where shards lie in the output."""
        return {"output_stride": row_nbytes * lane.world_size}

    def within(self, rank: Int32, column: Int32, enabled: Uint32) -> Uint32:
        """Return `enabled`, or 0 behind the end of a rank's row: here rows are all equally long."""
        return enabled

    def shard_offset(self, rank: Int32) -> Int64:
        """Return where a rank's shard begins in a row of the output."""
        return num.wide(rank) * num.wide(self.row_nbytes)

    def row_stride(self) -> Int64:
        """Return how far rows of the output are apart."""
        return num.wide(self.output_stride)

    def place(self, rank: Int32, row: Int32, column: Int32) -> Int64:
        """Return the address of a byte of a rank's shard in the output."""
        return (
            self.output
            + num.wide(row) * num.wide(self.output_stride)
            + num.wide(rank * self.row_nbytes + column)
        )

    def split(self, byte: Int32) -> tuple[Int32, Int32]:
        """Return row, and byte within the row, of a byte of the staged form."""
        row = num.quotient(byte, self.row_divisor)
        return row, byte - row * self.row_nbytes


class ColumnGather(DeviceObject):
    """Moves one tensor through a channel, in `pack`-byte items, the chunk of block `part`.

    Requires: every address, stride and `row_nbytes` is a multiple of `pack`.
    """

    def __init__(self, staging: Staging, columns: Columns, part: Int32, pack: int) -> None:
        self.staging = staging
        self.columns = columns
        self.pack = pack
        shift = Int32(pack.bit_length() - 1)
        begin = num.minimum(part * columns.chunk, columns.nbytes)
        end = num.minimum(begin + columns.chunk, columns.nbytes)
        self.first = begin >> shift
        self.count = (end >> shift) - self.first
        self.chunk = columns.chunk >> shift

    @cute.jit
    def stage(self) -> None:
        """Put this block's chunk of the own shard, and copy it to the own output.

        Participants: every thread of the block. What a rank gathers from itself takes no detour:
        in pinned host memory that would be two trips over the link.
        """
        lane = self.staging.lane
        columns = self.columns
        for local in cutlass.range(lane.thread, self.count, lane.threads, unroll=1):
            index = self.first + local
            row, column = columns.split(index * Int32(self.pack))
            address = columns.source + num.wide(row) * columns.source_stride + num.wide(column)
            enabled = columns.within(lane.rank, column, Uint32(1))
            words = prim.load_pack(address, enabled, self.pack)
            offset = columns.staged + num.wide(index) * self.pack
            self.staging.put(offset, words, self.pack, own=False)
            prim.store_pack(self._output(lane.rank, index), words, enabled, self.pack)

    @cute.jit
    def collect(self) -> None:
        """Write this block's chunk of every peer's shard to the output.

        Participants: every thread of the block. Requires: `exchange` returned 1.
        """
        lane = self.staging.lane
        total = self.chunk * (lane.world_size - Int32(1))
        for begin in cutlass.range(lane.thread, total, lane.threads * IN_FLIGHT, unroll=1):
            packs = []
            for step in cutlass.range_constexpr(IN_FLIGHT):
                flat = begin + Int32(step * lane.threads)
                ahead = num.quotient(flat, self.columns.chunk_divisor)
                local = flat - ahead * self.chunk
                enabled = Uint32((flat < total) & (local < self.count))
                ahead = num.minimum(ahead, lane.world_size - Int32(2))
                peer = lane.wrap(lane.rank + ahead + Int32(1))
                index = self.first + local
                address = (
                    self.staging.source(peer) + self.columns.staged + num.wide(index) * self.pack
                )
                enabled = self._within(peer, index, enabled)
                words = prim.load_peer_pack(address, enabled, self.pack)
                packs.append((self._output(peer, index), words, enabled))
            for step in cutlass.range_constexpr(IN_FLIGHT):
                address, words, enabled = packs[step]
                prim.store_pack(address, words, enabled, self.pack)

    def _within(self, peer: Int32, index: Int32, enabled: Uint32) -> Uint32:
        _, column = self.columns.split(index * Int32(self.pack))
        return self.columns.within(peer, column, enabled)

    def _output(self, peer: Int32, index: Int32) -> Int64:
        row, column = self.columns.split(index * Int32(self.pack))
        return self.columns.place(peer, row, column)

"""Device side of a gather whose ranks have rows of two lengths, or of which a part is moved.

Staged rows are as long as the longest ones. So blocks of all ranks split the same bytes, and
nothing is loaded, and nothing written to an output, where a shorter row has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64, Uint32

from . import scalars as num
from .all_gather import Columns
from .protocol import Lane


@dataclass(frozen=True)
class UnevenColumns(Columns):
    """A tensor whose rows are `row_nbytes` long on the first `extra` ranks, `lack` less on others.

    In an output's row shards are `rank_stride` apart, those of the first `extra` ranks `unit` more.
    `output_stride` has 64 bits here.
    """

    rank_stride: Int64
    extra: Int32
    unit: Int32
    lack: Int32

    NUM_SCALARS = 10

    @classmethod
    def output_fields(cls, lane: Lane, row_nbytes: Int32, scalars: Any) -> dict[str, Any]:
        """Return the fields that say where shards lie, by the scalars of uneven.uneven_scalars."""
        return {
            "output_stride": scalars[0],
            "rank_stride": scalars[1],
            "extra": Int32(scalars[2]),
            "unit": Int32(scalars[3]),
            "lack": Int32(scalars[4]),
        }

    def within(self, rank: Int32, column: Int32, enabled: Uint32) -> Uint32:
        """Return `enabled`, or 0 behind the end of a rank's row."""
        lack = num.select(rank < self.extra, Int32(0), self.lack)
        return enabled & Uint32(column < self.row_nbytes - lack)

    def shard_offset(self, rank: Int32) -> Int64:
        """Return where a rank's shard begins in a row of the output."""
        longer = num.wide(num.minimum(rank, self.extra)) * num.wide(self.unit)
        return num.wide(rank) * self.rank_stride + longer

    def row_stride(self) -> Int64:
        """Return how far rows of the output are apart."""
        return self.output_stride

    def place(self, rank: Int32, row: Int32, column: Int32) -> Int64:
        """Return the address of a byte of a rank's shard in the output."""
        begin = self.output + num.wide(row) * self.output_stride
        return begin + self.shard_offset(rank) + num.wide(column)

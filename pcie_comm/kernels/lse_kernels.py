"""The kernel of lse_reduce_scatter; the message flow is there."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute.math as cute_math
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..layout import STAGED_ALIGNMENT
from . import primitives as prim
from . import scalars as num
from .protocol import Lane, LaneArgs, Staging
from .reduce import Slices
from .reduce_kernels import part_of

IN_FLIGHT = 4
"""Ranks whose numbers a thread loads before it uses the first."""


class Heads(Slices):
    """The parts of the partial attention, and the log-sum-exp of their heads behind them.

    Args:
        lse: Of the own rank, [rows, heads].
        scalars: Row stride of `lse` in bytes; heads that a rank owns, and as a divisor; bytes of a
            head, and as a divisor; heads of a part that a block moves, and as a divisor;
            how far the heads of two owners are apart in a row.
    """

    def keep_lse(self, lse: Int64, scalars: tuple) -> None:
        """Take the arguments of the second tensor. Once, right after construction."""
        self.lse = lse
        self.lse_stride = scalars[0]
        self.heads, self.heads_divisor = Int32(scalars[1]), scalars[2]
        self.head_nbytes, self.head_divisor = Int32(scalars[3]), scalars[4]
        self.per_block, self.per_block_divisor = Int32(scalars[5]), scalars[6]
        self.heads_apart = Int32(scalars[7])
        self.behind = self.part
        count = num.quotient(self.columns.nbytes, self.head_divisor)
        lses = (count * Int32(4) + Int32(STAGED_ALIGNMENT - 1)) & Int32(-STAGED_ALIGNMENT)
        self.part = self.part + lses
        self.first_head = num.minimum(self.lane.block * self.per_block, count)
        self.last_head = num.minimum(self.first_head + self.per_block, count)

    def _own_lse(self, owner: Int32, head: Int32) -> Int64:
        """Return where the own log-sum-exp for a head of an owner's part lies."""
        row = num.quotient(head, self.heads_divisor)
        column = owner * self.heads_apart + head - row * self.heads
        return self.lse + num.wide(row) * self.lse_stride + num.wide(column) * 4

    @cute.jit
    def stage_lse(self) -> None:
        """Put the log-sum-exp of this block's heads. Participants: every thread of the block."""
        lane = self.lane
        total = self.per_block * (lane.world_size - Int32(1))
        for flat in cutlass.range(lane.thread, total, lane.threads, unroll=1):
            ahead = num.quotient(flat, self.per_block_divisor)
            head = self.first_head + flat - ahead * self.per_block
            enabled = Uint32(head < self.last_head)
            peer = lane.wrap(lane.rank + ahead + Int32(1))
            words = prim.load_pack(self._own_lse(peer, head), enabled, 4)
            offset = lane.slot_offset + num.wide(self.behind) + num.wide(head) * 4
            if cutlass.const_expr(self.staging.push):
                address = lane.peer(peer) + offset + num.wide(lane.rank) * lane.segment_nbytes
            else:
                address = lane.own + offset + num.wide(peer * self.part)
            prim.store_pack(address, words, enabled, 4)

    def _fetch_lse(self, rank: Int32, head: Int32) -> tuple[Float32, Uint32]:
        """Return a rank's log-sum-exp of a head, and 1 or 0 for finite."""
        lane = self.lane
        inside = Uint32(rank < lane.world_size)
        rank = num.minimum(rank, lane.world_size - Int32(1))
        own = inside & Uint32(rank == lane.rank)
        address = self.staging.source(rank) + num.wide(self.behind) + num.wide(head) * 4
        if not self.staging.push:
            address += num.wide(lane.rank * self.part)
        (theirs,) = prim.load_peer_pack(address, inside & ~own, 4)
        (mine,) = prim.load_pack(self._own_lse(lane.rank, head), own, 4)
        bits = theirs | mine
        finite = (bits & Uint32(0x7F800000)) != Uint32(0x7F800000)
        return num.bits_float(bits), inside & Uint32(finite)

    @cute.jit
    def _best(self, head: Int32) -> Float32:
        """Return the largest finite log-sum-exp of a head; 0 if there is none."""
        best = Float32(float("-inf"))
        for base in cutlass.range(0, self.lane.world_size, IN_FLIGHT, unroll=1):
            for step in cutlass.range_constexpr(IN_FLIGHT):
                lse, finite = self._fetch_lse(base + Int32(step), head)
                best = num.select((finite != Uint32(0)) & (lse > best), lse, best)
        return num.select(best > Float32(float("-inf")), best, Float32(0.0))

    @cute.jit
    def merge(self) -> None:
        """Merge this block's chunk and write it to the output. Requires: `exchange` returned 1."""
        lane = self.lane
        shift = Int32(self.pack.bit_length() - 1)
        for local in cutlass.range(lane.thread, self.count, lane.threads, unroll=1):
            index = self.first + local
            head = num.quotient(index << shift, self.head_divisor)
            best = self._best(head)
            sums = tuple(Float32(0.0) for _ in self.nothing())
            total = Float32(0.0)
            for base in cutlass.range(0, lane.world_size, IN_FLIGHT, unroll=1):
                items, weights = [], []
                for step in cutlass.range_constexpr(IN_FLIGHT):
                    lse, finite = self._fetch_lse(base + Int32(step), head)
                    weight = cute_math.exp(lse - best)
                    weights.append(num.select(finite != Uint32(0), weight, Float32(0.0)))
                    items.append(self.fetch(base + Int32(step), index, finite))
                for step in cutlass.range_constexpr(IN_FLIGHT):
                    weight = weights[step]
                    sums = tuple(a + weight * b for a, b in zip(sums, items[step], strict=True))
                    total = total + weight
            divisor = num.select(total > Float32(0.0), total, Float32(1.0))
            merged = tuple(one / divisor for one in sums)
            self.write(index, merged, Uint32(1))


def lse_kernel(dtype: str, *, push: bool, pack: int, threads: int) -> Any:
    """Return the kernel. Its scalars: as of reduce_kernel, then those of Heads."""

    @cute.kernel
    def merge_partials(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads)
        partial, lse, output = tensors
        columns = part_of(lane, partial, output, scalars)
        staging = Staging(lane, push)
        heads = Heads(staging, columns, dtype, scatter=True, pack=pack, apart=scalars[7])
        heads.keep_lse(lse, scalars[8:])
        lane.enter()
        if push:
            lane.await_turn(lane.block, Int32(scalars[1]))
        if lane.ok != Uint32(0):
            heads.stage()
            heads.stage_lse()
        ok = lane.exchange(lane.ok)
        if ok != Uint32(0):
            heads.merge()

    return merge_partials

"""Tagged push: payload and epoch travel in the same 8-byte element. No fence, no second trip.

A *unit* is 16 bytes, {4 data, epoch, 4 data, epoch}, stored as two 64-bit elements. The reader
polls the payload itself: a half whose tag is this launch's epoch is complete. Tags live in slots
of their own, where nothing but units is ever stored, so no payload can look like one, and any
payload bits are free. The epoch is never 0, which is what a fresh slab holds.

Which call a peer makes is told by its flag, as under push, but the flag publishes nothing: it
travels beside the payload. A block writes what peers sent only after it has seen every peer's flag
of the same call, so bytes of another call are never taken for its own. Its own shard it copies
while it waits.

Why a slot may be written again without a closing handshake: docs/protocol.md.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute

from . import primitives as prim
from .all_gather import ColumnPart, Columns
from .protocol import POLLS_PER_CHECK, DeviceObject, Lane, Wait, merge_waits

UNITS_AT_ONCE = 2
"""Units a thread polls together."""


@cute.jit
def await_units(lane: Lane, addresses: tuple, peers: tuple, enabled: tuple) -> tuple:
    """Wait until tagged units carry this epoch; return their data, and how the wait ended.

    Participants: any threads, each with its own units. Order: data and tag share an 8-byte
    element; nothing else becomes visible.

    Args:
        lane: The launch.
        addresses: Of the units, a fixed number of them.
        peers: Which rank sends each.
        enabled: 0 for a unit that is not awaited.
    """
    count = cutlass.const_expr(len(addresses))
    units = []
    missing = Uint32(0)
    for i in cutlass.range_constexpr(count):
        units.append(prim.load_unit(addresses[i], enabled[i]))
        missing |= _missing(lane, units[i], enabled[i])
    units = tuple(units)
    code = Uint32(0)
    polls = Int32(0)
    started = Int64(0)
    elapsed = Int64(0)
    late = Int32(0)
    while missing != Uint32(0) and code == Uint32(0):
        missing = Uint32(0)
        fresh = []
        for i in cutlass.range_constexpr(count):
            fresh.append(prim.load_unit(addresses[i], enabled[i]))
            absent = _missing(lane, fresh[i], enabled[i])
            late = prim.select(absent != Uint32(0), peers[i], late)
            missing |= absent
        units = tuple(fresh)
        polls += Int32(1)
        if polls == Int32(POLLS_PER_CHECK):
            polls = Int32(0)
            now = prim.global_timer()
            started = prim.select(started == Int64(0), now, started)
            elapsed = now - started
            code = lane.hopeless(elapsed)
    data = tuple((unit[0], unit[2]) for unit in units)
    return data, Wait(code, late, Uint64(0), elapsed)


def _missing(lane: Lane, unit: tuple, enabled: Uint32) -> Uint32:
    """Return 0 if both halves of a unit carry the epoch, or the unit is not awaited."""
    return ((unit[1] ^ lane.epoch) | (unit[3] ^ lane.epoch)) & (Uint32(0) - enabled)


class Transfer(NamedTuple):
    """One unit on its way: to or from `peer`, `enabled` 0 if there is none."""

    peer: Int32
    unit: Int32
    enabled: Uint32


class TaggedGather(DeviceObject):
    """Moves one tensor as units, by `part` of `parts` blocks. See ColumnGather for the split.

    A unit holds 8 bytes of the dense staged form; `pack` is 8 where rows and addresses allow to
    load and store them whole, else 1.

    `UNITS_AT_ONCE` units are in flight per thread; a block with more of them goes round again.
    """

    def __init__(self, lane: Lane, columns: Columns, part: Int32, parts: Int32, pack: int) -> None:
        self.lane = lane
        self.columns = columns
        self.pack = pack
        self.part = ColumnPart(columns, part, parts, prim.UNIT_DATA_NBYTES)
        self.count = self.part.count
        self.pairs = self.count * (lane.world_size - Int32(1))
        self.base = lane.slot_offset + columns.staged * 2

    def _transfer(self, flat: Int32, ok: Uint32) -> Transfer:
        """Return the `flat`-th transfer of this block: disabled past the last."""
        enabled = Uint32(flat < self.pairs) & ok
        step = prim.divide(prim.minimum(flat, self.pairs - Int32(1)), self.count)
        ahead = self.lane.rank + step + Int32(1)
        return Transfer(self.lane.wrap(ahead), self.part.first + flat - step * self.count, enabled)

    def _segment(self, writer: Int32, unit: Int32) -> Int64:
        """Return the offset of a unit in any rank's slab."""
        return self.base + Int64(writer) * self.lane.segment_nbytes + Int64(unit) * 16

    @cute.jit
    def load(self, unit: Int32, enabled: Uint32) -> tuple:
        """Return 8 bytes of the own shard as two words."""
        if cutlass.const_expr(self.pack == 8):
            row, column = self.part.split(unit * Int32(8))
            address = self.columns.source + Int64(row) * self.columns.source_stride + Int64(column)
            return prim.load_v2(address, enabled)
        words = [Uint32(0), Uint32(0)]
        for i in cutlass.range_constexpr(8):
            byte = unit * Int32(8) + Int32(i)
            row, column = self.part.split(byte)
            address = self.columns.source + Int64(row) * self.columns.source_stride + Int64(column)
            inside = enabled & Uint32(byte < self.part.nbytes)
            (value,) = prim.load_pack(address, inside, 1)
            words[i // 4] = words[i // 4] | (value << Uint32(8 * (i % 4)))
        return words[0], words[1]

    @cute.jit
    def store(self, peer: Int32, unit: Int32, words: tuple, enabled: Uint32) -> None:
        """Write 8 bytes of a rank's shard to the output."""
        columns = self.columns
        start = columns.output + Int64(peer) * Int64(columns.row_nbytes)
        if cutlass.const_expr(self.pack == 8):
            row, column = self.part.split(unit * Int32(8))
            address = start + Int64(row) * Int64(columns.output_stride) + Int64(column)
            prim.store_v2(address, words, enabled)
        else:
            for i in cutlass.range_constexpr(8):
                byte = unit * Int32(8) + Int32(i)
                row, column = self.part.split(byte)
                address = start + Int64(row) * Int64(columns.output_stride) + Int64(column)
                inside = enabled & Uint32(byte < self.part.nbytes)
                value = words[i // 4] >> Uint32(8 * (i % 4))
                prim.store_pack(address, (value,), inside, 1)

    @cute.jit
    def stage(self) -> None:
        """Push this block's units to every peer. Participants: every thread of the block.

        Transfers are spread over the threads peer by peer, the next rank first: a warp stores
        neighbouring units to one peer.
        """
        lane = self.lane
        rounds = (self.pairs + Int32(lane.threads - 1)) // Int32(lane.threads)
        for turn in cutlass.range(rounds, unroll=1):
            there = self._transfer(turn * Int32(lane.threads) + lane.thread, lane.ok)
            words = self.load(there.unit, there.enabled)
            address = self.lane.peer_of_lane(there.peer) + self._segment(lane.rank, there.unit)
            prim.store_unit(address, words, lane.epoch, there.enabled)

    @cute.jit
    def copy_own(self) -> None:
        """Copy this block's part of the own shard to the output, while peers are on their way."""
        lane = self.lane
        for local in cutlass.range(lane.thread, self.count, lane.threads, unroll=1):
            unit = self.part.first + local
            self.store(lane.rank, unit, self.load(unit, lane.ok), lane.ok)

    @cute.jit
    def collect(self, ok: Uint32, confirmed: Wait, concludes: cutlass.Constexpr) -> Uint32:
        """Wait for this block's units of every peer and write them to the output.

        Participants: every thread of the block. Nothing is written before the launch is concluded,
        that is before every peer's flag has been seen: the first tensor does it, with its first
        turn. Returns 1 if all is well.

        Args:
            ok: 0 if nothing may be written.
            confirmed: How the wait for the flags ended.
            concludes: True for the first tensor of a launch.
        """
        lane = self.lane
        at_once = Int32(lane.threads * UNITS_AT_ONCE)
        turns = (self.pairs + at_once - Int32(1)) // at_once
        if cutlass.const_expr(concludes):
            turns = prim.maximum(turns, Int32(1))
        for turn in cutlass.range(turns, unroll=1):
            begin = turn * at_once
            here = [
                self._transfer(begin + Int32(i * lane.threads) + lane.thread, ok)
                for i in range(UNITS_AT_ONCE)
            ]
            units, wait = await_units(
                lane,
                tuple(lane.own + self._segment(t.peer, t.unit) for t in here),
                tuple(t.peer for t in here),
                tuple(t.enabled for t in here),
            )
            if cutlass.const_expr(concludes):
                if turn == Int32(0):
                    ok = self.lane.conclude(ok, merge_waits(confirmed, wait))
                else:
                    self.lane.give_up(wait)
            else:
                self.lane.give_up(wait)
            good = ok & Uint32(wait.code == Uint32(0))
            for i in cutlass.range_constexpr(UNITS_AT_ONCE):
                self.store(here[i].peer, here[i].unit, units[i], here[i].enabled & good)
        return ok

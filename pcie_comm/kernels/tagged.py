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

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute

from . import primitives as prim
from . import scalars as num
from .all_gather import Columns
from .protocol import POLLS_PER_CHECK, WARP, DeviceObject, Lane, Wait, merge_waits, no_wait


@cute.jit
def await_unit(lane: Lane, address: Int64, peer: Int32, enabled: Uint32) -> tuple:
    """Wait until a tagged unit carries this epoch; return its data, and how the wait ended.

    Participants: whole warps, each thread with its own unit; the warp is together again behind it,
    see Lane.wait_flag. Order: data and tag share an 8-byte element; nothing else becomes visible.

    Args:
        lane: The launch.
        address: Of the unit.
        peer: Which rank sends it.
        enabled: 0 for a thread that awaits none.
    """
    missing = enabled
    unit = (Uint32(0), Uint32(0), Uint32(0), Uint32(0))
    code = Uint32(0)
    started = Uint32(0)
    elapsed = Uint32(0)
    while missing != Uint32(0) and code == Uint32(0):
        polls = Int32(0)
        while missing != Uint32(0) and polls != Int32(POLLS_PER_CHECK):  # nothing else in here
            unit = prim.load_unit(address)
            missing = _missing(lane, unit)
            polls += Int32(1)
        if missing != Uint32(0):
            started, elapsed = lane.time_since(started)
            code = lane.hopeless(elapsed)
    cute.arch.sync_warp()
    return (unit[0], unit[2]), Wait(code, peer, Uint64(0), elapsed, Uint64(0))


def _missing(lane: Lane, unit: tuple) -> Uint32:
    """Return 0 if both halves of a unit carry the epoch."""
    return (unit[1] ^ lane.epoch) | (unit[3] ^ lane.epoch)


class Transfer(NamedTuple):
    """One unit on its way to or from `peer`.

    Attributes:
        peer: The other rank; the own one in a world of one.
        first: 1 for the first of a unit's transfers, which also serves the own output.
        enabled: 0 if there is no such transfer.
        byte: Of the tensor's staged form.
        row, column: The same in its rows, in bytes.
        columns: The tensor.
    """

    peer: Int32
    first: Uint32
    enabled: Uint32
    byte: Int32
    row: Int32
    column: Int32
    columns: Columns


class TaggedGather(DeviceObject):
    """Moves one or two tensors as units, the chunks of block `part`. Workers: all but one warp.

    The transfers of all tensors form one list, spread over the threads peer by peer, the next rank
    first: a warp stores neighbouring units to one peer. A unit holds 8 bytes of the dense staged
    form; `pack` is 8 where rows and addresses allow to load and store them whole, else less.
    """

    def __init__(self, lane: Lane, columns: Sequence[Columns], part: Int32, pack: int) -> None:
        self.lane = lane
        self.tensors = columns
        self.pack = pack
        self.part = part
        self.workers = lane.threads - WARP
        self.steps = num.maximum(lane.world_size - Int32(1), Int32(1))
        self.sizes = [(c.chunk >> Int32(3)) * self.steps for c in columns]
        self.total = self.sizes[0] + (self.sizes[1] if len(columns) == 2 else Int32(0))

    def transfer(self, flat: Int32) -> Transfer:
        """Return the `flat`-th transfer of this block: disabled past the last."""
        columns, local = self.tensors[0], flat
        if len(self.tensors) == 2:
            second = flat >= self.sizes[0]
            columns = type(columns)(
                *(
                    num.select(second, getattr(b, field.name), getattr(a, field.name))
                    for a, b in [self.tensors]
                    for field in dataclasses.fields(columns)
                )
            )
            local = flat - num.select(second, self.sizes[0], Int32(0))
        step = num.quotient(local, columns.chunk_divisor)
        begin = self.part * columns.chunk
        byte = begin + (local << Int32(3)) - step * columns.chunk
        row, column = columns.split(byte)
        return Transfer(
            peer=self.lane.wrap(
                self.lane.rank + num.minimum(step, self.steps - Int32(1)) + Int32(1)
            ),
            first=Uint32(step == Int32(0)),
            enabled=Uint32((flat < self.total) & (byte < columns.nbytes)),
            byte=byte,
            row=row,
            column=column,
            columns=columns,
        )

    def _segment(self, writer: Int32, one: Transfer) -> Int64:
        """Return the offset of a transfer's unit in any rank's slab."""
        lane = self.lane
        segment = lane.slot_offset + num.wide(writer) * lane.segment_nbytes
        return segment + (one.columns.staged + num.wide(one.byte)) * 2

    @cute.jit
    def load(self, one: Transfer) -> tuple:
        """Return 8 bytes of the own shard as two words."""
        columns = one.columns
        address = columns.source + num.wide(one.row) * columns.source_stride + num.wide(one.column)
        if cutlass.const_expr(self.pack == 8):
            return prim.load_v2(address, columns.within(self.lane.rank, one.column, one.enabled))
        words = [Uint32(0), Uint32(0)]
        places = self._places(self.lane.rank, one, address, columns.source_stride)
        for i in cutlass.range_constexpr(8 // self.pack):
            address, inside = places[i]
            (value,) = prim.load_pack(address, one.enabled & inside, self.pack)
            byte = i * self.pack
            words[byte // 4] = words[byte // 4] | (value << Uint32(8 * (byte % 4)))
        return words[0], words[1]

    @cute.jit
    def store(self, rank: Int32, one: Transfer, words: tuple, enabled: Uint32) -> None:
        """Write 8 bytes of a rank's shard to the output."""
        columns = one.columns
        stride = columns.row_stride()
        address = columns.output + columns.shard_offset(rank)
        address += num.wide(one.row) * stride + num.wide(one.column)
        if cutlass.const_expr(self.pack == 8):
            prim.store_v2(address, words, columns.within(rank, one.column, enabled))
        else:
            places = self._places(rank, one, address, stride)
            for i in cutlass.range_constexpr(8 // self.pack):
                address, inside = places[i]
                byte = i * self.pack
                value = words[byte // 4] >> Uint32(8 * (byte % 4))
                prim.store_pack(address, (value,), enabled & inside, self.pack)

    def _places(self, rank: Int32, one: Transfer, address: Int64, stride: Int64) -> list:
        """Return address, and 1 or 0 for inside, of a unit's packs, which may be of several rows.

        `address` is that of the first, `stride` the distance of two rows, of the rank's shard.
        """
        columns = one.columns
        over = stride - num.wide(columns.row_nbytes)
        column = one.column
        places = []
        for i in range(0, 8, self.pack):
            inside = Uint32(one.byte + Int32(i) < columns.nbytes)
            places.append((address, columns.within(rank, column, inside)))
            column += Int32(self.pack)
            ended = column == columns.row_nbytes
            column = num.select(ended, Int32(0), column)
            address += num.select(ended, over, Int64(0)) + Int64(self.pack)
        return places

    @cute.jit
    def send(self, one: Transfer, words: tuple) -> None:
        """Push a unit to its peer; the first of its transfers copies it to the own output too."""
        lane = self.lane
        ok = one.enabled & lane.ok
        address = lane.peer(one.peer) + self._segment(lane.rank, one)
        prim.store_unit(address, words, lane.epoch, ok & Uint32(one.peer != lane.rank))
        self.store(lane.rank, one, words, ok & one.first)

    @cute.jit
    def stage(self, turn: Int32) -> None:
        """Push this block's units to every peer, from a turn on. Participants: workers."""
        workers = Int32(self.workers)
        begin = self.lane.thread + turn * workers
        for flat in cutlass.range(begin, self.total, workers, unroll=1):
            one = self.transfer(flat)
            self.send(one, self.load(one))

    def collect(self, ok: Uint32) -> Wait:
        """Wait for this block's units of every peer and write them to the output.

        Participants: workers. Nothing is written before the launch is concluded, that is before
        every peer's flag has been seen: the first turn does it. Returns how the waits ended.
        """
        return self.collect_next(ok, True)[1]

    @cute.jit
    def collect_next(self, ok: Uint32, concludes: cutlass.Constexpr) -> tuple:
        """As `collect`, of one of several gathers: the first one concludes the launch.

        Returns `ok` for the next one, and how the waits ended.
        """
        lane = self.lane
        last = num.maximum(self.total, Int32(1))
        late = no_wait()
        for begin in cutlass.range(0, last, self.workers, unroll=1):
            one = self.transfer(begin + lane.thread)
            awaited = ok & one.enabled & Uint32(one.peer != lane.rank)
            words, wait = await_unit(
                lane, lane.own + self._segment(one.peer, one), one.peer, awaited
            )
            late = merge_waits(late, wait)
            if cutlass.const_expr(concludes):
                if begin == Int32(0):
                    ok = lane.conclude(ok, wait)
            self.store(one.peer, one, words, awaited & ok & Uint32(wait.code == Uint32(0)))
        return ok, late

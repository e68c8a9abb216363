"""Device side of a channel: epoch, staging addresses, signal, bounded wait.

One launch on one block, in order:

    lane = Lane(args)                    epoch = last epoch + 1, slot = epoch % 2
    stage own bytes                      push: into every peer's slot; pull: into the own slot
    ok = lane.exchange(ok)               barrier, signal every peer, wait for every peer, barrier
    collect                              push: from the own slot; pull: from the peers' slots

Memory order: `exchange` puts a block barrier before its release, so the release covers what every
thread of the block staged; and one behind its acquire, so every thread may read what the peers'
same-numbered blocks staged. Block b of a rank only ever exchanges with block b of its peers.

Why two slots suffice, and the proof that nobody is more than one epoch ahead: docs/protocol.md.

A wait is bounded by wall time and watches the abort word and the channel's poison word. The first
thread that gives up writes the status record and poisons the channel; its block stores nothing
more to any peer, and later launches return at once. (Other blocks of that launch may already have
staged and signalled: harmless, since every rank still pairs the same epochs.)
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute

from ..layout import LINE_NBYTES, MAX_BLOCKS, ControlLayout, SlabLayout, StatusLayout
from . import primitives as prim

POLLS_PER_CHECK = 1024
"""Polls between two looks at clock, abort word and poison word; costs nothing measurable."""


class DeviceObject:
    """Base of the classes that exist only while a kernel is traced, and never change.

    The tracer asks which run-time values an object carries through a branch or a loop in which a
    method of it is called. These objects are not assigned to, so the answer is none.
    """

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> DeviceObject:
        return self


class LaneArgs(NamedTuple):
    """What every communicating kernel gets of its channel. One cubin serves all ranks.

    Attributes:
        control: Address of the control block (ControlLayout).
        rank: This rank.
        world_size: Number of ranks.
        signature: Names operation and shapes (Plan.signature).
    """

    control: Int64
    rank: Int32
    world_size: Int32
    signature: Uint32


class Lane(DeviceObject):
    """One block's view of its channel during one launch.

    Attributes:
        thread, block, threads: Position in the launch.
        epoch, slot: Of this launch.
        ok: 1, or 0 on a poisoned channel: then stage, signal and collect nothing.
        segment_nbytes: What one rank may stage under push.
        slot_offset: Offset of this launch's slot in every slab.
    """

    def __init__(self, args: LaneArgs, threads: int) -> None:
        self.control = args.control
        self.rank = args.rank
        self.world_size = args.world_size
        self.signature = args.signature
        self.threads = threads
        self.thread = cute.arch.thread_idx()[0]
        self.block = cute.arch.block_idx()[0]
        self.grid = cute.arch.grid_dim()[0]
        poison, slot_nbytes, segment_nbytes, _ = prim.load_v4(self.control)
        self.last_epoch = prim.load_u32(self._epoch_address(self.block))
        self.epoch = self.last_epoch + Uint32(1)
        self.slot = Int32(self.epoch & Uint32(1))
        self.ok = prim.warp_all(poison == Uint32(0))
        self.segment_nbytes = Int64(segment_nbytes)
        self.slot_offset = Int64(SlabLayout.SLOTS_OFFSET) + Int64(self.slot) * Int64(slot_nbytes)

    def _epoch_address(self, block: Int32) -> Int64:
        return self.control + Int64(ControlLayout.EPOCHS) + Int64(block) * 4

    def peer(self, rank: Int32) -> Int64:
        """Return the address of rank `rank`'s slab as this rank sees it."""
        return prim.load_u64(self.control + Int64(ControlLayout.PEERS) + Int64(rank) * 8)

    def _flag_offset(self, writer: Int32) -> Int64:
        row = self.slot * Int32(MAX_BLOCKS) + self.block
        return Int64(SlabLayout.FLAGS_OFFSET) + Int64(
            row * Int32(SlabLayout.FLAG_ROW_NBYTES) + writer * Int32(SlabLayout.FLAG_NBYTES)
        )

    def wrap(self, rank: Int32) -> Int32:
        """Return `rank` modulo the world size, for 0 <= rank < 2 * world_size."""
        return prim.select(rank >= self.world_size, rank - self.world_size, rank)

    @cute.jit
    def exchange(self, ok: Uint32) -> Uint32:
        """Signal every peer, wait for every peer; return 1 if all bytes are there.

        Participants: every thread of the block. Order: see the module docstring.
        Requires: `ok` is 0 in any thread only if the launch must not signal.
        """
        ok = prim.block_all(ok)
        self._advance_epoch()
        if self.thread < self.world_size and self.thread != self.rank:
            if ok != Uint32(0):
                value = (Uint64(self.signature) << Uint64(32)) | Uint64(self.epoch)
                prim.signal(self.peer(self.thread) + self._flag_offset(self.rank), value)
                ok = self._wait(self.thread, value)
        return prim.block_all(ok)

    @cute.jit
    def _advance_epoch(self) -> None:
        """Store this launch's epoch; block 0 also does it for blocks this launch does not have.

        Requires: a block barrier since the epoch was loaded.
        """
        if self.thread == Int32(0):
            prim.store_u32(self._epoch_address(self.block), self.epoch)
        if self.block == Int32(0):
            if self.thread >= self.grid and self.thread < Int32(MAX_BLOCKS):
                prim.store_u32(self._epoch_address(self.thread), self.epoch)

    @cute.jit
    def _wait(self, peer: Int32, wanted: Uint64) -> Uint32:
        """Wait until the flag of `peer` equals `wanted`; return 0 if the wait gave up.

        Participants: one thread. Order: acquire at system scope.
        """
        flag = self.peer(self.rank) + self._flag_offset(peer)
        seen = prim.poll(flag)
        ok = Uint32(1)
        polls = Int32(0)
        started = Int64(0)
        while seen != wanted and ok != Uint32(0):
            seen = prim.poll(flag)
            polls += Int32(1)
            if polls == Int32(POLLS_PER_CHECK):
                polls = Int32(0)
                now = prim.global_timer()
                started = prim.select(started == Int64(0), now, started)
                ok = self._still_hopeful(peer, wanted, seen, now - started)
        return ok

    @cute.jit
    def _still_hopeful(self, peer: Int32, wanted: Uint64, seen: Uint64, elapsed: Int64) -> Uint32:
        """Return 0, and report, if waiting on makes no sense. The cold path of `_wait`."""
        code = Uint32(StatusLayout.CODE_OK)
        if elapsed > prim.load_u64(self.control + Int64(ControlLayout.TIMEOUT_NS)):
            code = Uint32(StatusLayout.CODE_TIMEOUT)
        same_epoch = Uint32(seen & Uint64(0xFFFFFFFF)) == self.epoch
        if same_epoch and seen != wanted and seen != Uint64(0):
            code = Uint32(StatusLayout.CODE_MISMATCH)
        abort = prim.load_u64(self.control + Int64(ControlLayout.ABORT))
        if prim.load_host_u32(abort) != Uint32(0):
            code = Uint32(StatusLayout.CODE_ABORTED)
        poison = prim.load_host_u32(self.control + Int64(ControlLayout.POISON))
        if code != Uint32(StatusLayout.CODE_OK) and poison == Uint32(0):
            self._report(code, peer, seen, elapsed)
        return Uint32((code | poison) == Uint32(0))

    @cute.jit
    def _report(self, code: Uint32, peer: Int32, seen: Uint64, elapsed: Int64) -> None:
        """Poison the channel; the first thread to do so writes the status record, code last."""
        if prim.claim(self.control + Int64(ControlLayout.POISON), code) == Uint32(0):
            record = prim.load_u64(self.control + Int64(ControlLayout.STATUS))
            prim.store_u32(record + Int64(StatusLayout.PEER), Uint32(peer))
            prim.store_u32(record + Int64(StatusLayout.EPOCH), self.epoch)
            prim.store_u32(record + Int64(StatusLayout.WANTED_SIGNATURE), self.signature)
            prim.store_u64(record + Int64(StatusLayout.SEEN_EPOCH), seen)
            prim.store_u64(record + Int64(StatusLayout.ELAPSED_NS), Uint64(elapsed))
            prim.store_u32(record + Int64(StatusLayout.BLOCK), Uint32(self.block))
            prim.store_host_u32(record + Int64(StatusLayout.CODE), code)


class Staging(DeviceObject):
    """Where staged bytes go and come from, under one protocol.

    Args:
        lane: The launch.
        push: True: into every peer's slot; False: into the own slot, peers fetch.
    """

    def __init__(self, lane: Lane, push: bool) -> None:
        self.lane = lane
        self.push = push

    @cute.jit
    def put(
        self,
        offset: Int64,
        words: tuple,
        nbytes: cutlass.Constexpr,
        share: Int32 = 0,
        shares: cutlass.Constexpr = 1,
    ) -> None:
        """Stage one pack at `offset` of this rank's segment, for every rank.

        Peers are visited from rank + 1 on, so that ranks do not all write to one peer at a time.
        `shares` threads that hold the same pack may divide the peers among them by `share`.
        """
        offset += self.lane.slot_offset
        if cutlass.const_expr(self.push):
            offset += Int64(self.lane.rank) * self.lane.segment_nbytes
            first = Int32(share) + Int32(1)
            for step in cutlass.range(first, self.lane.world_size + Int32(1), shares, unroll=1):
                slab = self.lane.peer(self.lane.wrap(self.lane.rank + step))
                prim.store_pack(slab + offset, words, Uint32(1), nbytes)
        else:
            mine = Uint32(Int32(share) == Int32(0))
            prim.store_pack(self.lane.peer(self.lane.rank) + offset, words, mine, nbytes)

    def source(self, peer: Int32) -> Int64:
        """Return the address of the segment that rank `peer` staged, readable after `exchange`."""
        lane = self.lane
        if self.push:
            mine = lane.peer(lane.rank) + lane.slot_offset
            return mine + Int64(peer) * lane.segment_nbytes
        return lane.peer(peer) + lane.slot_offset


assert LINE_NBYTES == SlabLayout.FLAG_ROW_NBYTES, "a block's flags fill one line"

"""Device side of a channel: epoch, staging addresses, signal, bounded wait.

One launch on one block, in order:

    lane = Lane(args)                    asks for the control words
    lane.enter()                         epoch = last epoch + 1, slot = epoch % 2
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

from ..layout import (
    LINE_NBYTES,
    MAX_BLOCKS,
    MAX_WORLD,
    NUM_SLOTS,
    TIMER_SHIFT,
    ControlLayout,
    SlabLayout,
    StatusLayout,
)
from . import primitives as prim
from . import scalars as num
from .waits import Wait as Wait
from .waits import count, unless
from .waits import merge_waits as merge_waits
from .waits import no_wait as no_wait

WARP = 32
PATIENCE_BARRIER = 15
"""Named barrier of Lane.be_patient; the kernels' own count from 1 up."""

TURN_NS = 100_000
"""Longest that a block waits for its turn to stage, in nanoseconds."""

POLLS_PER_CHECK = 1024
"""Polls between two looks at clock, abort word and poison word; costs: see docs/failure.md."""


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
        signature: Names operation and shapes (Plan.signature). In a kernel that counts it has
            64 bits: the upper half are the bytes that the launch sends.
    """

    control: Int64
    rank: Int32
    world_size: Int32
    signature: Uint32 | Uint64


class Lane(DeviceObject):
    """One block's view of its channel during one launch.

    The constructor only asks for the channel's words; a kernel asks for its own inputs next, and
    then enters, so that one trip to memory serves both.

    Attributes:
        thread, block, threads: Position in the launch.
        table: Lane r holds the address of rank r's slab.
        own: Address of the own slab.
        mirror: The same where a rank keeps tagged units for itself: in device memory, always.
        epoch, slot: Of this launch; from `enter` on, as the following.
        ok: 1, or 0 on a poisoned channel: then stage, signal and collect nothing.
        segment_nbytes: What one rank may stage under push.
        slot_offset: Offset of this launch's slot in every slab; of its tagged slot if `tagged`.
        relays: 1 if only block 0 looks at the flags of a tagged launch, and tells the others.
        counts: Whether waits are timed and counted: waits.py. A fact of compilation.
        waiter: Which rank's flag a thread waits for in `exchange`, if that is a peer. In a kernel
            that counts it is the last warp that waits: it has the least to collect afterwards.
    """

    epoch: Uint32
    slot: Int32
    ok: Uint32
    segment_nbytes: Int64
    slot_offset: Int64
    flag: Uint64
    relays: Uint32

    def __init__(self, args: LaneArgs, threads: int, tagged: bool = False) -> None:
        prim.follow_predecessor()
        self.control = args.control
        self.rank = args.rank
        self.world_size = args.world_size
        self.signature = Uint32(args.signature)
        self.threads = threads
        self.tagged = tagged
        self.thread = cute.arch.thread_idx()[0]
        self.block = cute.arch.block_idx()[0]
        self.grid = cute.arch.grid_dim()[0]
        self.lane = cute.arch.lane_idx()
        self.counts = isinstance(args.signature, Uint64)
        self.waiter = self.thread
        if self.counts:
            self.sent = args.signature >> Uint64(32)
            waits = self.thread >= Int32(threads - WARP)
            self.waiter = num.select(waits, self.thread - Int32(threads - WARP), Int32(WARP))
        self._words = prim.load_v4(self.control)
        self._last_epoch = prim.load_u32(self._epoch_address(self.block))
        self.table = self.peer(self.lane & Int32(MAX_WORLD - 1))
        self.own = self.peer(self.rank)
        self.mirror = prim.load_u64(self.control + Int64(ControlLayout.MIRROR))

    def enter(self) -> None:
        """Derive epoch, slot and flag of this launch. Participants: every thread of the block."""
        poison, slot_nbytes, segment_nbytes, self.relays = self._words
        follower = self._last_epoch + Uint32(1)
        self.epoch = num.select(follower == Uint32(0), Uint32(2), follower)
        self.slot = Int32(self.epoch & Uint32(1))
        self.ok = prim.warp_all(poison == Uint32(0))
        self.segment_nbytes = Int64(segment_nbytes)
        place = self.slot + Int32(NUM_SLOTS if self.tagged else 0)
        self.slot_offset = Int64(SlabLayout.SLOTS_OFFSET) + num.wide(place) * Int64(slot_nbytes)
        self.flag = (Uint64(self.signature) << Uint64(32)) | Uint64(self.epoch)

    def _epoch_address(self, block: Int32) -> Int64:
        place = num.wide(block) * ControlLayout.EPOCH_NBYTES
        return self.control + Int64(ControlLayout.EPOCHS) + place

    def peer(self, rank: Int32) -> Int64:
        """Return the address of rank `rank`'s slab as this rank sees it, from memory."""
        return prim.load_u64(self.control + Int64(ControlLayout.PEERS) + num.wide(rank) * 8)

    def peer_of_lane(self, rank: Int32) -> Int64:
        """Return the address of a slab, from registers. Participants: a whole warp."""
        low = cute.arch.shuffle_sync(Int32(self.table), rank)
        high = cute.arch.shuffle_sync(Int32(self.table >> Int64(32)), rank)
        return (Int64(high) << Int64(32)) | Int64(Uint32(low))

    def _flag_offset(self, writer: Int32) -> Int64:
        """Return the offset of a rank's flag: one per block, but one per tagged launch."""
        row = self.slot * Int32(MAX_BLOCKS)
        if not self.tagged:
            row += self.block
        return Int64(SlabLayout.FLAGS_OFFSET) + Int64(
            row * Int32(SlabLayout.FLAG_ROW_NBYTES) + writer * Int32(SlabLayout.FLAG_NBYTES)
        )

    def wrap(self, rank: Int32) -> Int32:
        """Return `rank` modulo the world size, for 0 <= rank < 2 * world_size."""
        return num.select(rank >= self.world_size, rank - self.world_size, rank)

    @cute.jit
    def await_turn(self, part: Int32, wave: Int32) -> None:
        """Let this rank's block of the wave before stage first, or TURN_NS pass.

        Participants: every thread of the block. Only spares the link, and orders nothing: a weak
        store tells it.

        Args:
            part: Which block it is of those that gather; negative for others, which do not wait.
            wave: How many of them stage at a time; 0: all.
        """
        if wave != Int32(0) and part >= wave:
            if self.thread == Int32(0):
                address = self._staged_address(self.block - wave)
                until = prim.global_timer() + Int64(TURN_NS)
                now = until - Int64(1)
                seen = ~self.flag
                while seen != self.flag and now < until:
                    seen = prim.load_peer_u64(address)
                    now = prim.global_timer()
            cute.arch.sync_threads()

    def _staged_address(self, block: Int32) -> Int64:
        return self.control + Int64(ControlLayout.STAGED) + num.wide(block) * 8

    @cute.jit
    def exchange(self, ok: Uint32) -> Uint32:
        """Signal every peer, wait for every peer; return 1 if all bytes are there.

        Participants: every thread of the block. Order: see the module docstring.
        Requires: `ok` is 0 in any thread only if the launch must not signal.
        """
        ok = prim.block_all(ok)
        last = self.thread == Int32(self.threads - 1)
        if last:
            prim.store_u64(self._staged_address(self.block), self.flag)  # see await_turn
        busy = self.begin(last)
        wait = no_wait()
        if self.waiter < self.world_size and self.waiter != self.rank:
            if ok != Uint32(0):
                prim.signal(self.peer(self.waiter) + self._flag_offset(self.rank), self.flag)
                address = self.own + self._flag_offset(self.waiter)
                wait = self.wait_flag(address, self.waiter, Uint32(0))
        cute.arch.sync_warp()
        wait = unless(wait, busy)
        all_ok = self.conclude(ok, wait)
        self.give_up(wait)
        if cutlass.const_expr(self.counts):
            count(self, self.waiter, ok, wait.took)
        return all_ok

    @cute.jit
    def watch_flags(self, patient: Int32) -> Wait:
        """Tell every peer which call this is, and see that theirs is the same.

        Participants: the last warp of the block, which does nothing else: `leave` follows, where
        the others meet it in `conclude`. The flag publishes nothing and needs no order with the
        tagged payload. Returns how the wait ended.

        Args:
            patient: Not 0: the others wait in `be_patient`.
        """
        busy = self.begin(self.lane == Int32(0))
        self.announce()
        wait = unless(self.confirm(), busy)
        self.be_patient(patient)
        return wait

    @cute.jit
    def be_patient(self, patient: Int32) -> None:
        """Wait, if `patient` is not 0, until the last warp has seen every peer's flag.

        Saves the link polls that are too early to find anything. Participants: every thread.
        """
        if patient != Int32(0):
            barrier = Int32(PATIENCE_BARRIER)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=self.threads)

    @cute.jit
    def leave(self, wait: Wait) -> None:
        """Report a wait that did not succeed; the last warp then meets the others.

        Participants: every thread of a block with `watch_flags`, at the end of the launch.
        """
        self.give_up(wait)
        if self.thread >= Int32(self.threads - WARP):
            prim.block_all(self.ok & Uint32(wait.code == Uint32(0)))
            if cutlass.const_expr(self.counts):
                count(self, self.lane, self.ok, wait.took)

    def begin(self, noting: cutlass.Boolean) -> Uint32:
        """Note that a launch of this epoch has begun; return CODE_BUSY if one had already, else 0.

        Two such launches stage into one slot, and read one. The answer takes a trip to memory:
        look at it last. Participants: any threads, `noting` in one of them.
        """
        begun = self._epoch_address(self.block) + Int64(ControlLayout.BEGUN)
        before = prim.replace_u32(begun, self.epoch, Uint32(noting))
        busy = before == self.epoch  # which is never 0
        return num.select(busy, Uint32(StatusLayout.CODE_BUSY), Uint32(StatusLayout.CODE_OK))

    @cute.jit
    def announce(self) -> None:
        """Raise this call's flag at every peer, once per launch. Participants: the last warp."""
        watched = (self.lane < self.world_size) & (self.lane != self.rank)
        if (Uint32(watched) & self.ok) != Uint32(0) and self.block == Int32(0):
            prim.announce(self.table + self._flag_offset(self.rank), self.flag)

    @cute.jit
    def confirm(self) -> Wait:
        """Wait until every peer announced the same call, a lane per peer. The last warp does.

        Where slabs lie in host memory, a poll is a trip over the link, and blocks that poll the
        same line wait for one another: there block 0 tells the others through the control block.
        """
        follows = self.relays != Uint32(0) and self.block != Int32(0)
        relay = self.control + Int64(ControlLayout.CONFIRMED)
        address = num.select(follows, relay, self.own + self._flag_offset(self.lane))
        watched = self.lane < self.world_size and self.lane != self.rank
        watched = num.select(follows, self.lane == Int32(0), watched)
        wait = no_wait()
        if watched and self.ok != Uint32(0):
            wait = self.wait_flag(address, self.lane, Uint32(follows))
        cute.arch.sync_warp()
        if self.block == Int32(0):
            confirmed = prim.warp_all(wait.code == Uint32(0)) & self.ok
            if self.lane == Int32(0) and confirmed != Uint32(0):
                prim.announce(relay, self.flag)
        return wait

    @cute.jit
    def conclude(self, ok: Uint32, wait: Wait) -> Uint32:
        """Return 1 if no wait of the block gave up, else 0. Advances the epoch.

        Participants: every thread of the block, or, where the last warp runs `watch_flags`, all
        others. The caller reports its `wait`.
        """
        all_ok = prim.block_all(ok & Uint32(wait.code == Uint32(0)))
        if self.thread == Int32(0):
            prim.store_u32(self._epoch_address(self.block), self.epoch)
        if self.block == Int32(0):  # also for the blocks that this launch does not have
            for first in cutlass.range_constexpr(0, MAX_BLOCKS, self.threads):
                missing = self.thread + Int32(first)
                if missing >= self.grid and missing < Int32(MAX_BLOCKS):
                    words = (self.epoch, self.epoch)
                    prim.store_v2(self._epoch_address(missing), words, Uint32(1))
        return all_ok

    @cute.jit
    def wait_flag(self, address: Int64, peer: Int32, relayed: Uint32) -> Wait:
        """Wait until `peer` raised this call's flag. Participants: one thread.

        Its warp must meet in sync_warp behind it: docs/protocol.md, "Warps meet behind a wait".

        Order: acquire at system scope. A relayed flag is given twice the time, so that whoever
        waits for the peer itself is the first to report.
        """
        began = self.clock()
        seen = ~self.flag
        code = Uint32(0)
        started = Uint32(0)
        elapsed = Uint32(0)
        while seen != self.flag and code == Uint32(0):
            polls = Int32(0)
            while seen != self.flag and polls != Int32(POLLS_PER_CHECK):  # nothing else in here
                seen = prim.poll(address)
                polls += Int32(1)
            if seen != self.flag:
                started, elapsed = self.time_since(started)
                code = self.hopeless(elapsed >> relayed)
                other = Uint32(seen) == self.epoch and seen != Uint64(0)
                code = num.select(other, Uint32(StatusLayout.CODE_MISMATCH), code)
        return Wait(code, peer, seen, elapsed, Uint64(self.clock() - began))

    def clock(self) -> Int64:
        """Return the time in nanoseconds, in a kernel that counts; else 0."""
        return prim.global_timer() if self.counts else Int64(0)

    def time_since(self, started: Uint32) -> tuple[Uint32, Uint32]:
        """Return when a wait was first timed, and the time since, in units of 1,024 ns."""
        now = Uint32(prim.global_timer() >> Int64(TIMER_SHIFT)) | Uint32(1)
        started = num.select(started == Uint32(0), now, started)
        return started, now - started

    @cute.jit
    def hopeless(self, elapsed: Uint32) -> Uint32:
        """Return why waiting on makes no sense, or 0. The cold path of every wait."""
        code = Uint32(StatusLayout.CODE_OK)
        if elapsed > prim.load_u32(self.control + Int64(ControlLayout.TIMEOUT)):
            code = Uint32(StatusLayout.CODE_TIMEOUT)
        abort = prim.load_u64(self.control + Int64(ControlLayout.ABORT))
        if prim.load_host_u32(abort) != Uint32(0):
            code = Uint32(StatusLayout.CODE_ABORTED)
        poison = prim.load_host_u32(self.control + Int64(ControlLayout.POISON))
        return num.select(poison != Uint32(0), poison, code)

    @cute.jit
    def give_up(self, wait: Wait) -> None:
        """Report a wait that did not succeed. Participants: any threads."""
        if wait.code != Uint32(0):
            self.report(wait)

    @cute.jit
    def report(self, wait: Wait) -> None:
        """Poison the channel; the first thread to do so writes the status record, code last."""
        if prim.claim(self.control + Int64(ControlLayout.POISON), wait.code) == Uint32(0):
            record = prim.load_u64(self.control + Int64(ControlLayout.STATUS))
            prim.store_u32(record + Int64(StatusLayout.PEER), Uint32(wait.peer))
            prim.store_u32(record + Int64(StatusLayout.EPOCH), self.epoch)
            prim.store_u32(record + Int64(StatusLayout.WANTED_SIGNATURE), self.signature)
            prim.store_u64(record + Int64(StatusLayout.SEEN_EPOCH), wait.seen)
            prim.store_u32(record + Int64(StatusLayout.ELAPSED), wait.elapsed)
            prim.store_u32(record + Int64(StatusLayout.BLOCK), Uint32(self.block))
            prim.store_host_u32(record + Int64(StatusLayout.CODE), wait.code)


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
        own: cutlass.Constexpr = True,
    ) -> None:
        """Stage one pack at `offset` of this rank's segment, for every rank, or peers if not `own`.

        Peers are visited from rank + 1 on, so that ranks do not all write to one peer at a time.
        `shares` threads that hold the same pack may divide the peers among them by `share`.
        """
        offset += self.lane.slot_offset
        if cutlass.const_expr(self.push):
            offset += num.wide(self.lane.rank) * self.lane.segment_nbytes
            first = Int32(share) + Int32(1)
            last = self.lane.world_size + Int32(1 if own else 0)
            for step in cutlass.range(first, last, shares, unroll=1):
                slab = self.lane.peer(self.lane.wrap(self.lane.rank + step))
                prim.store_pack(slab + offset, words, Uint32(1), nbytes)
        else:
            mine = Uint32(Int32(share) == Int32(0))
            prim.store_pack(self.lane.peer(self.lane.rank) + offset, words, mine, nbytes)

    def source(self, peer: Int32) -> Int64:
        """Return the address of the segment that rank `peer` staged, readable after `exchange`."""
        lane = self.lane
        if self.push:
            mine = lane.own + lane.slot_offset
            return mine + num.wide(peer) * lane.segment_nbytes
        return lane.peer(peer) + lane.slot_offset


assert LINE_NBYTES == SlabLayout.FLAG_ROW_NBYTES, "a block's flags fill one line"

"""Device code of the probes: fill, check and copy memory, follow a chain, play with a peer.

Two kernels that play together are resident side by side, on two streams of one process. Each waits
only for the other, and only until its deadline: then it says how far it came, and ends. Nothing
here traps. Memory goes through primitives.py, with the order that docs/protocol.md needs: what is
tried here is what the collectives rely on.

Memory of a player, which the other one can address:

    flag[slot][block]     a line each; holds the number of a round
    payload[slot]         per block and thread, `packs` packs or units
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute

from ..kernels import primitives as prim
from ..kernels import scalars as num
from ..kernels.protocol import DeviceObject
from .sizes import (
    FLAG_NBYTES,
    IN_FLIGHT,
    MOST_BLOCKS,
    PACK_NBYTES,
    PAYLOAD_OFFSET,
    POLLS_PER_CHECK,
    RESULT_NBYTES,
    RESULTS_OFFSET,
    THREADS,
)


def mixed(seed: Uint32, index: Uint32) -> Uint32:
    """Return word `index` of the pattern `seed`: 32 bits that look random. See pattern.py."""
    number = index * Uint32(0x9E3779B1) + seed
    number = (number ^ (number >> Uint32(16))) * Uint32(0x85EBCA6B)
    number = (number ^ (number >> Uint32(13))) * Uint32(0xC2B2AE35)
    return number ^ (number >> Uint32(16))


def pack_of(seed: Uint32, at: Int32) -> tuple:
    """Return pack `at` of a pattern: four words."""
    first = Uint32(at) * Uint32(4)
    return tuple(mixed(seed, first + Uint32(i)) for i in range(4))


def differing(words: tuple, others: tuple) -> Uint32:
    """Return how many words of two packs differ."""
    count = Uint32(0)
    for one, other in zip(words, others, strict=True):
        count = count + Uint32(one != other)
    return count


def _place() -> Int32:
    return cute.arch.block_idx()[0] * Int32(THREADS) + cute.arch.thread_idx()[0]


def _step() -> Int32:
    return cute.arch.grid_dim()[0] * Int32(THREADS)


@cute.jit
def fill(target: Int64, packs: Int32, seed: Uint32) -> None:
    """Store a pattern. Participants: all threads of the grid. Order: weak."""
    for at in cutlass.range(_place(), packs, _step(), unroll=1):
        words = pack_of(seed, at)
        prim.store_pack(target + num.wide(at) * PACK_NBYTES, words, Uint32(1), PACK_NBYTES)


@cute.jit
def check(source: Int64, counts: Int64, packs: Int32, seed: Uint32, stale: Uint32) -> None:
    """Count the words that are not of a pattern, and those among them of a `stale` one.

    Participants: all threads of the grid; each writes its two counts. Order: relaxed, system scope.
    """
    wrong = Uint32(0)
    old = Uint32(0)
    for at in cutlass.range(_place(), packs, _step(), unroll=1):
        address = source + num.wide(at) * PACK_NBYTES
        words = prim.load_peer_pack(address, Uint32(1), PACK_NBYTES)
        good = pack_of(seed, at)
        before = pack_of(stale, at)
        for i in cutlass.range_constexpr(4):
            differs = Uint32(words[i] != good[i])
            wrong = wrong + differs
            old = old + (differs & Uint32(words[i] == before[i]))
    place = counts + num.wide(_place()) * 8
    prim.store_u32(place, wrong)
    prim.store_u32(place + Int64(4), old)


def _copy_some(source: Int64, target: Int64, packs: Int32, at: Int32) -> None:
    loaded = []
    for i in range(IN_FLIGHT):
        place = at + Int32(i) * _step()
        inside = Uint32(place < packs)
        offset = num.wide(num.minimum(place, packs)) * PACK_NBYTES
        loaded.append((offset, inside, prim.load_peer_pack(source + offset, inside, PACK_NBYTES)))
    for offset, inside, words in loaded:
        prim.store_pack(target + offset, words, inside, PACK_NBYTES)


@cute.jit
def copy(source: Int64, target: Int64, packs: Int32) -> None:
    """Copy packs, some loads in flight. Participants: all threads of the grid."""
    for at in cutlass.range(_place(), packs, _step() * Int32(IN_FLIGHT), unroll=1):
        _copy_some(source, target, packs, at)


@cute.jit
def chase(chain: Int64, result: Int64, hops: Int32) -> None:
    """Follow a chain of offsets, one load after the other; report time and where it ended.

    Participants: one thread.
    """
    if _place() == Int32(0):
        started = prim.global_timer()
        at = Int64(0)
        for _ in cutlass.range(0, hops, unroll=1):
            at = Int64(prim.load_peer_u64(chain + at))
        elapsed = prim.global_timer() - started
        prim.store_u64(result, Uint64(elapsed))
        prim.store_u64(result + Int64(8), Uint64(at))


@cute.jit
def await_flag(address: Int64, wanted: Uint64, deadline: Int64) -> Uint32:
    """Wait until a flag holds a number; return 1, or 0 if the deadline came first.

    Participants: one thread. Order: acquire at system scope.
    """
    seen = ~wanted
    polls = Int32(0)
    ok = Uint32(1)
    while seen != wanted and ok != Uint32(0):
        seen = prim.poll(address)
        polls += Int32(1)
        if polls == Int32(POLLS_PER_CHECK):
            polls = Int32(0)
            ok = Uint32(prim.global_timer() < deadline)
    return ok | Uint32(seen == wanted)


@cute.jit
def ping_pong(own: Int64, peer: Int64, result: Int64, rounds: Int32, end: tuple) -> None:
    """Send a flag to and fro; `end` is rank and limit in nanoseconds. Participants: one thread.

    Rank 0 begins. Each raises the flag of a round once it has seen what comes before it.
    """
    rank, limit = end
    if _place() == Int32(0):
        started = prim.global_timer()
        deadline = started + limit
        ok = Uint32(1)
        done = Int32(0)
        while done < rounds and ok != Uint32(0):
            flag = Uint64(Uint32(done + Int32(1)))
            if rank == Int32(0):
                prim.signal(peer, flag)
            ok = await_flag(own, flag, deadline)
            if ok != Uint32(0):
                done += Int32(1)
                if rank != Int32(0):
                    prim.signal(peer, flag)
        prim.store_u64(result, Uint64(prim.global_timer() - started))
        prim.store_u64(result + Int64(8), Uint64(Uint32(done)))


class Trial(DeviceObject):
    """One block's part of many rounds in which two ranks exchange bytes that both can predict.

    Block b of a rank exchanges with block b of the other. A round uses slot `round % 2`, as a
    channel does, and for the same reason two slots suffice.

    Attributes:
        rank: 0 or 1.
        own, peer: Memory of this rank and of the other, as this one addresses them.
        packs: That each thread moves in a round: packs, or tagged units.
    """

    def __init__(self, args: Any, tensors: tuple, scalars: tuple) -> None:
        self.own, self.peer, self.result = tensors
        self.rounds, self.packs = Int32(scalars[0]), Int32(scalars[1])
        self.seed = Uint32(scalars[2])
        self.rank = args.rank
        self.thread = cute.arch.thread_idx()[0]
        self.block = cute.arch.block_idx()[0]
        self.grid = cute.arch.grid_dim()[0]
        self.started = prim.global_timer()
        self.deadline = self.started + scalars[3]

    def flag_offset(self, number: Int32) -> Int64:
        """Return where the flag of a round lies."""
        slot = number & Int32(1)
        return num.wide(slot * Int32(MOST_BLOCKS) + self.block) * FLAG_NBYTES

    def index(self, at: Int32) -> Int32:
        """Return the number of this thread's pack or unit `at` within a slot."""
        return (self.block * self.packs + at) * Int32(THREADS) + self.thread

    def offset(self, number: Int32, at: Int32) -> Int64:
        """Return where this thread's pack or unit `at` of a round lies."""
        slot_packs = self.grid * self.packs * Int32(THREADS)
        place = (number & Int32(1)) * slot_packs + self.index(at)
        return Int64(PAYLOAD_OFFSET) + num.wide(place) * PACK_NBYTES

    def stamp(self, number: Int32, rank: Int32) -> Uint32:
        """Return the seed of what a rank sends in a round."""
        return self.seed + (Uint32(number) * Uint32(2) + Uint32(rank)) * Uint32(0x632BE5AB)

    @cute.jit
    def stage(self, number: Int32, target: Int64) -> None:
        """Store this thread's packs of a round. Order: weak; the flag publishes them."""
        seed = self.stamp(number, self.rank)
        for at in cutlass.range(0, self.packs, unroll=1):
            words = pack_of(seed, self.index(at))
            prim.store_pack(target + self.offset(number, at), words, Uint32(1), PACK_NBYTES)

    @cute.jit
    def collect(self, number: Int32, source: Int64) -> Uint32:
        """Return how many words of what the other rank sent are wrong. Requires: its flag."""
        wrong = Uint32(0)
        seed = self.stamp(number, Int32(1) - self.rank)
        for at in cutlass.range(0, self.packs, unroll=1):
            words = prim.load_peer_pack(source + self.offset(number, at), Uint32(1), PACK_NBYTES)
            wrong = wrong + differing(words, pack_of(seed, self.index(at)))
        return wrong

    @cute.jit
    def meet(self, number: Int32) -> Uint32:
        """Barrier, flag to the other rank, wait for its flag, barrier; return 1 if it came.

        Participants: every thread of the block. Order: as Lane.exchange.
        """
        ok = prim.block_all(Uint32(1))
        if self.thread == Int32(0):
            place = self.flag_offset(number)
            prim.signal(self.peer + place, Uint64(Uint32(number)))
            ok = await_flag(self.own + place, Uint64(Uint32(number)), self.deadline)
        return prim.block_all(ok)

    @cute.jit
    def send_units(self, number: Int32) -> None:
        """Push this thread's tagged units of a round."""
        seed = self.stamp(number, self.rank)
        for at in cutlass.range(0, self.packs, unroll=1):
            words = pack_of(seed, self.index(at))
            address = self.peer + self.offset(number, at)
            prim.store_unit(address, (words[0], words[1]), Uint32(number), Uint32(1))

    @cute.jit
    def await_units(self, number: Int32) -> tuple:
        """Wait for this thread's units of a round; return 1 if all came, and the wrong words."""
        wrong = Uint32(0)
        ok = Uint32(1)
        seed = self.stamp(number, Int32(1) - self.rank)
        for at in cutlass.range(0, self.packs, unroll=1):
            data, came = self.await_unit(self.own + self.offset(number, at), Uint32(number))
            good = pack_of(seed, self.index(at))
            wrong = wrong + came * differing(data, (good[0], good[1]))
            ok = ok & came
        return ok, wrong

    @cute.jit
    def await_unit(self, address: Int64, tag: Uint32) -> tuple:
        """Wait until both halves of a unit carry a tag; return its data, and 1 if it came."""
        unit = (Uint32(0), Uint32(0), Uint32(0), Uint32(0))
        missing = Uint32(1)
        polls = Int32(0)
        ok = Uint32(1)
        while missing != Uint32(0) and ok != Uint32(0):
            unit = prim.load_unit(address)
            missing = (unit[1] ^ tag) | (unit[3] ^ tag)
            polls += Int32(1)
            if polls == Int32(POLLS_PER_CHECK):
                polls = Int32(0)
                ok = Uint32(prim.global_timer() < self.deadline)
        return (unit[0], unit[2]), ok | Uint32(missing == Uint32(0))

    @cute.jit
    def play(self, protocol: cutlass.Constexpr) -> None:
        """Play all rounds. Participants: every thread of the grid."""
        wrong = Uint32(0)
        ok = Uint32(1)
        done = Int32(0)
        while done < self.rounds and ok != Uint32(0):
            number = done + Int32(1)
            if cutlass.const_expr(protocol == "tagged"):
                self.send_units(number)
                came, bad = self.await_units(number)
                ok = prim.block_all(came)
                wrong = wrong + bad
            else:
                self.stage(number, self.peer if protocol == "push" else self.own)
                ok = self.meet(number)
                if ok != Uint32(0):
                    source = self.own if protocol == "push" else self.peer
                    wrong = wrong + self.collect(number, source)
            done = done + Int32(ok)
        self.report(done, wrong)

    @cute.jit
    def report(self, done: Int32, wrong: Uint32) -> None:
        """Write each thread's wrong words, and each block's time and rounds."""
        elapsed = prim.global_timer() - self.started
        place = self.block * Int32(THREADS) + self.thread
        prim.store_u32(self.result + Int64(RESULTS_OFFSET) + num.wide(place) * 4, wrong)
        if self.thread == Int32(0):
            head = self.result + num.wide(self.block) * RESULT_NBYTES
            prim.store_u64(head, Uint64(elapsed))
            prim.store_u64(head + Int64(8), Uint64(Uint32(done)))

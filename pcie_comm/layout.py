"""Every offset, stride, alignment and slot count of the memory that ranks share. Pure arithmetic.

Two allocations per channel and rank:

* the **slab**, which peers can address: header (magic, nonce, a mark of every peer that its owner
  checks before the first call), signal pad, two slots;
* the **control block**, which only its own rank addresses: poison word, epochs, peer table.

Device code gets these numbers as compile-time constants, the CPU path uses them through NumPy
views, so both sides agree by construction.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_WORLD = 16
"""Largest world size: sixteen ranks share one 128-byte line of flags per block."""

MAX_BLOCKS = 64
"""Largest grid of one launch: each block owns one flag per peer and one epoch word."""

TIMER_SHIFT = 10
"""Devices time waits in units of 1,024 ns: 32 bits last for 73 minutes."""

NUM_SLOTS = 2
"""Nobody is ever more than one epoch ahead (docs/protocol.md), so two slots suffice."""

PACK_NBYTES = 16
"""Widest load and store."""

LINE_NBYTES = 128

STAGED_ALIGNMENT = LINE_NBYTES // 2
"""Every staged tensor, and a block's part of it, starts on this boundary: tagged, on a line."""

SLAB_MAGIC = 0x5043_4945_434F_4D31
"""First word of every slab. A peer checks it, and the nonce behind it, after mapping."""

EPOCH_MASK = 0xFFFF_FFFF


def align_up(nbytes: int, alignment: int) -> int:
    """Round `nbytes` up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def divisor(number: int) -> int:
    """Return the 64-bit scalar by which a kernel divides by `number` with a product and a shift.

    `(n * (d & 0xFFFF_FFFF)) >> (d >> 32)` is n // number for 0 <= n < 2**31: with
    2**(k - 1) < number <= 2**k the low half is 2**(31 + k) / number rounded up, which is too large
    by less than number / 2**(31 + k) of itself (Granlund and Montgomery, 1994).
    """
    shift = 31 + (number - 1).bit_length()
    return shift << 32 | -(-(1 << shift) // number)


def next_epoch(epoch: int) -> int:
    """Return the epoch after `epoch`: 32 bits that wrap from the highest to 2.

    0 is no epoch: it is what fresh memory holds where a tag will be. 1 is left out at the wrap as
    well, so that odd and even, which choose the slot, go on taking turns.
    """
    return (epoch + 1) & EPOCH_MASK or 2


def slot_of(epoch: int) -> int:
    """Return the slot that an epoch uses: they take turns, across the wrap as well."""
    return epoch % NUM_SLOTS


def flag_value(epoch: int, signature: int) -> int:
    """Return the 8-byte flag of an epoch: signature in the high word, epoch in the low word.

    A signature is never 0, so no epoch's flag equals the zero a fresh slab holds.
    """
    return (signature << 32) | (epoch & EPOCH_MASK)


@dataclass(frozen=True)
class SlabLayout:
    """Offsets inside a slab, in bytes from its start.

    Attributes:
        slot_nbytes: Capacity of one slot.
        world_size: Number of ranks; push divides a slot into this many segments.
    """

    slot_nbytes: int
    world_size: int

    HEADER_NBYTES = LINE_NBYTES
    NONCE_OFFSET = 8
    NONCE_NBYTES = 16
    MARKS_OFFSET = 64
    MARK_NBYTES = 4
    FLAGS_OFFSET = HEADER_NBYTES
    FLAG_NBYTES = 8
    FLAG_ROW_NBYTES = MAX_WORLD * FLAG_NBYTES
    FLAG_SLOT_NBYTES = MAX_BLOCKS * FLAG_ROW_NBYTES
    SLOTS_OFFSET = FLAGS_OFFSET + NUM_SLOTS * FLAG_SLOT_NBYTES

    @property
    def nbytes(self) -> int:
        """Size of the whole slab: two slots, and two more for tagged units only."""
        return self.SLOTS_OFFSET + 2 * NUM_SLOTS * self.slot_nbytes

    @property
    def segment_nbytes(self) -> int:
        """What one rank may put into one slot."""
        return self.slot_nbytes // self.world_size // LINE_NBYTES * LINE_NBYTES

    def flag_offset(self, slot: int, block: int, writer: int) -> int:
        """Offset of the flag that rank `writer` raises for thread block `block`."""
        return (
            self.FLAGS_OFFSET
            + slot * self.FLAG_SLOT_NBYTES
            + block * self.FLAG_ROW_NBYTES
            + writer * self.FLAG_NBYTES
        )

    def slot_offset(self, slot: int) -> int:
        """Offset of slot `slot`."""
        return self.SLOTS_OFFSET + slot * self.slot_nbytes

    def tagged_slot_offset(self, slot: int) -> int:
        """Offset of a slot that holds tagged units and never anything that could look like one."""
        return self.slot_offset(slot) + NUM_SLOTS * self.slot_nbytes

    def tagged_offset(self, slot: int, writer: int) -> int:
        """Offset of the part of a tagged slot that rank `writer` fills."""
        return self.tagged_slot_offset(slot) + writer * self.segment_nbytes

    def segment_offset(self, slot: int, writer: int) -> int:
        """Offset of the part of a slot that rank `writer` fills under push."""
        return self.slot_offset(slot) + writer * self.segment_nbytes


class CountLayout:
    """Offsets inside a record of counters, in bytes; every counter is a u64. Only ever added to.

    What is counted are the waits for one peer, in ns, or the launches of the own rank, in bytes
    sent. total: their sum. longest: the largest. histogram u64[BUCKETS]: how many were from 2**b to
    2**(b + 1) - 1; the first bucket also has 0, the last also what is larger.
    """

    TOTAL = 0
    LONGEST = 8
    HISTOGRAM = 16
    BUCKETS = 32
    NBYTES = HISTOGRAM + 8 * BUCKETS


class ControlLayout:
    """Offsets inside a control block, in bytes. Written by its own rank only.

    poison u32: 0, or the failure code of the first launch that gave up; written by kernels.
    timeout u32: longest wait, in units of 1 << TIMER_SHIFT ns. abort u64, status u64: device
    addresses of pinned host memory. slot_nbytes u32 and segment_nbytes u32: of the slab. relays
    u32: 1 if slabs lie in host memory, see Lane.confirm. confirmed u64: the last flag that block 0
    saw of every peer of a tagged launch; written by kernels. mirror u64: added to an offset of own
    tagged segments, an address in this rank's device memory.
    peers u64[MAX_WORLD]: slab addresses as this rank sees them. epochs u32[MAX_BLOCKS][2]: two
    words per block, which every launch advances by one: the epoch of the last launch that
    concluded, and of the last that began. A launch that finds its own epoch in the second word
    overlaps with another one. staged u64[MAX_BLOCKS]: the flag of the last launch that a block has
    staged for, under push and pull. counts: a record of CountLayout per rank, written by kernels
    that count; that of the own rank is about launches.
    """

    POISON = 0
    SLOT_NBYTES = 4
    SEGMENT_NBYTES = 8
    RELAYS = 12
    TIMEOUT = 16
    ABORT = 24
    STATUS = 32
    CONFIRMED = 40
    MIRROR = 48
    PEERS = LINE_NBYTES
    EPOCHS = 2 * LINE_NBYTES
    EPOCH_NBYTES = 8
    BEGUN = 4
    STAGED = EPOCHS + align_up(EPOCH_NBYTES * MAX_BLOCKS, LINE_NBYTES)
    COUNTS = STAGED + align_up(8 * MAX_BLOCKS, LINE_NBYTES)
    NBYTES = COUNTS + align_up(MAX_WORLD * CountLayout.NBYTES, LINE_NBYTES)


class StatusLayout:
    """Offsets inside the status record, in bytes; pinned host memory, one record per channel.

    Written once, by the first device thread that gives up; `CODE` last. `ELAPSED` is in units of
    1 << TIMER_SHIFT ns. `ABORT` is the other direction: the host sets it, every waiting thread
    polls it.
    """

    CODE = 0
    PEER = 4
    EPOCH = 8
    WANTED_SIGNATURE = 12
    SEEN_EPOCH = 16
    SEEN_SIGNATURE = 20
    ELAPSED = 24
    BLOCK = 28
    ABORT = 64
    NBYTES = 128

    CODE_OK = 0
    CODE_TIMEOUT = 1
    CODE_ABORTED = 2
    CODE_MISMATCH = 3
    CODE_ABORTED_BY_HOST = (
        4  # the host's own mark; a waiting launch may overwrite it with its facts
    )
    CODE_BUSY = 5

"""Offsets of shared memory: nothing overlaps, all is aligned, every counter survives its wrap."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcie_comm.layout import (
    EPOCH_MASK,
    LINE_NBYTES,
    MAX_BLOCKS,
    MAX_WORLD,
    NUM_SLOTS,
    PACK_NBYTES,
    ControlLayout,
    SlabLayout,
    StatusLayout,
    align_up,
    divisor,
    flag_value,
    next_epoch,
    slot_of,
)

Region = tuple[int, int, str]
"""Start, length, what lies there."""

epochs = st.integers(0, EPOCH_MASK)
signatures = st.integers(1, 0xFFFF_FFFF)
layouts = st.builds(
    SlabLayout,
    slot_nbytes=st.integers(4096 // 128, (1 << 30) // 128).map(lambda lines: 128 * lines),
    world_size=st.integers(1, MAX_WORLD),
)


def slab_regions(layout: SlabLayout) -> Iterator[Region]:
    """Everything that somebody writes in a slab under push or tagged push: the finest division."""
    yield 0, layout.HEADER_NBYTES, "header"
    for slot in range(NUM_SLOTS):
        for block in range(MAX_BLOCKS):
            for writer in range(MAX_WORLD):
                offset = layout.flag_offset(slot, block, writer)
                yield offset, layout.FLAG_NBYTES, f"flag {slot} {block} {writer}"
        for writer in range(layout.world_size):
            offset = layout.segment_offset(slot, writer)
            yield offset, layout.segment_nbytes, f"segment {slot} {writer}"
            offset = layout.tagged_slot_offset(slot) + writer * layout.segment_nbytes
            yield offset, layout.segment_nbytes, f"tagged segment {slot} {writer}"


def overlaps(regions: Sequence[Region], nbytes: int) -> list[str]:
    """Name neighbours that overlap, and what leaves the allocation."""
    ordered = sorted(regions)
    faults = [
        f"{label} overlaps {after}"
        for (start, length, label), (next_start, _, after) in itertools.pairwise(ordered)
        if start + length > next_start
    ]
    return faults + [
        label for start, length, label in ordered if start < 0 or start + length > nbytes
    ]


@settings(deadline=None, max_examples=40)
@given(layouts)
def test_header_flags_and_segments_are_disjoint_and_inside(layout):
    regions = list(slab_regions(layout))
    assert overlaps(regions, layout.nbytes) == []
    assert len(regions) == len({start for start, _, _ in regions})


@settings(deadline=None, max_examples=100)
@given(layouts)
def test_offsets_are_aligned(layout):
    for slot in range(NUM_SLOTS):
        assert layout.slot_offset(slot) % LINE_NBYTES == 0
        assert layout.tagged_slot_offset(slot) % LINE_NBYTES == 0
        for writer in range(layout.world_size):
            assert layout.segment_offset(slot, writer) % LINE_NBYTES == 0
        for block in range(MAX_BLOCKS):
            offsets = [layout.flag_offset(slot, block, writer) for writer in range(MAX_WORLD)]
            assert all(offset % 8 == 0 for offset in offsets)
            assert len({offset // LINE_NBYTES for offset in offsets}) == 1, "one line per block"
    assert layout.segment_nbytes % PACK_NBYTES == 0
    assert layout.segment_nbytes > 0


@settings(deadline=None, max_examples=100)
@given(layouts)
def test_segments_of_a_slot_stay_in_it(layout):
    for slot in range(NUM_SLOTS):
        start = layout.slot_offset(slot)
        last = layout.segment_offset(slot, layout.world_size - 1) + layout.segment_nbytes
        assert layout.segment_offset(slot, 0) == start
        assert last <= start + layout.slot_nbytes
    wasted = layout.slot_nbytes - layout.world_size * layout.segment_nbytes
    assert wasted < layout.world_size * LINE_NBYTES
    assert layout.slot_offset(1) == layout.slot_offset(0) + layout.slot_nbytes
    assert layout.tagged_slot_offset(0) == layout.slot_offset(1) + layout.slot_nbytes
    assert layout.nbytes == layout.tagged_slot_offset(1) + layout.slot_nbytes


def test_exact_offsets():
    """What kernels were compiled with; another number here is another protocol version."""
    layout = SlabLayout(4 << 20, 8)
    assert layout.flag_offset(0, 0, 0) == 128
    assert layout.flag_offset(0, 0, 15) == 248
    assert layout.flag_offset(0, 63, 0) == 128 + 63 * 128
    assert layout.flag_offset(1, 0, 0) == 128 + 8192
    assert layout.slot_offset(0) == 16512
    assert layout.segment_nbytes == 512 << 10
    assert layout.segment_offset(1, 3) == 16512 + (4 << 20) + 3 * (512 << 10)
    assert layout.tagged_slot_offset(1) == 16512 + (12 << 20)
    assert layout.nbytes == 16512 + (16 << 20)
    assert SlabLayout(4096, 16).segment_nbytes == 256
    assert SlabLayout(4096, 3).segment_nbytes == 1280


class ShortFlagRows(SlabLayout):
    """Room for 8 writers where 16 may write."""

    FLAG_ROW_NBYTES = 8 * SlabLayout.FLAG_NBYTES


class ShortSlab(SlabLayout):
    @property
    def nbytes(self) -> int:
        return super().nbytes - 128


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(ShortFlagRows, "flag 0 0 8 overlaps flag 0 1 0"), (ShortSlab, "tagged segment 1 3")],
)
def test_the_checker_finds_a_wrong_layout(kind, fault):
    layout = kind(4096 * 4, 4)
    assert fault in overlaps(list(slab_regions(layout)), layout.nbytes)


def test_fields_of_control_block_and_status_record_are_disjoint():
    control = [
        (ControlLayout.POISON, 4, "poison"),
        (ControlLayout.SLOT_NBYTES, 4, "slot_nbytes"),
        (ControlLayout.SEGMENT_NBYTES, 4, "segment_nbytes"),
        (ControlLayout.RELAYS, 4, "relays"),
        (ControlLayout.CONFIRMED, 8, "confirmed"),
        (ControlLayout.MIRROR, 8, "mirror"),
        (ControlLayout.TIMEOUT, 4, "timeout"),
        (ControlLayout.ABORT, 8, "abort"),
        (ControlLayout.STATUS, 8, "status"),
        (ControlLayout.PEERS, 8 * MAX_WORLD, "peers"),
        (ControlLayout.EPOCHS, ControlLayout.EPOCH_NBYTES * MAX_BLOCKS, "epochs"),
        (ControlLayout.STAGED, 8 * MAX_BLOCKS, "staged"),
    ]
    header = [
        (0, SlabLayout.NONCE_OFFSET, "magic"),
        (SlabLayout.NONCE_OFFSET, SlabLayout.NONCE_NBYTES, "nonce"),
        (SlabLayout.MARKS_OFFSET, SlabLayout.MARK_NBYTES * MAX_WORLD, "marks"),
    ]
    assert overlaps(header, SlabLayout.HEADER_NBYTES) == []
    status = [
        (StatusLayout.CODE, 4, "code"),
        (StatusLayout.PEER, 4, "peer"),
        (StatusLayout.EPOCH, 4, "epoch"),
        (StatusLayout.WANTED_SIGNATURE, 4, "wanted_signature"),
        (StatusLayout.SEEN_EPOCH, 4, "seen_epoch"),
        (StatusLayout.SEEN_SIGNATURE, 4, "seen_signature"),
        (StatusLayout.ELAPSED, 4, "elapsed"),
        (StatusLayout.BLOCK, 4, "block"),
        (StatusLayout.ABORT, 4, "abort"),
    ]
    for fields, nbytes in ((control, ControlLayout.NBYTES), (status, StatusLayout.NBYTES)):
        assert overlaps(fields, nbytes) == []
        assert [label for start, length, label in fields if start % min(length, 8)] == []
    assert ControlLayout.NBYTES % LINE_NBYTES == 0
    codes = [value for name, value in vars(StatusLayout).items() if name.startswith("CODE_")]
    assert len(codes) == len(set(codes))


@given(st.integers(0, 1 << 40), st.sampled_from([1, 8, 16, 128, 4096]))
def test_align_up_is_the_next_multiple(nbytes, alignment):
    aligned = align_up(nbytes, alignment)
    assert aligned % alignment == 0
    assert nbytes <= aligned < nbytes + alignment


@given(st.integers(1, (1 << 31) - 1), st.integers(0, (1 << 31) - 1))
def test_a_divisor_divides(number, dividend):
    scalar = divisor(number)
    low, shift = scalar & 0xFFFF_FFFF, scalar >> 32
    assert 0 < scalar < 1 << 63
    for one in (dividend, (1 << 31) - 1, number - 1, dividend // number * number):
        assert one * low < 1 << 64
        assert (one * low) >> shift == one // number


# --- epochs, slots, flags ------------------------------------------------------------------------


def slots_from(
    start: int,
    selector: Callable[[int], int] = slot_of,
    advance: Callable[[int], int] = next_epoch,
) -> list[int]:
    """The slots of the six calls after epoch `start`."""
    epoch, slots = start & EPOCH_MASK, []
    for _ in range(6):
        epoch = advance(epoch)
        slots.append(selector(epoch))
    return slots


def signed_remainder(epoch: int) -> int:
    """What C makes of `epoch % 2` where epoch is an int32."""
    signed = epoch - (1 << 32) if epoch >> 31 else epoch
    return -(-signed % 2) if signed < 0 else signed % 2


@pytest.mark.parametrize("start", [0, 2**31 - 2, 2**31 - 1, 2**32 - 3, 2**32 - 2, 2**32 - 1])
def test_b09_slots_alternate_across_the_wrap(start):
    first = (start + 1) % 2
    assert slots_from(start) == [first, 1 - first] * 3


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 4])
def test_b09_a_signed_selector_is_caught(start):
    assert -1 in slots_from(start, selector=signed_remainder)


@pytest.mark.parametrize("lowest", [1, 3])
def test_b09_a_wrap_to_an_odd_epoch_is_caught(lowest):
    slots = slots_from(2**32 - 3, advance=lambda epoch: (epoch + 1) & EPOCH_MASK or lowest)
    assert any(left == right for left, right in itertools.pairwise(slots))


@given(epochs)
def test_epochs_stay_in_32_bits_and_are_never_0(epoch):
    """0 is what fresh memory holds, where a flag or a tag will be."""
    after = next_epoch(epoch)
    assert 1 <= after <= EPOCH_MASK
    assert slot_of(after) == 1 - slot_of(epoch)
    assert after == epoch + 1 or (epoch, after) == (EPOCH_MASK, 2)


def test_the_counter_wraps():
    assert next_epoch(2**31 - 1) == 2**31
    assert next_epoch(2**32 - 2) == 2**32 - 1
    assert next_epoch(2**32 - 1) == 2


@given(epochs, signatures, epochs, signatures)
def test_a_flag_names_one_epoch_and_one_operation(epoch, signature, other_epoch, other_signature):
    value = flag_value(epoch, signature)
    assert 0 < value < 1 << 64
    assert (value >> 32, value & EPOCH_MASK) == (signature, epoch)
    same = (epoch, signature) == (other_epoch, other_signature)
    assert (flag_value(other_epoch, other_signature) == value) == same


@given(epochs, signatures)
def test_the_flag_that_a_slot_holds_is_never_the_next_one(epoch, signature):
    """A slot's flag was last written two epochs ago."""
    two_later = next_epoch(next_epoch(epoch))
    assert flag_value(two_later, signature) != flag_value(epoch, signature)

"""Guard bytes in slabs: whether a kernel staged more than its plan declares. Pure.

What lies outside of the segments is painted before a call, and must be so afterwards. A kernel that
writes beyond the slab is not found, as with any CUDA kernel; compute-sanitizer finds it.
"""

from __future__ import annotations

import numpy as np

from ..layout import NUM_SLOTS, SlabLayout

GUARD = 0xA5
"""As an epoch, 0xA5A5A5A5 is one that no test reaches: painted units are none of a tagged push."""


def paint(slab: memoryview | bytearray, layout: SlabLayout) -> None:
    """Fill the slots of a slab with guard bytes. Nobody may be in a call."""
    nbytes = layout.nbytes - layout.SLOTS_OFFSET
    slab[layout.SLOTS_OFFSET : layout.nbytes] = bytes([GUARD]) * nbytes


def trespasses(slab: memoryview | bytearray, layout: SlabLayout, staged_nbytes: int) -> list[str]:
    """Say where a painted slab was written to outside of what each rank may stage.

    Args:
        slab: After a call.
        layout: Of the slab.
        staged_nbytes: That the plan declares.
    """
    touched = np.frombuffer(bytes(slab), dtype=np.uint8) != GUARD
    touched[: layout.SLOTS_OFFSET] = False
    for slot in range(NUM_SLOTS):
        for writer in range(layout.world_size):
            for offset in (layout.segment_offset, layout.tagged_offset):
                begin = offset(slot, writer)
                touched[begin : begin + staged_nbytes] = False
    found = []
    for place in touched.nonzero()[0]:
        within = (int(place) - layout.SLOTS_OFFSET) % layout.slot_nbytes % layout.segment_nbytes
        found.append(f"byte {within} of a segment, staged_nbytes={staged_nbytes}")
    return found

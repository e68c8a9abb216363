"""Sizes that the probes' kernels and the host agree on. Pure."""

from __future__ import annotations

from ..layout import LINE_NBYTES

THREADS = 256
"""Of a block."""

MOST_BLOCKS = 32
"""Of a launch. Few, so that other work on the device goes on."""

PACK_NBYTES = 16
UNIT_DATA_NBYTES = 8
"""Payload of a tagged unit, which is as large as a pack."""

IN_FLIGHT = 4
"""Loads that a copying thread issues before its first store."""

POLLS_PER_CHECK = 1024
"""Polls between two looks at the clock."""

FLAG_NBYTES = LINE_NBYTES
"""A line for each flag."""

PAYLOAD_OFFSET = 2 * MOST_BLOCKS * FLAG_NBYTES
"""Of a player's memory; its flags come first, two for each block."""

RESULT_NBYTES = 16
"""Nanoseconds and rounds, 8 bytes each, for each block."""

RESULTS_OFFSET = MOST_BLOCKS * RESULT_NBYTES
"""Where each thread's count of wrong words begins."""

COUNTS_NBYTES = MOST_BLOCKS * THREADS * 8
"""What `check` writes: two counts a thread."""

RESULT_SPACE_NBYTES = RESULTS_OFFSET + MOST_BLOCKS * THREADS * 4


def player_nbytes(blocks: int, packs: int) -> int:
    """Return the memory that a player needs: flags and two slots."""
    return PAYLOAD_OFFSET + 2 * blocks * packs * THREADS * PACK_NBYTES

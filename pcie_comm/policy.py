"""Which protocol and which grid a call gets. Pure, and the same answer on all ranks.

The numbers come from measurement; docs/performance.md shows it.
"""

from __future__ import annotations

GATHER_BLOCK_NBYTES = 8192
"""Gathered bytes that one thread block moves before a second one pays."""


def choose_protocol(requested: str, transport: str) -> str:
    """Return `push` or `pull`.

    Push wins or ties on every memory measured so far: a read over PCIe is a round trip, a write is
    not, and in pinned host memory pull reads every byte over the link once per rank.
    """
    return "push" if requested == "auto" else requested


def gather_blocks(gathered_nbytes: int, max_blocks: int) -> int:
    """Return the grid of a gather whose outputs hold `gathered_nbytes` in all."""
    return max(1, min(max_blocks, -(-gathered_nbytes // GATHER_BLOCK_NBYTES)))


def split_fused_grid(rows: int, gathered_nbytes: int, max_blocks: int) -> tuple[int, int]:
    """Return router blocks and gather blocks of a fused launch.

    Router blocks come first: a row costs a block about as long as the gather of many kilobytes.
    """
    gather = min(gather_blocks(gathered_nbytes, max_blocks), max(1, max_blocks // 2))
    return max(1, min(rows, max_blocks - gather)), gather

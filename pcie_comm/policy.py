"""Which protocol and which grid a call gets. Pure, and the same answer on all ranks.

The numbers come from measurement; docs/performance.md shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def choose_transport(
    requested: str, *, on_gpu: bool, one_process: bool, peers_reachable: bool
) -> tuple[str, str]:
    """Return the transport of a group, and why.

    Args:
        requested: `auto`, or a name, which is then the answer.
        on_gpu: Every rank has a GPU; False: none has.
        one_process: All ranks are threads of one process.
        peers_reachable: Every rank's device can address every other's.
    """
    if requested != "auto":
        return requested, "asked for"
    if not on_gpu:
        return "host_shm", "no GPU takes part"
    if not peers_reachable:
        return "host_pinned", "the devices cannot address each other's memory"
    if one_process:
        return "cuda_local", "all ranks are threads of one process"
    return "cuda_ipc", "one process per rank, peer access"


def resident_budget(multiprocessors: Sequence[int], sharers: Sequence[int], limit: int) -> int:
    """Return the largest grid that is resident on every rank's device at once.

    One block per multiprocessor is counted, whatever the kernel's occupancy: ranks that share a
    device divide it, and room is left for the user's own kernels.

    Args:
        multiprocessors: Per rank, of its device.
        sharers: Per rank, how many ranks of the group use its device.
        limit: Largest grid the channel has flags for.
    """
    shares = (count // users for count, users in zip(multiprocessors, sharers, strict=True))
    return max(2, min(limit, *shares))

"""Which protocol and which grid a call gets. Pure, and the same answer on all ranks.

The numbers come from measurement; docs/performance.md shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

GATHER_BLOCK_NBYTES = 8192
"""Gathered bytes that one thread block moves before a second one pays."""

TAGGED_BLOCK_UNITS = 256
"""Units of 8 data bytes that one thread block receives before a second one pays: one a thread."""

ROUTER_BLOCK_TASKS = 4
"""Groups that one router block ranks at a time: a pair of its warps each."""

TAGGED_LIMIT_NBYTES = 65_536
"""Bytes a rank receives in all up to which tagged push is the fastest; see tagged_limit."""


PATIENCE_NBYTES = 65_536
"""Bytes a rank receives in pinned host memory from which it polls flags first; see patience."""


def protocols_of(requested: str) -> tuple[str, ...]:
    """Return the protocols that calls of a group may use; see choose_protocol."""
    return ("tagged", "push") if requested in ("auto", "tagged") else (requested,)


def tagged_limit(transport: str, sharers: int) -> int:
    """Return the bytes a rank may receive in all for tagged push to be worth it.

    In pinned host memory every byte crosses the link, and tagged push sends twice the bytes; ranks
    that share a device share its link.
    """
    return TAGGED_LIMIT_NBYTES // sharers if transport == "host_pinned" else TAGGED_LIMIT_NBYTES


def choose_protocol(
    requested: str,
    staged_nbytes: int,
    world_size: int,
    segment_nbytes: int,
    limit_nbytes: int = TAGGED_LIMIT_NBYTES,
) -> str:
    """Return `tagged`, `push` or `pull` for a call in which each rank stages `staged_nbytes`.

    Tagged push saves a fence and a trip and sends twice the bytes, so it serves small calls, and
    only what fits its slot. Push wins or ties against pull on every memory measured so far: a read
    over PCIe is a round trip, a write is not.
    """
    fits = 2 * staged_nbytes <= segment_nbytes
    if requested == "auto":
        small = staged_nbytes * world_size <= limit_nbytes
        return "tagged" if small and fits else "push"
    if requested == "tagged" and not fits:
        return "push"
    return requested


def gather_blocks(protocol: str, staged_nbytes: int, world_size: int, max_blocks: int) -> int:
    """Return the grid of a gather in which each rank stages `staged_nbytes`."""
    if protocol == "tagged":
        received = staged_nbytes * (world_size - 1)
        wanted = -(-received // (8 * TAGGED_BLOCK_UNITS))
    else:
        wanted = -(-staged_nbytes * world_size // GATHER_BLOCK_NBYTES)
    return max(1, min(max_blocks, wanted))


def patience(transport: str, sharers: int) -> int:
    """Return the received bytes from which a rank waits for flags before it polls for payload.

    In pinned host memory a poll of the payload is as much traffic as the payload. With much of it
    on one link, polls that come too early delay what they wait for.
    """
    return PATIENCE_NBYTES // sharers if transport == "host_pinned" else sys.maxsize


def is_patient(staged_nbytes: int, world_size: int, limit_nbytes: int) -> bool:
    """Tell whether a call in which each rank stages `staged_nbytes` is over the limit."""
    return staged_nbytes * world_size > limit_nbytes


@dataclass(frozen=True)
class FusedGrid:
    """How a fused launch is divided. Router blocks come first in the grid.

    Attributes:
        router_blocks, gather_blocks: How many of each.
        rows_per_block: Rows whose 16 experts a router block selects.
        tasks_per_block: Groups of experts that it ranks for the peers; a row has some per rank.
    """

    router_blocks: int
    gather_blocks: int
    rows_per_block: int
    tasks_per_block: int


def split_fused_grid(
    protocol: str, rows: int, groups: int, down_nbytes: int, world_size: int, max_blocks: int
) -> FusedGrid:
    """Return the grid of a fused launch; `groups` are what one rank owns of a row.

    Under push and pull a block ranks the groups of its own rows: what it collects is what the same
    block of its peers staged. Units carry their own tags, so under tagged push a row's groups may
    be spread over blocks, which pays: ranking a group keeps a fourth of a multiprocessor busy.
    """
    gather = gather_blocks(protocol, down_nbytes, world_size, max(1, max_blocks // 2))
    tasks = rows * groups
    wanted = max(rows, -(-tasks // ROUTER_BLOCK_TASKS)) if protocol == "tagged" else rows
    router = max(1, min(wanted, max_blocks - gather))
    rows_per_block = -(-rows // router)
    spread = -(-tasks // router) if protocol == "tagged" else rows_per_block * groups
    return FusedGrid(router, gather, rows_per_block, spread)


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


def resident_budget(
    multiprocessors: Sequence[int], sharers: Sequence[int], overlap: bool, limit: int
) -> int:
    """Return the largest grid that is resident on every rank's device at once.

    One block per multiprocessor is counted, whatever the kernel's occupancy: ranks that share a
    device divide it, and room is left for the user's own kernels. With overlapping launches a rank
    may hold places for two: the launch that runs, and the next one, which waits for it. On a shared
    device the next one could take the place that a peer needs, so both are counted there.

    Args:
        multiprocessors: Per rank, of its device.
        sharers: Per rank, how many ranks of the group use its device.
        overlap: Whether launches may overlap.
        limit: Largest grid the channel has flags for.
    """
    shares = (
        count // (users * 2 if overlap and users > 1 else users)
        for count, users in zip(multiprocessors, sharers, strict=True)
    )
    return max(2, min(limit, *shares))

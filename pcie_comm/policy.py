"""Which protocol and which grid a call gets. Pure, and the same answer on all ranks.

The numbers come from measurement; docs/performance.md shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .crossovers import Limits
from .layout import MAX_BLOCKS, PACK_NBYTES, STAGED_ALIGNMENT, align_up

GATHER_BLOCK_NBYTES = 8192
"""Gathered bytes that one thread block moves before a second one pays."""

TAGGED_BLOCK_UNITS = 256
"""Units of 8 data bytes that one thread block receives before a second one pays: one a thread."""

BLOCKS_PER_UNIT = 2
"""Blocks of one kernel that a multiprocessor holds at least."""

FREE_UNITS = 4
"""Multiprocessors of a shared device that no communicating launch occupies."""

ROUTER_BLOCK_TASKS = 2
"""Groups that one router block ranks before a second one pays; it has warps for four at a time."""


TWO_SHOT_NBYTES = 1 << 20
"""Bytes that a sum in two shots must spare each rank; less did not pay for a launch on an H200."""


def shots_of_sum(nbytes: int, world_size: int, segment_nbytes: int) -> int:
    """Return in how many shots a sum of tensors of `nbytes` is made: 1 or 2; see two_shots.py."""
    spared = nbytes * (world_size - 1) * (world_size - 2) // world_size
    wanted = nbytes > segment_nbytes or spared >= TWO_SHOT_NBYTES
    possible = world_size > 2 and segment_nbytes >= world_size * STAGED_ALIGNMENT
    return 2 if wanted and possible else 1


def protocols_of(requested: str, limits: Limits) -> tuple[str, ...]:
    """Return the protocols that calls of a group may use; see choose_protocol."""
    if requested == "auto" and limits.push_nbytes is not None:
        return ("tagged", "push", "pull")
    return ("tagged", "push") if requested in ("auto", "tagged") else (requested,)


def choose_protocol(
    requested: str,
    staged_nbytes: int,
    world_size: int,
    segment_nbytes: int,
    limits: Limits,
) -> str:
    """Return `tagged`, `push` or `pull` for a call in which each rank stages `staged_nbytes`.

    Tagged push saves a fence and a trip and sends twice the bytes, so it serves small calls, and
    only what fits its slot. Push wins or ties against pull on every memory measured by us: a read
    over PCIe is a round trip, a write is not. Limits from a report of a host may say otherwise.
    """
    fits = 2 * staged_nbytes <= segment_nbytes
    if requested == "auto":
        received = staged_nbytes * world_size
        if received <= limits.tagged_nbytes and fits:
            return "tagged"
        most = limits.push_nbytes
        return "push" if most is None or received <= most else "pull"
    if requested == "tagged" and not fits:
        return "push"
    return requested


def explain(requested: str, chosen: str, received_nbytes: int, limits: Limits, source: str) -> str:
    """Return why calls of a size got their protocol: what choose_protocol went by, in words.

    Args:
        requested: `auto`, or what was asked for.
        chosen: What choose_protocol returned.
        received_nbytes: By a rank in all, its own included; tags not counted.
        limits: That choose_protocol was given.
        source: Of the limits.
    """
    if requested == chosen:
        return f"{chosen}: asked for"
    if requested != "auto":
        return f"{chosen}: asked for {requested}, which does not fit its slot"
    facts = f"{chosen}: receives {received_nbytes} bytes in all"
    if chosen == "tagged":
        return f"{facts}, at most {limits.tagged_nbytes} ({source})"
    if received_nbytes <= limits.tagged_nbytes:
        return f"{facts}, too many for a slot of tagged push"
    if limits.push_nbytes is None:
        return f"{facts}, more than {limits.tagged_nbytes}; no limit to push ({source})"
    side = "at most" if chosen == "push" else "more than"
    return f"{facts}, more than {limits.tagged_nbytes}, {side} {limits.push_nbytes} ({source})"


@dataclass(frozen=True)
class GatherGrid:
    """How a gather is divided.

    Attributes:
        blocks: Of the grid.
        chunks: Per tensor, the bytes of its staged form that one block moves.
    """

    blocks: int
    chunks: tuple[int, ...]


def gather_grid(
    protocol: str, sizes: Sequence[int], world_size: int, max_blocks: int
) -> GatherGrid:
    """Return the grid of a gather in which each rank stages tensors of `sizes` bytes.

    Under tagged push a thread receives one unit, if enough blocks are resident. Chunks are whole
    lines of units then, so that no line is written by two blocks, unless smaller ones save a round.
    """
    if protocol != "tagged":
        wanted = -(-sum(sizes) * world_size // GATHER_BLOCK_NBYTES)
        return _chunked(sizes, max(1, min(max_blocks, wanted)), STAGED_ALIGNMENT)
    received = sum(sizes) * (world_size - 1)
    wanted = max(1, min(max_blocks, -(-received // (8 * TAGGED_BLOCK_UNITS))))
    for alignment in (STAGED_ALIGNMENT, PACK_NBYTES):
        for blocks in range(wanted, max_blocks + 1):
            grid = _chunked(sizes, blocks, alignment)
            if sum(grid.chunks) * (world_size - 1) <= 8 * TAGGED_BLOCK_UNITS:
                return grid
    return _chunked(sizes, wanted, STAGED_ALIGNMENT)


def _chunked(sizes: Sequence[int], blocks: int, alignment: int) -> GatherGrid:
    chunks = tuple(align_up(max(1, -(-size // blocks)), alignment) for size in sizes)
    return GatherGrid(blocks, chunks)


def pace(protocol: str, staged_nbytes: int, world_size: int, blocks: int, limits: Limits) -> int:
    """Return how the blocks that gather spare the link to pinned host memory; 0: not at all.

    Tagged push: 1 if they poll their peers' flags before the payload. A poll of the payload is as
    much traffic as the payload, and with much of it polls that come too early delay what they wait
    for. Push: how many of `blocks` stage first. The next as many stage when those have, and so on
    in waves: one wave's payload comes back over the link while the next one's goes out.
    """
    received = staged_nbytes * world_size
    if protocol == "tagged":
        return int(limits.patience_nbytes is not None and received > limits.patience_nbytes)
    if protocol != "push" or limits.wave_nbytes is None or world_size == 1:
        return 0
    wave = -(-blocks // max(1, received // max(1, limits.wave_nbytes)))
    return wave if wave < blocks else 0


@dataclass(frozen=True)
class FusedGrid:
    """How a fused launch is divided. Router blocks come first in the grid.

    Attributes:
        router_blocks: How many select.
        gather: How the others gather.
        rows_per_block: Rows whose 16 experts a router block selects.
        tasks_per_block: Groups of experts that it ranks for the peers; a row has some per rank.
    """

    router_blocks: int
    gather: GatherGrid
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
    tasks = rows * groups
    wanted = max(rows, -(-tasks // ROUTER_BLOCK_TASKS)) if protocol == "tagged" else rows
    rest = max_blocks - min(max(1, wanted), max_blocks // 2)
    gather = gather_grid(protocol, (down_nbytes,), world_size, max(1, rest))
    router = max(1, min(wanted, max_blocks - gather.blocks))
    rows_per_block = -(-rows // router)
    spread = -(-tasks // router) if protocol == "tagged" else rows_per_block * groups
    return FusedGrid(router, gather, rows_per_block, spread)


def choose_transport(
    requested: str,
    *,
    on_gpu: bool,
    one_process: bool,
    peers_reachable: bool,
    veto: str | None = None,
    pins: bool = True,
    hosts: int = 1,
) -> tuple[str, str]:
    """Return the transport of a group, and why.

    Args:
        requested: `auto`, or a name, which is then the answer.
        on_gpu: Every rank has a GPU; False: none has.
        one_process: All ranks are threads of one process.
        peers_reachable: Every rank's device can address every other's.
        veto: Why the advice for this host forbids peer access of two of the devices, or None.
        pins: Every device can address pinned host memory.
        hosts: Number of hosts. Over several of them `requested` is what runs inside each.
    """
    if hosts > 1 and requested != "torch_dist":
        return "torch_dist", f"the ranks are on {hosts} hosts; inside each: {requested}"
    if requested != "auto":
        return requested, "asked for"
    if not on_gpu:
        return "host_shm", "no GPU takes part"
    if veto is None and not peers_reachable:
        veto = "the devices cannot address each other's memory"
    if veto is not None and not pins:
        return "torch_dist", f"{veto}, and a device cannot address pinned host memory"
    if veto is not None:
        return "host_pinned", veto
    if one_process:
        return "cuda_local", "all ranks are threads of one process"
    return "cuda_ipc", "one process per rank, peer access"


def launches_at_once(sharers: int, overlap: bool) -> int:
    """Return how many launches may hold places on a device that `sharers` ranks use."""
    return sharers * 2 if overlap and sharers > 1 else sharers


def places(multiprocessors: int, per_unit: int, spared: bool) -> int:
    """Return how many blocks ranks may keep on a device together; see resident_budget.

    Args:
        multiprocessors: Of the device.
        per_unit: Blocks that one of them holds.
        spared: Whether some must stay empty.
    """
    return multiprocessors - FREE_UNITS if spared else multiprocessors * per_unit


def resident_budget(
    multiprocessors: Sequence[int], sharers: Sequence[int], overlap: bool, wanted: int | None
) -> int:
    """Return the largest grid that is resident on every rank's device at once.

    A rank with a device of its own may fill it: BLOCKS_PER_UNIT blocks per multiprocessor, which
    every built-in kernel fits; the engine refuses another that does not. What its launch waits for
    runs elsewhere.

    Ranks that share a device divide it so that some multiprocessors are always empty: while ranks
    wait in a launch, another one must be able to run whatever comes before its own, and two blocks
    fit one multiprocessor only as their registers and its division into cache and shared memory
    allow. With overlapping launches a rank may hold places for two there: the launch that runs, and
    the next one, which waits for it.

    Args:
        multiprocessors: Per rank, of its device.
        sharers: Per rank, how many ranks of the group use its device.
        overlap: Whether launches may overlap.
        wanted: Largest grid that the user wants, who then answers for empty multiprocessors; None:
            the largest that the channel has flags for.
    """
    shares = (
        places(count, BLOCKS_PER_UNIT, users > 1 and wanted is None)
        // launches_at_once(users, overlap)
        for count, users in zip(multiprocessors, sharers, strict=True)
    )
    return max(2, min(wanted or MAX_BLOCKS, *shares))

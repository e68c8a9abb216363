"""Two kernels side by side that exchange bytes or a flag, on two streams of this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ..kernels.collective import KernelKey
from ..topology.probed import HOST, PINNED
from .gpu import Gpu
from .lab import Lab, zero_by_owner
from .region import Region
from .sizes import (
    MOST_BLOCKS,
    PACK_NBYTES,
    RESULT_SPACE_NBYTES,
    RESULTS_OFFSET,
    THREADS,
    UNIT_DATA_NBYTES,
    player_nbytes,
)

CHUNK_NBYTES = 8192
"""Staged bytes before a second block takes part."""


@dataclass(frozen=True)
class Game:
    """What two ranks play.

    Attributes:
        gpus: Their GPUs, rank 0 first; twice the same if they share one.
        memory: Where their memory lies: `vram` or `pinned`.
        rounds: How many.
        limit_s: After which they give up, in seconds.
    """

    gpus: tuple[str, str]
    memory: str
    rounds: int
    limit_s: float


@dataclass(frozen=True)
class Played:
    """How a rank fared.

    Attributes:
        done: Rounds that all its blocks came through.
        wrong: Words that were not what the other rank sent.
        words: That it received.
        elapsed_ns: From its start to its end.
    """

    done: int
    wrong: int
    words: int
    elapsed_ns: int


def grid_for(nbytes: int) -> int:
    """Return the blocks that exchange `nbytes` a rank."""
    return max(1, min(MOST_BLOCKS, nbytes // CHUNK_NBYTES))


def exchange(lab: Lab, game: Game, protocol: str, nbytes: int) -> tuple[Played, Played]:
    """Let two ranks exchange `nbytes` each, by a protocol, again and again; waits.

    Args:
        lab: Has the GPUs.
        game: Who and how often.
        protocol: `pull`, `push` or `tagged`.
        nbytes: A multiple of 4096; above 8192 a multiple of 8192, above 256 KiB of 256 KiB.

    Raises:
        UnsupportedError, CudaError: A rank cannot address the other's memory; a launch failed.
    """
    blocks = grid_for(nbytes)
    unit = UNIT_DATA_NBYTES if protocol == "tagged" else PACK_NBYTES
    packs = nbytes // (blocks * THREADS * unit)
    seed, limit_ns = lab.seed(), int(game.limit_s * 1e9)
    key = KernelKey("probe_exchange", (protocol,))
    scalars = (game.rounds, packs, seed, limit_ns)
    found = _side_by_side(lab, game, key, scalars, (blocks, player_nbytes(blocks, packs)))
    words = nbytes // 4
    return (_played(found[0], blocks, words), _played(found[1], blocks, words))


def ping_pong(lab: Lab, game: Game) -> tuple[Played, Played]:
    """Let two ranks send a flag to and fro; waits. Raises: see exchange."""
    key = KernelKey("probe_ping_pong")
    scalars = (game.rounds, int(game.limit_s * 1e9))
    found = _side_by_side(lab, game, key, scalars, (1, player_nbytes(1, 1)))
    return _played(found[0], 1, 0), _played(found[1], 1, 0)


def _side_by_side(
    lab: Lab, game: Game, key: KernelKey, scalars: Sequence[int], size: tuple[int, int]
) -> list[np.ndarray]:
    """Run a kernel on both ranks at once; return their results, as bytes."""
    lab.check_side_by_side()
    blocks, nbytes = size
    gpus = [lab.gpu(name) for name in game.gpus]
    with lab.memory() as memory:
        slabs, results = [], []
        for gpu in gpus:
            place = HOST if game.memory == PINNED else gpu.name
            slabs.append(memory.of(place, nbytes, *gpus))
            results.append(memory.of(gpu.name, RESULT_SPACE_NBYTES, gpu))
        for region in (*slabs, *results):
            zero_by_owner(region)
        ends = [(*slabs, results[0]), (*slabs[::-1], results[1])]
        _launch_both(gpus, key, ends, scalars, blocks)
        return [
            gpu.read(result.seen_by(gpu), RESULT_SPACE_NBYTES)
            for gpu, result in zip(gpus, results, strict=True)
        ]


def _launch_both(
    gpus: Sequence[Gpu],
    key: KernelKey,
    regions: Sequence[tuple[Region, ...]],
    scalars: Sequence[int],
    blocks: int,
) -> None:
    """Launch one after the other and wait for both; all is allocated before.

    `regions` are own, peer's and result, for each rank.
    """
    for gpu in gpus:
        gpu.prepare(key)
    streams = [gpu.lane(1 + rank) for rank, gpu in enumerate(gpus)]
    with ExitStack() as stack:
        for rank, gpu in enumerate(gpus):
            addresses = [region.seen_by(gpu) for region in regions[rank]]
            stack.callback(gpu.synchronize, streams[rank])
            gpu.launch(key, addresses, scalars, grid=blocks, stream=streams[rank], rank=rank)


def _played(result: np.ndarray, blocks: int, words: int) -> Played:
    heads = result[: blocks * 16].view(np.uint64).reshape(blocks, 2)
    wrong = result[RESULTS_OFFSET : RESULTS_OFFSET + blocks * THREADS * 4].view(np.uint32)
    done = int(heads[:, 1].min())
    return Played(done, int(wrong.sum(dtype=np.uint64)), words * done, int(heads[:, 0].max()))

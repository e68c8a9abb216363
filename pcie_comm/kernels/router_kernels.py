"""The selection by warps: pairs of them, a row's last contest, and the stand-alone kernel.

The levels are those of topk.py; the fused kernel (fused_kernels.py) uses the same parts.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute

from . import primitives as prim
from . import scalars as num
from .protocol import WARP, DeviceObject, Lane, LaneArgs
from .router_spec import RouterSpec
from .topk import (
    IMAGES_NBYTES,
    KEYS_NBYTES,
    LIST_NBYTES,
    LISTS,
    RECORD_NBYTES,
    TOP_K,
    Candidate,
    emit,
    judge,
    place_image,
    place_record,
    rank_by_counting,
    rank_in_others,
)

PAIR = 2 * WARP
NUM_GROUPS = 16
"""Lists a row is merged from: 16, of which the last two stay empty with 14 groups."""

QUARTERS = 4
WORKERS = QUARTERS * PAIR
"""Threads of a router block that select: a pair of warps per quarter, one candidate a lane."""

BARRIER = QUARTERS + 1
"""Named barrier of the workers; those below are the pairs'."""

PAIR_NBYTES = LISTS * (KEYS_NBYTES + IMAGES_NBYTES) + LIST_NBYTES


def sync_workers() -> None:
    """Barrier of the first WORKERS threads of a block."""
    cute.arch.barrier(barrier_id=Int32(BARRIER), number_of_threads=WORKERS)


@cute.jit
def clear_ids(lane: Lane, ids: Int64, first: Int32, last: Int32, nbytes: cutlass.Constexpr) -> None:
    """Write 0 for the ids of rows of a call that gave up, `nbytes` a row; see emit.

    Participants: any threads; those of a block with rows.
    """
    words = nbytes // 4
    if lane.thread < Int32(WORKERS):
        for word in cutlass.range(first * words + lane.thread, last * words, WORKERS, unroll=1):
            prim.store_u32(ids + num.wide(word) * 4, Uint32(0))


class Pair(DeviceObject):
    """Two neighbouring warps that work on one group or quarter; shared memory of their own.

    Attributes:
        index: Which pair of the block.
        place: Of a lane within the pair, 0 to 63. list, seat: the same as list and place in it.
        images: Four sorted lists.
        records: 16 records, the result.
    """

    def __init__(self, pairs: int) -> None:
        warp = cute.arch.warp_idx()
        self.index = warp >> Int32(1)
        self.place = (warp & Int32(1)) * Int32(WARP) + cute.arch.lane_idx()
        self.list = self.place >> Int32(4)
        self.seat = self.place & Int32(TOP_K - 1)
        self.whole_block = pairs > QUARTERS
        area = cute.arch.alloc_smem(Uint64, pairs * PAIR_NBYTES // 8, 16)
        self.keys = prim.shared_address(area) + self.index * Int32(PAIR_NBYTES)
        self.images = self.keys + Int32(LISTS * KEYS_NBYTES)
        self.records = self.images + Int32(LISTS * IMAGES_NBYTES)

    def sync(self) -> None:
        """Barrier of the pair; of the block where there are more pairs than named barriers."""
        if self.whole_block:
            cute.arch.sync_threads()
        else:
            cute.arch.barrier(barrier_id=self.index + Int32(1), number_of_threads=PAIR)

    @cute.jit
    def rank_group(self, image: Uint32, kept: cutlass.Constexpr = TOP_K) -> Int32:
        """Levels 1 and 2: return the rank of a lane's candidate in its group, if below `kept`."""
        rank = rank_by_counting(self.keys + self.list * Int32(KEYS_NBYTES), self.seat, image)
        place_image(self.images + self.list * Int32(IMAGES_NBYTES), rank, image)
        self.sync()
        return rank_in_others(self.images, self.list, rank, image, kept=kept)


class Final(DeviceObject):
    """Level 4: shared memory of one row, four sorted lists and the result."""

    def __init__(self) -> None:
        area = cute.arch.alloc_smem(Uint64, (LISTS * IMAGES_NBYTES + LIST_NBYTES) // 8, 16)
        self.images = prim.shared_address(area)
        self.records = self.images + Int32(LISTS * IMAGES_NBYTES)

    def enter(self, quarter: Int32, rank: Int32, image: Uint32) -> None:
        """Put a candidate at its rank in its quarter. A barrier of the workers must follow."""
        place_image(self.images + quarter * Int32(IMAGES_NBYTES), rank, image)

    @cute.jit
    def finish(
        self,
        quarter: Int32,
        rank: Int32,
        candidate: Candidate,
        outputs: tuple,
        enabled: Uint32,
        spec: cutlass.Constexpr,
    ) -> None:
        """Rank the four quarters' best and write a row's weights and ids if `enabled` is not 0.

        Participants: all workers.
        """
        rank = rank_in_others(self.images, quarter, rank, candidate.image)
        place_record(self.records, rank, candidate.record)
        sync_workers()
        if cute.arch.warp_idx() == Int32(0):
            if enabled != Uint32(0):
                emit(self.records, cute.arch.lane_idx(), outputs[0], outputs[1], spec)


def router_kernel(spec: RouterSpec, threads: int) -> Any:
    """Return the stand-alone kernel: one block of 32 warps per row, a pair of them per group.

    Its scalars: row stride of the logits in bytes.
    """
    size = spec.num_experts // NUM_GROUPS
    width = size // LISTS
    assert threads == NUM_GROUPS * PAIR

    @cute.kernel
    def select_topk(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        prim.follow_predecessor()
        logits, biases, weights, ids = tensors
        row = num.wide(cute.arch.block_idx()[0])
        pair = Pair(NUM_GROUPS)
        final = Final()
        images = prim.shared_address(cute.arch.alloc_smem(Uint32, NUM_GROUPS * TOP_K, 16))
        records = prim.shared_address(cute.arch.alloc_smem(Uint64, NUM_GROUPS * TOP_K, 16))

        seated = Uint32(pair.seat < Int32(width))
        expert = pair.index * Int32(size) + pair.list * Int32(width) + pair.seat
        logit = prim.load_f32(logits + row * scalars[0] + num.wide(expert) * 4, seated)
        bias = prim.load_f32(biases + num.wide(expert) * 4, seated)
        image, record = judge(logit, bias, expert, spec)
        rank = pair.rank_group(num.select(seated != Uint32(0), image, Uint32(0)))
        place_image(images + pair.index * Int32(IMAGES_NBYTES), rank, image)
        place_record(records + pair.index * Int32(LIST_NBYTES), rank, record)
        cute.arch.sync_threads()

        if pair.index < Int32(QUARTERS):
            group = pair.index * Int32(LISTS) + pair.list
            lists = images + pair.index * Int32(LISTS * IMAGES_NBYTES)
            image = load_image(lists, pair)
            place = group * Int32(LIST_NBYTES) + pair.seat * Int32(RECORD_NBYTES)
            record = prim.load_shared_u64(records + place)
            rank = rank_in_others(lists, pair.list, pair.seat, image)
            final.enter(pair.index, rank, image)
            sync_workers()
            offset = row * (spec.top_k * 4)
            outputs = (weights + offset, ids + offset)
            final.finish(pair.index, rank, Candidate(image, record), outputs, Uint32(1), spec)

    return select_topk


def load_image(lists: Int32, pair: Pair) -> Uint32:
    """Return the image at a lane's place of four sorted lists; see place_image."""
    word = ((pair.seat & Int32(3)) << Int32(2)) + (pair.seat >> Int32(2))
    return prim.load_shared_u32(lists + (pair.list * Int32(TOP_K) + word) * Int32(4))

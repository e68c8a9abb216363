"""The selection of a whole row by 256 threads, for every router: what topk.py does, in turns.

A row's logits lie in shared memory, as they came in. A turn takes 256 experts, a pair of warps 64
of them: levels 1 and 2. The contests that follow halve or quarter the lists until one is left.
Where an expert's choice depends on others, that comes before:

    softmax   every warp looks for the largest logit, each thread stores exponentials, and behind
              a barrier every warp adds them up in the same order
    groups    images are stored, and behind a barrier a warp per group looks for its two best;
              behind another one every thread ranks the group of its expert among the groups

Stand-alone and fused kernels run the same code on the same numbers, so they give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute.math as cute_math
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute

from ..layout import align_up
from . import primitives as prim
from . import scalars as num
from .protocol import WARP, DeviceObject
from .router_kernels import QUARTERS, WORKERS, Pair, sync_workers
from .router_spec import RouterSpec
from .topk import (
    NOT_VALID_IMAGE,
    PLACES,
    RECORD_NBYTES,
    TOP_K,
    choice_of,
    emit,
    image_of,
    is_valid,
    judge_score,
    place_image,
    place_record,
    rank_in_others,
    score_of,
)

LARGEST = 32
"""Places of a list where more than 16 experts are selected."""


class Levels(NamedTuple):
    """The tree of a router.

    Attributes:
        length: Places of a list.
        lists: Per level from level 2 on, its lists; what a contest merges is there, if empty.
        filled: Of these, those that may hold a candidate.
    """

    length: int
    lists: list[int]
    filled: list[int]

    @classmethod
    def of(cls, spec: RouterSpec) -> Levels:
        """Return the tree of `spec`."""
        length = TOP_K if spec.top_k <= TOP_K else LARGEST
        merged = PLACES // length
        filled = [-(-spec.num_experts // WORKERS) * QUARTERS]
        lists = [align_up(filled[0], merged)]
        while filled[-1] > 1:
            filled.append(lists[-1] // merged)
            lists.append(align_up(filled[-1], merged) if filled[-1] > 1 else 1)
        return cls(length, lists, filled)


class RowSelector(DeviceObject):
    """Selects from one row after another. Participants: the first WORKERS threads of a block.

    Attributes:
        values: The row in shared memory; `keep` puts it there.
    """

    def __init__(self, spec: RouterSpec) -> None:
        self.spec = spec
        self.levels = Levels.of(spec)
        self.length = self.levels.length
        self.total = sum(self.levels.lists) * self.length
        self.thread = cute.arch.thread_idx()[0]
        self.pair = Pair(QUARTERS)
        self.values = self._words(spec.num_experts)
        self.biases = self._words(spec.num_experts) if spec.bias else self.values
        self.exponentials = self._words(spec.num_experts) if spec.score == "softmax" else None
        self.choices = self._words(spec.num_experts) if spec.groups > 1 else None
        self.group_images = self._words(spec.groups) if spec.groups > 1 else None
        self.images = self._words(self.total)
        area = cute.arch.alloc_smem(Uint64, self.total, 16)
        self.records = prim.shared_address(area)

    @staticmethod
    def _words(count: int) -> Int32:
        return prim.shared_address(cute.arch.alloc_smem(Uint32, count, 16))

    def places(self) -> list:
        """Return a thread's experts, and for each whether it exists."""
        begins = range(0, self.spec.num_experts, WORKERS)
        experts = [self.thread + Int32(begin) for begin in begins]
        return [(expert, expert < Int32(self.spec.num_experts)) for expert in experts]

    def fetch_biases(self, biases: Int64, wanted: Uint32) -> tuple:
        """Load all biases if `wanted` is not 0, some by each thread."""
        return tuple(
            prim.load_f32(biases + num.wide(expert) * 4, wanted & Uint32(inside))
            for expert, inside in self.places()
        )

    @cute.jit
    def keep_biases(self, biases: tuple) -> None:
        """Store the biases. `select` is behind a barrier."""
        places = self.places()
        for i in cutlass.range_constexpr(len(biases)):
            expert, inside = places[i]
            if inside:
                prim.store_shared_u32(self.biases + expert * Int32(4), num.float_bits(biases[i]))

    @cute.jit
    def clear(self) -> None:
        """Empty all lists, before a row's logits are stored and a barrier of the workers.

        Requires: `select` has returned for the row before.
        """
        for begin in cutlass.range_constexpr(0, self.total, WORKERS):
            word = self.thread + Int32(begin)
            if word < Int32(self.total):
                prim.store_shared_u32(self.images + word * Int32(4), Uint32(0))

    @cute.jit
    def keep(self, expert: Int32, logit_bits: Uint32, inside: cutlass.Boolean) -> None:
        """Store the logit of an expert, if it exists."""
        if inside:
            prim.store_shared_u32(self.values + expert * Int32(4), logit_bits)

    @cute.jit
    def select(self, weights: Int64, ids: Int64, enabled: Uint32) -> None:
        """Select from the row and write its weights and ids, if `enabled` is not 0.

        Requires: `clear`, `keep` for every expert and a barrier of the workers came before.
        """
        best, total = Float32(0.0), Float32(1.0)
        if cutlass.const_expr(self.spec.score == "softmax"):
            best, total = self._normaliser()
        if cutlass.const_expr(self.spec.groups > 1):
            self._rank_groups(best, total)
        turns = self.levels.filled[0] // QUARTERS
        for turn in cutlass.range(turns, unroll=1):
            group = turn * Int32(QUARTERS) + self.pair.index
            image, record = self._candidate(turn * Int32(WORKERS) + self.thread, best, total)
            rank = self.pair.rank_group(image, self.length)
            self._place(group, rank, image, record)
            if cutlass.const_expr(turns > 1):
                self.pair.sync()  # the next turn writes the lists that others still read
        sync_workers()
        first = 0
        for level in cutlass.range_constexpr(1, len(self.levels.lists)):
            self._contest(first, level)
            first += self.levels.lists[level - 1]
            sync_workers()
        if cute.arch.warp_idx() == Int32(0) and enabled != Uint32(0):
            records = self.records + Int32(first * self.length * RECORD_NBYTES)
            emit(records, cute.arch.lane_idx(), weights, ids, self.spec)

    def _numbers(self, expert: Int32) -> tuple:
        """Return logit and bias of an expert, in range, from shared memory."""
        offset = num.minimum(expert, Int32(self.spec.num_experts - 1)) * Int32(4)
        logit = num.bits_float(prim.load_shared_u32(self.values + offset))
        bias = Float32(0.0)
        if self.spec.bias:
            bias = num.bits_float(prim.load_shared_u32(self.biases + offset))
        return logit, bias

    @cute.jit
    def _candidate(self, expert: Int32, best: Float32, total: Float32) -> tuple:
        """Return image and record of an expert; image 0 if there is none."""
        spec = self.spec
        logit, bias = self._numbers(expert)
        valid = is_valid(logit, bias)
        if cutlass.const_expr(spec.groups > 1):
            valid = valid & self._stays(num.quotient_by(expert, spec.num_experts // spec.groups))
        score = num.select(valid, self._score(logit, best, total), Float32(0.0))
        image, record = judge_score(score, bias, expert, valid)
        return num.select(expert < Int32(spec.num_experts), image, Uint32(0)), record

    def _score(self, logit: Float32, best: Float32, total: Float32) -> Float32:
        if self.spec.score == "softmax":
            return cute_math.exp(logit - best) / total
        return score_of(logit, self.spec)

    @cute.jit
    def _place(self, index: Int32, rank: Int32, image: Uint32, record: Uint64) -> None:
        """Put a candidate, if it is one, at its rank of list `index`, counted over all levels."""
        if image != Uint32(0):
            place = index * Int32(self.length)
            place_image(self.images + place * Int32(4), rank, image, self.length)
            place_record(self.records + place * Int32(RECORD_NBYTES), rank, record, self.length)

    @cute.jit
    def _contest(self, first: cutlass.Constexpr, level: cutlass.Constexpr) -> None:
        """Merge the lists of a level, which start at list `first`, into those of the next."""
        length, merged = self.length, PLACES // self.length
        before, count = self.levels.lists[level - 1], self.levels.filled[level]
        own = self.pair.place >> Int32(length.bit_length() - 1)
        seat = self.pair.place & Int32(length - 1)
        shift = (length // 4).bit_length() - 1
        word = ((seat & Int32(3)) << Int32(shift)) + (seat >> Int32(2))
        for begin in cutlass.range_constexpr(0, count, QUARTERS):
            contest = self.pair.index + Int32(begin)
            if contest < Int32(count):
                lists = Int32(first) + contest * Int32(merged)
                place = (lists + own) * Int32(length)
                image = prim.load_shared_u32(self.images + (place + word) * Int32(4))
                record = prim.load_shared_u64(self.records + (place + seat) * Int32(RECORD_NBYTES))
                images = self.images + lists * Int32(length * 4)
                rank = rank_in_others(images, own, seat, image, length, length)
                self._place(Int32(first + before) + contest, rank, image, record)

    # --- choices that depend on other experts -----------------------------------------------------

    @cute.jit
    def _normaliser(self) -> tuple:
        """Return the largest finite logit, and the sum of the exponentials above it.

        The sum: lane l adds up those of experts l, l + 32, ..., then lanes 16, 8, 4, 2 and 1 apart
        add theirs. A barrier of the workers.
        """
        lane = cute.arch.lane_idx()
        experts = self.spec.num_experts
        best = Float32(float("-inf"))
        for begin in cutlass.range_constexpr(0, experts, WARP):
            logit, _ = self._numbers(lane + Int32(begin))  # the last one again, past the end
            logit = num.select(is_valid(logit, Float32(0.0)), logit, best)
            best = num.select(logit > best, logit, best)
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(best, 16 >> step)
            best = num.select(other > best, other, best)
        for expert, inside in self.places():
            logit, _ = self._numbers(expert)
            finite = is_valid(logit, Float32(0.0))
            value = num.select(finite, cute_math.exp(logit - best), Float32(0.0))
            if inside:
                address = self.exponentials + expert * Int32(4)
                prim.store_shared_u32(address, num.float_bits(value))
        sync_workers()
        total = Float32(0.0)
        for begin in cutlass.range_constexpr(0, experts, WARP):
            expert = lane + Int32(begin)
            offset = num.minimum(expert, Int32(experts - 1)) * Int32(4)
            value = num.bits_float(prim.load_shared_u32(self.exponentials + offset))
            total = total + num.select(expert < Int32(experts), value, Float32(0.0))
        for step in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, 16 >> step)
        return best, total

    @cute.jit
    def _rank_groups(self, best: Float32, total: Float32) -> None:
        """Store the image of every group's score. Two barriers of the workers."""
        spec = self.spec
        for expert, inside in self.places():
            logit, bias = self._numbers(expert)
            valid = is_valid(logit, bias)
            score = num.select(valid, self._score(logit, best, total), Float32(0.0))
            image, _ = judge_score(score, bias, expert, valid)
            if inside:
                prim.store_shared_u32(self.choices + expert * Int32(4), image)
        sync_workers()
        for begin in cutlass.range_constexpr(0, spec.groups, WORKERS // WARP):
            group = cute.arch.warp_idx() + Int32(begin)
            if group < Int32(spec.groups):
                image = self._group_image(group)
                if cute.arch.lane_idx() == Int32(0):
                    prim.store_shared_u32(self.group_images + group * Int32(4), image)
        sync_workers()

    @cute.jit
    def _group_image(self, group: Int32) -> Uint32:
        """Return the image of a group's score. Participants: a warp."""
        size = self.spec.num_experts // self.spec.groups
        lane = cute.arch.lane_idx()
        first, second = Uint32(0), Uint32(0)
        for begin in cutlass.range_constexpr(0, size, WARP):
            inside = lane + Int32(begin)
            expert = group * Int32(size) + num.minimum(inside, Int32(size - 1))
            image = prim.load_shared_u32(self.choices + expert * Int32(4))
            image = num.select(inside < Int32(size), image, Uint32(0))
            second = num.maximum(second, num.minimum(first, image))
            first = num.maximum(first, image)
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(first, 16 >> step)
            others = cute.arch.shuffle_sync_bfly(second, 16 >> step)
            second = num.maximum(num.minimum(first, other), num.maximum(second, others))
            first = num.maximum(first, other)
        score = choice_of(first)
        if cutlass.const_expr(self.spec.bias):
            score = score + choice_of(second)
        return image_of(score)

    @cute.jit
    def _stays(self, group: Int32) -> cutlass.Boolean:
        """Tell whether a group is among the best `topk_groups`."""
        own = prim.load_shared_u32(
            self.group_images + num.minimum(group, Int32(self.spec.groups - 1)) * Int32(4)
        )
        above = Uint32(0)
        for other in cutlass.range_constexpr(self.spec.groups):
            image = prim.load_shared_u32(self.group_images + Int32(4 * other))
            limit = num.select(Int32(other) < group, own - Uint32(1), own)
            above = num.count_above_u32(above, image, limit)
        return above < Uint32(self.spec.topk_groups)


assert NOT_VALID_IMAGE > 0, "images of groups are above 0 too: see RowSelector._stays"

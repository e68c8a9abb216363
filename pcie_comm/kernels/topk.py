"""Device-side selection: the 16 best of 896 experts, exact, as a tree of small contests.

    level 1   64 lists of 14 experts: half a warp each, one expert a lane, ranked by counting
    level 2   16 groups of four lists
    level 3   4 quarters of four groups
    level 4   the row: four quarters

(56 lists of 16, and 14 groups, where the world size is a multiple of 7.) At level 1 a lane counts
how many keys of its list beat its own, reading them from shared memory as broadcasts. From level 2
on lists are sorted, so a candidate's rank is its place in its own list plus, per other list, the
number of candidates above it, found in two steps: a look at every fourth, then at the three
between two of them. A rank is a place in the sorted result: no serial rounds, no queue that could
run empty and be refilled with a used expert. A candidate stays in its lane's registers over two
levels; only its image goes to its place in shared memory.

An *image* is the order-preserving integer of a selection score. Images tie where scores do; then
the lower id wins, and lists hold ascending ids: a tied candidate of an earlier list is above, one
of a later list is not. 0 is below every real image, so unused places hold 0. Non-valid experts get
the image of -inf, which is above 0 and below every finite score.

Between ranks and levels a candidate travels as a *record* of 8 bytes: the score's bits low, the id
high with VALID set if it was selectable. The receiver recomputes the selection score from record
and bias with the same addition, hence with the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute.math as cute_math
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute

from . import primitives as prim
from . import scalars as num

TOP_K = 16
LISTS = 4
"""Lists of one contest from level 2 on."""

KEYS_NBYTES = TOP_K * 8 + 16
"""Distance of two lists of level 1: not 128 bytes, or the halves of a warp would meet in a bank."""

IMAGES_NBYTES = TOP_K * 4
"""A sorted list of images."""

RECORD_NBYTES = 8
LIST_NBYTES = TOP_K * RECORD_NBYTES
VALID = 0x8000_0000
NOT_VALID_IMAGE = 0x007F_FFFF
"""Order-preserving image of -inf: the highest image that no finite score has."""


def _is_finite(bits: Uint32) -> cutlass.Boolean:
    return (bits & Uint32(0x7F800000)) != Uint32(0x7F800000)


@cute.jit
def _sigmoid(logit: Float32, numerics: cutlass.Constexpr) -> Float32:
    """Return the score, bit for bit torch.sigmoid or vLLM's tanh form: no fast math."""
    score = Float32(0.0)
    if cutlass.const_expr(numerics == "vllm"):
        score = Float32(0.5) * cute_math.tanh(Float32(0.5) * logit) + Float32(0.5)
    else:
        total = Float32(1.0) + cute_math.exp(-logit)
        score = num.reciprocal_of_normal(total)
        if total >= Float32(2.0**126):
            score = num.opaque(Float32(1.0)) / total
    return score


def _image(choice: Float32) -> Uint32:
    """Return an integer with the order of the float: flip all bits if negative, else the sign."""
    bits = num.float_bits(choice)
    mask = Uint32(Int32(bits) >> Int32(31)) | Uint32(0x80000000)
    return bits ^ mask


class Candidate(NamedTuple):
    """An expert in a contest: image 0 if there is none in this lane."""

    image: Uint32
    record: Uint64


def make_record(expert: Int32, score: Float32, valid: Any) -> Uint64:
    """Return the record of an expert."""
    tag = Uint32(expert) | num.select(valid, Uint32(VALID), Uint32(0))
    return (Uint64(tag) << Uint64(32)) | Uint64(num.float_bits(score))


def judge(logit: Float32, bias: Float32, expert: Int32, numerics: str) -> Candidate:
    """Return an expert as a candidate."""
    valid = _is_finite(num.float_bits(logit)) & _is_finite(num.float_bits(bias))
    score = num.select(valid, _sigmoid(logit, numerics), Float32(0.0))
    image = num.select(valid, _image(score + bias), Uint32(NOT_VALID_IMAGE))
    return Candidate(image, make_record(expert, score, valid))


def read_record(record: Uint64, bias_address: Int32, num_experts: int) -> Uint32:
    """Return the image of a record; `bias_address` is the row of biases in shared memory.

    After a wait that gave up a record may hold anything; the id is kept in range all the same.
    """
    tag = Uint32(record >> Uint64(32))
    expert = num.minimum(Int32(tag & Uint32(0xFFFF)), Int32(num_experts - 1))
    score = num.bits_float(Uint32(record))
    bias = num.bits_float(prim.load_shared_u32(bias_address + expert * Int32(4)))
    valid = (tag & Uint32(VALID)) != Uint32(0)
    return num.select(valid, _image(score + bias), Uint32(NOT_VALID_IMAGE))


@cute.jit
def rank_by_counting(keys: Int32, place: Int32, image: Uint32) -> Int32:
    """Level 1: return the rank of a lane's candidate among the 16 of its half warp.

    Keys are unique: the image, and below it the place, lower ones first. A lane without a
    candidate keeps its own place, which is behind all that have one.

    Participants: a warp; both halves have an area `keys` of their own in shared memory.
    """
    key = (Uint64(image) << Uint64(32)) | Uint64(Uint32(TOP_K) - Uint32(place))
    prim.store_shared_u64(keys + place * Int32(8), key)
    cute.arch.sync_warp()
    ranks = [Uint32(0), Uint32(0)]
    for step in cutlass.range_constexpr(TOP_K // 2):
        others = prim.load_shared_v2_u64(keys + Int32(16 * step))
        ranks = [num.count_above(rank, o, key) for rank, o in zip(ranks, others, strict=True)]
    rank = Int32(ranks[0] + ranks[1])
    return num.select(image != Uint32(0), rank, place)


@cute.jit
def place_image(images: Int32, rank: Int32, image: Uint32) -> None:
    """Store an image at its rank of a sorted list, if that is below 16.

    Rank r lies at word (r % 4) * 4 + r // 4, so that every fourth is one 16-byte load.
    """
    if rank < Int32(TOP_K):
        word = ((rank & Int32(3)) << Int32(2)) + (rank >> Int32(2))
        prim.store_shared_u32(images + word * Int32(4), image)


@cute.jit
def rank_in_others(images: Int32, own: Int32, rank: Int32, image: Uint32) -> Int32:
    """Levels 2 to 4: return a candidate's rank in four sorted lists, given its rank in one.

    Args:
        images: Of the four lists, in shared memory.
        own: Which of them holds the candidate.
        rank: Its place there.
        image: Of the candidate.
    """
    below = num.select(image != Uint32(0), image - Uint32(1), Uint32(0))
    lists, limits, fourths = [], [], []
    for step in cutlass.range_constexpr(LISTS - 1):
        other = (own + Int32(step + 1)) & Int32(LISTS - 1)
        lists.append(images + other * Int32(IMAGES_NBYTES))
        limits.append(num.select(other < own, below, image))
    for step in cutlass.range_constexpr(LISTS - 1):
        fourths.append(prim.load_shared_v4(lists[step] + Int32(IMAGES_NBYTES - 16)))
    total = Uint32(rank)
    between = []
    for step in cutlass.range_constexpr(LISTS - 1):
        blocks = Uint32(0)
        for other in fourths[step]:
            blocks = num.count_above_u32(blocks, other, limits[step])
        total += blocks << Uint32(2)
        at = lists[step] + Int32(blocks << Uint32(2))
        between.append([prim.load_shared_u32(at + Int32(16 * i)) for i in range(3)])
    for step in cutlass.range_constexpr(LISTS - 1):
        above = Uint32(0)
        for other in between[step]:
            above = num.count_above_u32(above, other, limits[step])
        total += above
    return Int32(total)


@cute.jit
def place_record(records: Int32, rank: Int32, record: Uint64) -> None:
    """Store a candidate's record at its rank in shared memory, if that is below 16."""
    if rank < Int32(TOP_K):
        prim.store_shared_u64(records + rank * Int32(RECORD_NBYTES), record)


@cute.jit
def emit(records: Int32, lane: Int32, weights: Int64, ids: Int64, spec: cutlass.Constexpr) -> None:
    """Renormalise 16 sorted records and write one row of the outputs.

    Participants: a warp; lanes 16 to 31 repeat 0 to 15. Requires: the records are visible to it.
    Every lane adds the 16 scores up in the same order, so equal records give equal bits everywhere:
    those 8 apart, then 4, 2 and 1.
    """
    scores = []
    for pair in cutlass.range_constexpr(TOP_K // 2):
        words = prim.load_shared_v4(records + Int32(2 * RECORD_NBYTES * pair))
        scores += [num.bits_float(words[0]), num.bits_float(words[2])]
    for step in cutlass.range_constexpr(4):
        half = 8 >> step
        scores = [scores[i] + scores[i + half] for i in range(half)]
    total = scores[0]
    place = lane & Int32(TOP_K - 1)
    record = prim.load_shared_u64(records + place * Int32(RECORD_NBYTES))
    tag = Uint32(record >> Uint64(32))
    score = num.bits_float(Uint32(record))
    weight = score * Float32(spec.scale) / (total + Float32(spec.eps))
    if cutlass.const_expr(spec.numerics == "vllm"):
        best = Uint32(prim.load_shared_u64(records) >> Uint64(32))
        nothing_valid = (best & Uint32(VALID)) == Uint32(0)
        weight = num.select(nothing_valid, Float32(1.0 / TOP_K), weight)
    prim.store_u32(weights + num.wide(place) * 4, num.float_bits(weight))
    prim.store_u32(ids + num.wide(place) * 4, tag & Uint32(0xFFFF))

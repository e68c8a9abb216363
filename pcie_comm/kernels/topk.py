"""Device-side selection: the best k of up to 1024 experts, exact, as a tree of small contests.

    level 1   lists of up to 16 experts: half a warp each, one expert a lane, ranked by counting
    level 2   groups of four lists, 64 experts at most
    level 3.. contests of four groups' best 16, or of two groups' best 32 if k is above 16, and so
              on, until one list is left: the row

A row of 896 is 64 lists of 14, 16 groups, 4 quarters. (56 lists of 16, and 14 groups, where the
world size is a multiple of 7.) At level 1 a lane counts how many keys of its list beat its own,
reading them from shared memory as broadcasts. From level 2 on lists are sorted, so a candidate's
rank is its place in its own list plus, per other list, the number of candidates above it, found in
two steps: a look at every fourth, then at the three between two of them. A rank is a place in the
sorted result: no serial rounds, no queue that could run empty and be refilled with a used expert.

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
import numpy as np
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute

from . import primitives as prim
from . import scalars as num
from .router_spec import RouterSpec

TOP_K = 16
"""Places of a sorted list, unless more than 16 experts are selected; and of a list of level 1."""

LISTS = 4
"""Lists of one contest of 64 candidates."""

PLACES = LISTS * TOP_K
"""Candidates of one contest: a pair of warps, one a lane."""

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


@cute.jit
def score_of(logit: Float32, spec: cutlass.Constexpr) -> Float32:
    """Return the score of a logit, as far as it depends on no other; for softmax the logit."""
    score = logit
    if cutlass.const_expr(spec.score == "sigmoid"):
        score = _sigmoid(logit, spec.numerics)
    if cutlass.const_expr(spec.score == "sqrtsoftplus"):
        soft = cute_math.log1p(cute_math.exp(logit))
        score = cute_math.sqrt(num.select(logit > Float32(20.0), logit, soft))
    return score


def image_of(choice: Float32) -> Uint32:
    """Return an integer with the order of the float: flip all bits if negative, else the sign."""
    bits = num.float_bits(choice)
    mask = Uint32(Int32(bits) >> Int32(31)) | Uint32(0x80000000)
    return bits ^ mask


def choice_of(image: Uint32) -> Float32:
    """Return the float whose image this is."""
    negative = ~Uint32(Int32(image) >> Int32(31))
    return num.bits_float(image ^ (negative | Uint32(0x80000000)))


class Candidate(NamedTuple):
    """An expert in a contest: image 0 if there is none in this lane."""

    image: Uint32
    record: Uint64


def make_record(expert: Int32, score: Float32, valid: Any) -> Uint64:
    """Return the record of an expert."""
    tag = Uint32(expert) | num.select(valid, Uint32(VALID), Uint32(0))
    return (Uint64(tag) << Uint64(32)) | Uint64(num.float_bits(score))


def is_valid(logit: Float32, bias: Float32) -> cutlass.Boolean:
    """Tell whether an expert is selectable as far as its own numbers go."""
    return _is_finite(num.float_bits(logit)) & _is_finite(num.float_bits(bias))


def judge(logit: Float32, bias: Float32, expert: Int32, spec: RouterSpec) -> Candidate:
    """Return an expert as a candidate, if its choice depends on its own numbers alone."""
    valid = is_valid(logit, bias)
    score = num.select(valid, score_of(logit, spec), Float32(0.0))
    return judge_score(score, bias, expert, valid)


def judge_score(score: Float32, bias: Float32, expert: Int32, valid: Any) -> Candidate:
    """Return an expert as a candidate. Adding the bias, be it 0, makes a score of -0 a +0."""
    image = num.select(valid, image_of(score + bias), Uint32(NOT_VALID_IMAGE))
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
    return num.select(valid, image_of(score + bias), Uint32(NOT_VALID_IMAGE))


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
def place_image(
    images: Int32, rank: Int32, image: Uint32, length: cutlass.Constexpr = TOP_K
) -> None:
    """Store an image at its rank of a sorted list of `length`, if that is below it.

    Rank r lies at word (r % 4) * (length / 4) + r // 4, so that every fourth is in 16-byte loads.
    """
    if rank < Int32(length):
        shift = (length // 4).bit_length() - 1
        word = ((rank & Int32(3)) << Int32(shift)) + (rank >> Int32(2))
        prim.store_shared_u32(images + word * Int32(4), image)


@cute.jit
def rank_in_others(
    images: Int32,
    own: Int32,
    rank: Int32,
    image: Uint32,
    length: cutlass.Constexpr = TOP_K,
    kept: cutlass.Constexpr = TOP_K,
) -> Int32:
    """From level 2 on: return a candidate's rank in a contest's sorted lists, given that in one.

    It is exact below `kept`: a list that is above as a whole is counted three too many otherwise.

    Args:
        images: Of the lists of `length`, 64 candidates in all, in shared memory.
        own: Which of them holds the candidate.
        rank: Its place there.
        image: Of the candidate.
        length: Of a list.
        kept: How many of the contest go on.
    """
    count = PLACES // length
    below = num.select(image != Uint32(0), image - Uint32(1), Uint32(0))
    lists, limits, fourths = [], [], []
    for step in cutlass.range_constexpr(count - 1):
        other = (own + Int32(step + 1)) & Int32(count - 1)
        lists.append(images + other * Int32(length * 4))
        limits.append(num.select(other < own, below, image))
    for step in cutlass.range_constexpr(count - 1):
        last = lists[step] + Int32(3 * length)
        loads = [prim.load_shared_v4(last + Int32(16 * i)) for i in range(length // 16)]
        fourths.append([word for words in loads for word in words])
    total = Uint32(rank)
    between = []
    for step in cutlass.range_constexpr(count - 1):
        blocks = Uint32(0)
        for other in fourths[step]:
            blocks = num.count_above_u32(blocks, other, limits[step])
        total += blocks << Uint32(2)
        if cutlass.const_expr(kept > length):
            whole = blocks == Uint32(length // 4)
            limits[step] = num.select(whole, Uint32(0xFFFFFFFF), limits[step])
        at = lists[step] + Int32(blocks << Uint32(2))
        between.append([prim.load_shared_u32(at + Int32(length * i)) for i in range(3)])
    for step in cutlass.range_constexpr(count - 1):
        above = Uint32(0)
        for other in between[step]:
            above = num.count_above_u32(above, other, limits[step])
        total += above
    return Int32(total)


@cute.jit
def place_record(
    records: Int32, rank: Int32, record: Uint64, length: cutlass.Constexpr = TOP_K
) -> None:
    """Store a candidate's record at its rank in shared memory, if that is below `length`."""
    if rank < Int32(length):
        prim.store_shared_u64(records + rank * Int32(RECORD_NBYTES), record)


def sum_by_halves(values: list) -> Any:
    """Add up: those half the next power of two apart, then a quarter, and so on. One order."""
    half = 1 << max(len(values) - 1, 1).bit_length() >> 1
    while half:
        inside = range(min(half, len(values)))
        values = [
            values[i] + values[i + half] if i + half < len(values) else values[i] for i in inside
        ]
        half >>= 1
    return values[0]


def _exponentials(words: list) -> list:
    """Return exp(score - best score) of sorted records, and 0 of those that are not valid."""
    best = num.bits_float(words[0][0])
    return [exponential(num.bits_float(score), best, tag) for score, tag in words]


def exponential(score: Float32, best: Float32, tag: Uint32) -> Float32:
    """Return what a selected logit adds to the softmax of those selected."""
    valid = (tag & Uint32(VALID)) != Uint32(0)
    return num.select(valid, cute_math.exp(score - best), Float32(0.0))


@cute.jit
def emit(records: Int32, lane: Int32, weights: Int64, ids: Int64, spec: cutlass.Constexpr) -> None:
    """Weigh the first `top_k` sorted records and write one row of the outputs.

    Participants: a warp; lanes behind `top_k` repeat others. Requires: the records are visible to
    it. Every lane adds the scores up in the same order, so equal records give equal bits
    everywhere: see sum_by_halves. Ids are in range whatever the records are, as they may be after
    a wait that gave up: what indexes with them next, in the same graph, must not fault.
    """
    top_k = spec.top_k
    words = []
    for pair in cutlass.range_constexpr((top_k + 1) // 2):
        loaded = prim.load_shared_v4(records + Int32(2 * RECORD_NBYTES * pair))
        words += [loaded[:2], loaded[2:]]
    words = words[:top_k]
    if cutlass.const_expr(spec.score == "softmax_topk"):
        total = sum_by_halves(_exponentials(words))
    else:
        total = sum_by_halves([num.bits_float(score) for score, _ in words])
    if cutlass.const_expr(top_k & (top_k - 1) == 0):
        place = lane & Int32(top_k - 1)
    else:
        place = num.minimum(lane, Int32(top_k - 1))
    record = prim.load_shared_u64(records + place * Int32(RECORD_NBYTES))
    tag = Uint32(record >> Uint64(32))
    score = num.bits_float(Uint32(record))
    if cutlass.const_expr(spec.score == "softmax_topk"):
        score = exponential(score, num.bits_float(words[0][0]), tag)
    weight = _weight(score, total, spec)
    if cutlass.const_expr(spec.numerics == "vllm"):
        best = Uint32(prim.load_shared_u64(records) >> Uint64(32))
        nothing_valid = (best & Uint32(VALID)) == Uint32(0)
        weight = num.select(nothing_valid, Float32(1.0 / top_k), weight)
    prim.store_u32(weights + num.wide(place) * 4, num.float_bits(weight))
    expert = num.minimum(tag & Uint32(0xFFFF), Uint32(spec.num_experts - 1))
    prim.store_u32(ids + num.wide(place) * 4, expert)


def _weight(score: Float32, total: Float32, spec: RouterSpec) -> Float32:
    """Return the weight of a score; 0 where the divisor is."""
    weight = score * Float32(spec.scale)
    if not (spec.renormalize or spec.score == "softmax_topk"):
        return weight
    if spec.renormalize and float(np.float32(spec.eps)) > 0.0:
        return weight / (total + Float32(spec.eps))
    return num.select(total > Float32(0.0), weight / total, Float32(0.0))

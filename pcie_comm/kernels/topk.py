"""Device-side selection: the 16 best of 896 experts, exact, as a tree of small contests.

    level 1   32 half groups of 28 experts: one a warp, one expert a lane, ranked by counting
    level 2   16 groups: two sorted lists of 16
    level 3   4 quarters: four sorted lists of 16
    level 4   the row: four sorted lists of 16

(28 half groups of 32 and 14 groups where the world size is a multiple of 7.) At level 1 a lane
counts how many keys of its half group beat its own, reading them from shared memory as broadcasts.
From level 2 on lists are sorted, so a candidate's rank is its own place plus, per other list, the
number of keys above it, found in five halving steps. A rank is a place in the sorted result: no
serial rounds, no queue that could run empty and be refilled with a used expert.

A key is (order-preserving image of the selection score) << 32 | (0xFFFF - id): an integer compare
is the router contract's order, keys are unique, and 0 is below every real key, so unused places
hold 0. Non-valid experts get the image of -inf, which is above 0 and below every finite score.

Between ranks and levels a candidate travels as a *record* of 8 bytes: the score's bits low, the id
high with VALID set if it was selectable. The receiver recomputes the selection score from record
and bias with the same addition, hence with the same bits.
"""

from __future__ import annotations

import cutlass
import cutlass.cute.math as cute_math
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute

from . import primitives as prim
from .protocol import DeviceObject

TOP_K = 16
HALF_GROUP = 32
"""Most experts of a half group: one a lane."""

RECORD_NBYTES = 8
LIST_NBYTES = TOP_K * RECORD_NBYTES
VALID = 0x8000_0000
NOT_VALID_IMAGE = 0x007F_FFFF
"""Order-preserving image of -inf: the highest image that no finite score has."""


def _is_finite(bits: Uint32) -> cutlass.Boolean:
    return (bits & Uint32(0x7F800000)) != Uint32(0x7F800000)


def _sigmoid(logit: Float32, numerics: str) -> Float32:
    """Return the score, bit for bit torch.sigmoid or vLLM's tanh form: no fast math."""
    if numerics == "vllm":
        return Float32(0.5) * cute_math.tanh(Float32(0.5) * logit) + Float32(0.5)
    return Float32(1.0) / (Float32(1.0) + cute_math.exp(-logit))


def _image(choice: Float32) -> Uint32:
    """Return an integer with the order of the float: flip all bits if negative, else the sign."""
    bits = prim.float_bits(choice)
    mask = Uint32(Int32(bits) >> Int32(31)) | Uint32(0x80000000)
    return bits ^ mask


def make_key(image: Uint32, expert: Int32) -> Uint64:
    """Return the sort key of a candidate."""
    return (Uint64(image) << Uint64(32)) | Uint64(Uint32(0xFFFF) - Uint32(expert))


def make_record(key: Uint64, score: Float32) -> Uint64:
    """Return the record of a ranked candidate."""
    expert = Uint32(0xFFFF) - (Uint32(key) & Uint32(0xFFFF))
    image = Uint32(key >> Uint64(32))
    tag = expert | prim.select(image > Uint32(NOT_VALID_IMAGE), Uint32(VALID), Uint32(0))
    return (Uint64(tag) << Uint64(32)) | Uint64(prim.float_bits(score))


def judge(logit: Float32, bias: Float32, expert: Int32, numerics: str) -> tuple[Uint64, Float32]:
    """Return key and score of an expert."""
    valid = _is_finite(prim.float_bits(logit)) & _is_finite(prim.float_bits(bias))
    score = prim.select(valid, _sigmoid(logit, numerics), Float32(0.0))
    image = prim.select(valid, _image(score + bias), Uint32(NOT_VALID_IMAGE))
    return make_key(image, expert), score


def read_record(record: Uint64, bias_address: Int32, num_experts: int) -> tuple[Uint64, Float32]:
    """Return key and score of a record; `bias_address` is the row of biases in shared memory.

    After a wait that gave up a record may hold anything; the id is kept in range all the same.
    """
    tag = Uint32(record >> Uint64(32))
    expert = prim.minimum(Int32(tag & Uint32(0xFFFF)), Int32(num_experts - 1))
    score = prim.bits_float(Uint32(record))
    bias = prim.bits_float(prim.load_shared_u32(bias_address + expert * Int32(4)))
    valid = (tag & Uint32(VALID)) != Uint32(0)
    return make_key(
        prim.select(valid, _image(score + bias), Uint32(NOT_VALID_IMAGE)), expert
    ), score


@cute.jit
def rank_by_counting(keys: Int32, key: Uint64) -> Int32:
    """Return how many of 32 keys in shared memory beat `key`.

    Participants: a warp. Requires: all 32 keys are stored and visible to the warp.
    """
    rank = Int32(0)
    for begin in cutlass.range(keys, keys + Int32(HALF_GROUP * 8), 128, unroll=1):
        for step in cutlass.range_constexpr(8):
            for other in prim.load_shared_v2_u64(begin + Int32(16 * step)):
                rank += Int32(other > key)
    return rank


@cute.jit
def rank_in(sorted_keys: Int32, key: Uint64) -> Int32:
    """Return how many of 16 descending keys in shared memory are above `key`.

    A list fills the 32 banks once, so lanes that look at different places do not conflict.
    """
    place = Int32(0)
    for step in cutlass.range_constexpr(4):
        stride = 8 >> step
        other = prim.load_shared_u64(sorted_keys + (place + Int32(stride - 1)) * Int32(8))
        place += prim.select(other > key, Int32(stride), Int32(0))
    last = prim.load_shared_u64(sorted_keys + place * Int32(8))
    return place + Int32(last > key)


@cute.jit
def rank_in_others(keys: Int32, place: Int32, key: Uint64) -> Int32:
    """Return the rank of the candidate at `place` of four sorted lists of 16 in shared memory."""
    own = place >> Int32(4)
    rank = place & Int32(TOP_K - 1)
    for step in cutlass.range_constexpr(3):
        other = (own + Int32(step + 1)) & Int32(3)
        rank += rank_in(keys + other * Int32(TOP_K * 8), key)
    return rank


class SortedList(DeviceObject):
    """16 places in shared memory that a contest fills: keys, and scores at their side."""

    def __init__(self, keys: Int32, scores: Int32) -> None:
        self.keys = keys
        self.scores = scores

    @cute.jit
    def place(self, rank: Int32, key: Uint64, score: Float32) -> None:
        """Store a candidate at its rank, if that is below 16."""
        if rank < Int32(TOP_K):
            prim.store_shared_u64(self.keys + rank * Int32(8), key)
            prim.store_shared_u32(self.scores + rank * Int32(4), prim.float_bits(score))


@cute.jit
def place_record(records: Int32, rank: Int32, key: Uint64, score: Float32) -> None:
    """Store a candidate's record at its rank in shared memory, if that is below 16."""
    if rank < Int32(TOP_K):
        prim.store_shared_u64(records + rank * Int32(RECORD_NBYTES), make_record(key, score))


@cute.jit
def emit(records: Int32, lane: Int32, weights: Int64, ids: Int64, spec: cutlass.Constexpr) -> None:
    """Renormalise 16 sorted records and write one row of the outputs.

    Participants: a warp; lanes 16 to 31 repeat 0 to 15. Requires: the records are visible to it.
    The sum is a fixed butterfly over the 16, so equal records give equal bits everywhere.
    """
    place = lane & Int32(TOP_K - 1)
    record = prim.load_shared_u64(records + place * Int32(RECORD_NBYTES))
    tag = Uint32(record >> Uint64(32))
    score = prim.bits_float(Uint32(record))
    total = score
    for step in cutlass.range_constexpr(4):
        total += cute.arch.shuffle_sync_bfly(total, offset=8 >> step)
    weight = score * Float32(spec.scale) / (total + Float32(spec.eps))
    if cutlass.const_expr(spec.numerics == "vllm"):
        best = Uint32(prim.load_shared_u64(records) >> Uint64(32))
        nothing_valid = (best & Uint32(VALID)) == Uint32(0)
        weight = prim.select(nothing_valid, Float32(1.0 / TOP_K), weight)
    if lane < Int32(TOP_K):
        prim.store_u32(weights + Int64(place) * 4, prim.float_bits(weight))
        prim.store_u32(ids + Int64(place) * 4, tag & Uint32(0xFFFF))

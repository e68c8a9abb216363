"""NumPy oracle for the biased-sigmoid router, and a checker for what a device returns.

`route` computes the contract of pcie_comm.kernels.router_spec with float64 where the contract
leaves the rounding open. `violations` judges a result without knowing which fp32 sigmoid made it:
it is strict about everything that mathematics fixes (range, distinct ids, valid before non-valid,
the identity of the fill, ties between equal logit and bias bits) and tolerant only of choices that
lie closer together than the rounding error of an fp32 sigmoid, and of rounding in the weights.
`lane_queues` models a selection by lanes of queues, to show that a corpus finds its known bug.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SIGMOID_ERROR = 1.3e-7
"""Bound on |fp32 sigmoid - exact sigmoid|, for 1/(1+exp(-x)) and for the tanh form."""

WEIGHT_RTOL = 4e-6
"""Relative error granted to a weight on top of the error of its sigmoid."""

SIGMOID_FORMS = ("exact", "exp", "tanh")


@dataclass(frozen=True)
class Rule:
    """What may differ between routers of this contract."""

    k: int = 16
    scale: float = 1.0
    eps: float = 1e-20
    none_valid: str = "zero"  # weights of a row with nothing valid; or "uniform": 1/k each


KIMI = Rule()


def sigmoid(logits: Array, form: str = "exact") -> Array:
    """fp32 sigmoid: float64 rounded once ("exact"), or every step in fp32 ("exp", "tanh")."""
    x = np.asarray(logits, np.float32)
    half, one = np.float32(0.5), np.float32(1)
    with np.errstate(all="ignore"):
        if form == "exp":
            score = one / (one + np.exp(-x))
        elif form == "tanh":
            score = half * np.tanh(half * x) + half
        else:
            score = _exact_sigmoid(x)
    return np.asarray(score, np.float32)


def _exact_sigmoid(logits: Array) -> Array:
    """float64 sigmoid that never overflows."""
    with np.errstate(all="ignore"):
        x = logits.astype(np.float64)
        small = np.exp(-np.abs(x))
        return np.where(x >= 0, 1.0, small) / (1.0 + small)


def selectable(logits: Array, bias: Array) -> Array:
    """Which experts are valid: [rows, experts] bool."""
    return np.isfinite(logits) & np.isfinite(bias)


@dataclass(frozen=True)
class Routing:
    """What a router should answer for a batch, and what it ranked."""

    ids: Array  # int32 [rows, k], best first
    weights: Array  # fp32 [rows, k]
    valid: Array  # bool [rows, experts]
    score: Array  # fp32 [rows, experts], 0 for a non-valid expert
    choice: Array  # fp32 [rows, experts], -inf for a non-valid expert


def route(logits: Array, bias: Array, rule: Rule = KIMI, *, form: str = "exact") -> Routing:
    """Route each row by the contract.

    Args:
        logits: [rows, experts] fp32.
        bias: [experts] fp32.
        rule: The router.
        form: The sigmoid, one of SIGMOID_FORMS.
    """
    valid = selectable(logits, bias)
    score = np.where(valid, sigmoid(logits, form), np.float32(0))
    with np.errstate(all="ignore"):
        choice = np.where(valid, score + bias, np.float32(-np.inf)) + np.float32(0)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : rule.k]
    picked = np.take_along_axis(score, ids, axis=1).astype(np.float64)
    weights = picked * rule.scale / (picked.sum(1, keepdims=True) + rule.eps)
    if rule.none_valid == "uniform":
        weights[~valid.any(1)] = 1.0 / rule.k
    return Routing(ids.astype(np.int32), weights.astype(np.float32), valid, score, choice)


# --- the checker ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """What is certain about one row before looking at the answer; arrays are [experts]."""

    valid: Array
    score: Array  # float64
    low: Array  # bounds on any fp32 choice; -inf for a non-valid expert
    high: Array
    tie_before: Array  # the next lower id with the same logit and bias bits, or -1


def violations(
    ids: Array,
    weights: Array,
    logits: Array,
    bias: Array,
    rule: Rule = KIMI,
    limit: int = 8,
) -> list[str]:
    """Say how a device's answer breaks the contract; empty if it does not.

    Args:
        ids: int32 [rows, k] from the device.
        weights: fp32 [rows, k] from the device.
        logits: [rows, experts] fp32 that the device got.
        bias: [experts] fp32 that the device got.
        rule: The router.
        limit: At most this many messages.
    """
    want = (logits.shape[0], rule.k)
    for name, array, dtype in (("ids", ids, np.int32), ("weights", weights, np.float32)):
        if array.shape != want or array.dtype != dtype:
            return [f"{name} are {array.dtype} {array.shape}, expected {np.dtype(dtype)} {want}"]
    found: list[str] = []
    for index in range(want[0]):
        row = _facts(logits[index], bias)
        selected = ids[index].astype(np.int64)
        problems = list(_check_ids(selected, row))
        if not problems:
            problems += _check_fill(selected, row)
            problems += _check_rank(selected, row)
            problems += _check_ties(selected, row)
            problems += _check_weights(selected, weights[index], row, rule)
        found += [f"row {index}: {problem}" for problem in problems]
        if len(found) >= limit:
            break
    return found[:limit]


def _facts(logits: Array, bias: Array) -> _Row:
    valid = selectable(logits, bias)
    score = np.where(valid, _exact_sigmoid(logits), 0.0)
    choice = np.where(valid, score + np.where(valid, bias, 0).astype(np.float64), -np.inf)
    slack = SIGMOID_ERROR + 2.0**-23 * np.abs(np.where(valid, choice, 0.0)) + 1e-45
    return _Row(valid, score, choice - slack, choice + slack, _tie_before(logits, bias, valid))


def _tie_before(logits: Array, bias: Array, valid: Array) -> Array:
    experts = np.flatnonzero(valid)
    zero = np.float32(0)  # added, it makes -0 and +0 one value
    logit_bits = (logits[experts] + zero).view(np.uint32).astype(np.uint64)
    bias_bits = (bias[experts] + zero).view(np.uint32).astype(np.uint64)
    key = (logit_bits << np.uint64(32)) | bias_bits
    order = np.argsort(key, kind="stable")
    same = key[order][1:] == key[order][:-1]
    before = np.full(valid.shape, -1)
    before[experts[order[1:]][same]] = experts[order[:-1]][same]
    return before


def _check_ids(ids: Array, row: _Row) -> Iterator[str]:
    """Without these the other checks make no sense."""
    if ids.min() < 0 or ids.max() >= row.valid.size:
        yield f"id out of range {ids.tolist()}"
        return
    if np.unique(ids).size != ids.size:
        yield f"duplicate ids {ids.tolist()}"
        return
    got, want = int(row.valid[ids].sum()), min(int(row.valid.sum()), ids.size)
    if got != want:
        yield f"{got} valid experts selected, expected {want}"


def _check_fill(ids: Array, row: _Row) -> Iterator[str]:
    count = int(row.valid[ids].sum())
    if not row.valid[ids[:count]].all():
        yield "a non-valid expert precedes a valid one"
    fill = np.flatnonzero(~row.valid)[: ids.size - count]
    if not np.array_equal(ids[count:], fill):
        yield f"fill {ids[count:].tolist()}, expected {fill.tolist()}"


def _check_rank(ids: Array, row: _Row) -> Iterator[str]:
    chosen = ids[row.valid[ids]]
    if chosen.size == 0:
        return
    ceiling = np.minimum.accumulate(row.high[chosen])  # of the worst so far
    late = np.flatnonzero(row.low[chosen[1:]] > ceiling[:-1])
    if late.size:
        yield f"order: expert {chosen[late[0] + 1]} belongs further to the front"
    rest = row.valid.copy()
    rest[chosen] = False
    beaten = np.flatnonzero(rest & (row.low > ceiling[-1]))
    if beaten.size:
        yield f"expert {beaten[0]} outranks a selected expert"


def _check_ties(ids: Array, row: _Row) -> Iterator[str]:
    position = np.full(row.valid.size, ids.size)
    position[ids] = np.arange(ids.size)
    before = row.tie_before[ids]
    tied = before >= 0
    wrong = np.flatnonzero(position[before[tied]] > position[ids[tied]])
    if wrong.size:
        pair = before[tied][wrong[0]], ids[tied][wrong[0]]
        yield f"tie: expert {pair[0]} must precede its equal {pair[1]}"


def _check_weights(ids: Array, weights: Array, row: _Row, rule: Rule) -> Iterator[str]:
    """Recompute the weights in float64 from the device's own ids."""
    valid = row.valid[ids]
    total = row.score[ids].sum() + rule.eps
    noise = SIGMOID_ERROR / total
    want = row.score[ids] * rule.scale / total
    if not valid.any():
        want[:] = 1.0 / rule.k if rule.none_valid == "uniform" else 0.0
        slack = np.full(rule.k, 1e-7)
    elif total <= 4 * rule.k * SIGMOID_ERROR:  # nothing but rounding noise: any share will do
        slack = np.full(rule.k, rule.scale * 1.0000001)
    else:
        slack = want * (WEIGHT_RTOL + (rule.k + 1) * noise) + rule.scale * noise
    # Not "> slack", which a NaN passes.
    if not (np.abs(weights - want) <= slack).all():
        yield f"weights {weights.tolist()}, expected {want.tolist()}"
    if (weights < 0).any():
        yield "negative weight"
    if valid.any() and weights[~valid].any():
        yield "a non-valid expert has a weight"


# --- a model of a known bug ------------------------------------------------------------------

_Key = tuple[float, int]  # (choice, -id): the larger key wins


def lane_queues(choice: Array, k: int = 16, *, refill: str, warps: int = 4) -> list[int]:
    """Select from [experts] choices as lanes of sorted queues do, and return the ids.

    Each warp holds 256 experts, 8 per lane, and gives up its k best; one warp selects from those.
    A round takes the largest queue head of all lanes; that lane's queue moves up and its tail is
    refilled. ``refill`` "empty" puts in a key below every expert. "last" puts in -inf with the id
    of the queue's last expert, which is a key that an expert can have: once the real ones are
    used up it offers that expert again.
    """
    keys: list[_Key] = [(float(value), -expert) for expert, value in enumerate(choice)]
    survivors: list[_Key] = []
    for warp in range(warps):
        mine = keys[warp * 256 : (warp + 1) * 256]
        survivors += _rounds([mine[lane::32] for lane in range(32)], k, refill)
    final = _rounds([survivors[lane::32] for lane in range(32)], k, refill)
    return [-key[1] for key in final]


def _rounds(lanes: list[list[_Key]], k: int, refill: str) -> list[_Key]:
    nothing: _Key = (-np.inf, -(1 << 30))
    queues = [sorted(lane, reverse=True) or [nothing] for lane in lanes]
    taken = []
    for _ in range(k):
        best = max(queue[0] for queue in queues)
        taken.append(best)
        for queue in queues:
            if queue[0] == best:
                tail = nothing if refill == "empty" else (-np.inf, queue[-1][1])
                queue[:] = [*queue[1:], tail]
    return taken

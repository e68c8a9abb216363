"""Rows that routers get wrong, and wrong answers that a checker must not let pass.

896 experts, top 16; the corpus has 3,274 rows in eleven families.

Each family draws from its own generator, so that one can change without moving the others. A case
carries the ids and weights where mathematics fixes them. `form_dependent` marks rows whose ids
differ between correct fp32 sigmoids, or on hardware that flushes denormals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from router_oracle import Array, Routing

Rng = np.random.Generator

EXPERTS = 896
TOP_K = 16
WORLDS = (2, 4, 7, 8, 14, 16)
SEED = 20260815

NAN, INF = np.float32(np.nan), np.float32(np.inf)
IDS = np.arange(EXPERTS)
FIRST = np.arange(TOP_K)
EQUAL = np.full(TOP_K, 1 / TOP_K)
NOTHING = np.zeros(TOP_K)


@dataclass(frozen=True)
class Case:
    """A batch of rows with one bias."""

    name: str
    logits: Array  # fp32 [rows, EXPERTS]
    bias: Array  # fp32 [EXPERTS]
    ids: Array | None = None  # int32 [1, TOP_K], the same for every row
    weights: Array | None = None  # fp32 [1, TOP_K]
    form_dependent: bool = False
    family: str = ""


def corpus(*families: str, seed: int = SEED) -> Iterator[Case]:
    """Yield the cases of the named families, of all if none is named."""
    for index, (family, make) in enumerate(FAMILIES.items()):
        if not families or family in families:
            for case in make(np.random.default_rng([seed, index])):
                yield replace(case, family=family)


def _case(
    name: str,
    logits: Any,
    bias: Any = 0.0,
    *,
    ids: Any = None,
    weights: Any = None,
    form_dependent: bool = False,
) -> Case:
    """Bring rows to shape: scalars fill a row, a single row becomes a batch of one."""
    values = np.asarray(logits, np.float32)
    rows = values.shape[0] if values.ndim == 2 else 1
    return Case(
        name,
        np.broadcast_to(values, (rows, EXPERTS)).copy(),
        np.broadcast_to(np.asarray(bias, np.float32), (EXPERTS,)).copy(),
        None if ids is None else np.asarray(ids, np.int32).reshape(1, TOP_K),
        None if weights is None else np.asarray(weights, np.float32).reshape(1, TOP_K),
        form_dependent,
    )


def row(background: float, values: dict[int, float]) -> Array:
    """One row of logits or biases, `background` except where `values` says otherwise."""
    out = np.full(EXPERTS, background, np.float32)
    for expert, value in values.items():
        out[expert] = value
    return out


def _at(background: float, experts: Array, values: Any) -> Array:
    out = np.full(EXPERTS, background, np.float32)
    out[experts] = values
    return out


def _then_lowest(experts: Any) -> Array:
    """The given ids, then the lowest of the others, TOP_K in all."""
    head = np.asarray(experts, dtype=np.int64)
    return np.concatenate([head, np.setdiff1d(IDS, head)])[:TOP_K]


def _random(rng: Rng) -> Iterator[Case]:
    for sigma in (0.25, 1.0, 4.0, 12.0):
        for spread in (0.0, 0.02, 0.5):
            logits = rng.normal(0, sigma, (64, EXPERTS))
            yield _case(f"random_s{sigma}_b{spread}", logits, rng.normal(0, spread, EXPERTS))
    bits = rng.normal(0, 1, (64, EXPERTS)).astype(np.float32).view(np.uint32)
    bf16 = (bits & np.uint32(0xFFFF0000)).view(np.float32)  # many natural ties
    yield _case("random_bf16", bf16, rng.normal(0, 0.02, EXPERTS))
    wide = rng.uniform(-80, 80, (64, EXPERTS))
    yield _case("random_wide", wide, np.sin(IDS), form_dependent=True)


def _ties(rng: Rng) -> Iterator[Case]:
    yield _case("tie_all", 0.0, ids=FIRST, weights=EQUAL)
    yield _case("tie_all_negative_bias", 0.0, -3.0, ids=FIRST, weights=EQUAL)
    for count in (0, 1, 10, 15, 16):
        order = rng.permutation(EXPERTS)
        top, plateau = order[:count], np.sort(order[count : count + 40])
        logits = _at(-3.0, plateau, 1.0)
        logits[top] = 8 - 0.25 * np.arange(count)
        yield _case(f"tie_plateau_{count}", logits, ids=np.r_[top, plateau][:TOP_K])
    for world in WORLDS:  # a tied pair on the two sides of every shard edge
        starts = np.arange(world) * (EXPERTS // world)
        edges = np.union1d(starts, starts[1:] - 1)
        yield _case(f"tie_edges_w{world}", _at(-4.0, edges, 2.0), ids=_then_lowest(edges))
    # One choice from two pairs: 0.5 + 0.5 and 1.0 + 0.0 are the same fp32.
    mixed = rng.permutation(EXPERTS)[: 2 * TOP_K]
    half, whole = mixed[:TOP_K], mixed[TOP_K:]
    logits = _at(-30.0, half, 0.0)
    logits[whole] = 40.0
    ids = np.sort(mixed)[:TOP_K]
    score = np.where(np.isin(ids, half), 0.5, 1.0)
    bias = _at(0.0, half, 0.5)
    yield _case("tie_mixed_pairs", logits, bias, ids=ids, weights=score / score.sum())


def _near_ties(rng: Rng) -> Iterator[Case]:
    slope = np.linspace(-1e-5, 1e-5, EXPERTS)
    yield _case("near_linspace", slope, -slope, form_dependent=True)
    for exponent in (-24, -23, -20):  # sigmoid(0) is exactly 0.5, and these sums are exact
        steps = rng.permutation(EXPERTS)
        ids = np.argsort(-steps)[:TOP_K]
        yield _case(f"near_2^{exponent}", 0.0, steps * 2.0**exponent, ids=ids, weights=EQUAL)
    logits = rng.normal(0, 1, EXPERTS).astype(np.float32)
    top = np.argsort(-logits)[:64]
    logits[top] = 2.0 + np.arange(64) * 2.0**-22  # one ulp apart
    yield _case("near_logit_ulp", logits, form_dependent=True)


def _range(rng: Rng) -> Iterator[Case]:
    yield _case("wide_linspace", np.linspace(-80, 80, EXPERTS), form_dependent=True)
    hot = np.sort(rng.permutation(EXPERTS)[:100])  # sigmoid is 1 in every fp32 formula
    saturated = _at(-5.0, hot, rng.uniform(25, 200, 100))
    yield _case("saturated_high", saturated, ids=hot[:TOP_K], weights=EQUAL)
    yield _case("underflow_all", -200.0, ids=FIRST, weights=NOTHING)
    one = np.r_[1.0, np.zeros(TOP_K - 1)]
    yield _case("underflow_but_one", row(-200.0, {300: 0.0}), ids=_then_lowest([300]), weights=one)
    yield _case("low_tail", rng.uniform(-60, -20, EXPERTS), form_dependent=True)
    for depth in (3.0, 1e4, 1e30, 2.5e38):  # all choices below the usual sentinels
        steps = 1 + rng.permutation(EXPERTS) / (4.0 * EXPERTS)
        bias = (-depth * steps).astype(np.float32)
        ids = np.argsort(-(bias + np.float32(0.5)), kind="stable")[:TOP_K]
        yield _case(f"deep_negative_{depth:g}", 0.0, bias, ids=ids, weights=EQUAL)
    huge = np.where(IDS % 2 == 0, 3e38, -3e38)
    yield _case("huge_bias", rng.normal(0, 1, EXPERTS), huge, ids=2 * FIRST)
    signs = np.where(IDS % 3 == 0, -0.0, 0.0)
    yield _case("signed_zero_logits", signs, ids=FIRST, weights=EQUAL)
    yield _case("signed_zero_biases", 0.0, signs, ids=FIRST, weights=EQUAL)
    yield _case("signed_zero_choices", -200.0, signs, ids=FIRST, weights=NOTHING)
    yield _case("zero_choices", 0.0, -0.5, ids=FIRST, weights=EQUAL)


def _denormal(rng: Rng) -> Iterator[Case]:
    tiny = rng.uniform(-1, 1, EXPERTS) * 1e-39
    yield _case("denormal_logits", tiny, ids=FIRST, weights=EQUAL)
    yield _case("denormal_biases", 0.0, tiny, ids=FIRST, weights=EQUAL)
    choices = rng.permutation(EXPERTS) * 1e-42  # all tied for hardware that flushes
    yield _case("denormal_choices", -200.0, choices, form_dependent=True)
    yield _case("denormal_scores", rng.uniform(-103, -88, EXPERTS), form_dependent=True)


def _non_finite(rng: Rng) -> Iterator[Case]:
    base = rng.normal(0, 1, (8, EXPERTS)).astype(np.float32)
    counts = (1, 3, EXPERTS // 3, EXPERTS - 17, EXPERTS - 16, EXPERTS - 15, EXPERTS - 1, EXPERTS)
    for name, value in (("nan", NAN), ("pinf", INF), ("ninf", -INF)):
        for count in counts:
            logits = base.copy()
            for line in logits:
                line[rng.permutation(EXPERTS)[:count]] = value
            yield _case(f"logit_{name}_{count}", logits, rng.normal(0, 0.02, EXPERTS))
            bias = rng.normal(0, 0.02, EXPERTS).astype(np.float32)
            bias[rng.permutation(EXPERTS)[:count]] = value
            yield _case(f"bias_{name}_{count}", base, bias)
    wide, waves = np.linspace(-80, 80, EXPERTS), np.sin(IDS)
    wide[17], waves[33] = NAN, INF
    yield _case("wide_with_holes", wide, waves, form_dependent=True)
    for name, value in (("nan", NAN), ("pinf", INF), ("ninf", -INF)):
        yield _case(f"all_logits_{name}", value, ids=FIRST, weights=NOTHING)
        yield _case(f"all_biases_{name}", 0.0, value, ids=FIRST, weights=NOTHING)
    poisoned = base.copy()
    poisoned[::2] = NAN  # the rows between must not notice
    yield _case("nan_rows_between", poisoned, rng.normal(0, 0.02, EXPERTS))
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32)
    payloads = base.view(np.uint32).copy()  # quiet and signalling, both signs
    payloads[:, ::5] = np.resize(bits, payloads[:, ::5].shape[1])
    yield _case("nan_payloads", payloads.view(np.float32))


def _few_selectable(rng: Rng) -> Iterator[Case]:
    strides = sorted({2**n for n in range(9)} | {EXPERTS // w for w in WORLDS} | {7, 14, 28, 224})
    for count in range(1, TOP_K + 2):
        steps = np.arange(count)
        patterns = {"low": steps, "high": EXPERTS - 1 - steps, "any": rng.permutation(IDS)[:count]}
        for stride in strides:
            room = EXPERTS - (count - 1) * stride
            if room > 0:
                patterns[f"stride{stride}"] = rng.integers(0, room) + stride * steps
            patterns[f"wrap{stride}"] = np.unique((stride * steps + 5) % EXPERTS)
        for name, experts in patterns.items():
            yield from _only(rng, f"few{count}_{name}", experts)


def _only(rng: Rng, name: str, experts: Array) -> Iterator[Case]:
    """Make all but the given experts non-valid: by bias, by logit, and by all ways at once."""
    others = np.setdiff1d(IDS, experts)
    random = rng.normal(0, 1, (3, EXPERTS)).astype(np.float32)
    yield _case(f"{name}_bias", random[0], _at(0.0, others, -INF))
    random[1, others] = NAN
    yield _case(f"{name}_nan", random[1])
    mixed = rng.permutation(others)
    for start, value in enumerate((NAN, INF, -INF)):
        random[2, mixed[start::4]] = value
    yield _case(f"{name}_mixed", random[2], _at(0.0, mixed[3::4], -INF))


def _lane_classes(rng: Rng) -> Iterator[Case]:
    """Valid experts lane, lane + 32, lane + 64, ... of one block of 256: one lane holds them."""
    for count in (6, 7, 8):
        for block in range(0, EXPERTS, 256):
            for lane in (0, 1, 15, 16, 31):
                experts = block + lane + 32 * np.arange(count)
                experts = experts[experts < EXPERTS]
                rising = np.linspace(-1, 1, experts.size)
                for name, values in (("up", rising), ("down", -rising)):
                    best_first = experts[np.argsort(-values)]
                    yield _case(
                        f"lane{lane}_block{block}_{count}_{name}",
                        _at(NAN, experts, values),
                        ids=_then_lowest(best_first),
                    )


def _merge(rng: Rng) -> Iterator[Case]:
    """The valid experts lie at the same rank of each block's list of survivors."""
    blocks = np.arange(0, EXPERTS, 256)
    for count in range(1, TOP_K):
        turns, ranks = np.arange(count) % len(blocks), np.arange(count) // len(blocks)
        for lead in range(len(blocks)):
            experts = np.roll(blocks, -lead)[turns] + ranks
            logits = _at(NAN, experts, 3 - 0.1 * np.arange(count))
            yield _case(f"merge{count}_lead{lead}", logits, ids=_then_lowest(experts))


def _shape(rng: Rng) -> Iterator[Case]:
    rising = np.linspace(-3, 3, EXPERTS)
    yield _case("ascending", rising, ids=EXPERTS - 1 - FIRST)
    yield _case("descending", -rising, ids=FIRST)
    half = np.linspace(-3, 3, EXPERTS // 2)
    yield _case("organ_pipe", np.r_[half, -half])
    for world in WORLDS:
        width = EXPERTS // world
        for rank in sorted({0, world // 2, world - 1}):  # all winners in one rank's shard
            shard = rank * width + np.arange(width)
            logits = _at(-3.0, shard, np.linspace(1, 2, width))
            yield _case(f"one_rank_w{world}_r{rank}", logits, ids=shard[::-1][:TOP_K])
        each = np.arange(world) * width + width // 3  # a winner in each rank's shard
        logits = _at(-3.0, each, np.linspace(1, 2, world))
        yield _case(f"one_each_w{world}", logits, rng.normal(0, 1e-3, EXPERTS))


def _batch(rng: Rng) -> Iterator[Case]:
    for rows in (1, 2, 3, 4, 5, 8, 16, 32, 64):
        logits = rng.normal(0, 1, (rows, EXPERTS))
        yield _case(f"batch{rows}", logits, rng.normal(0, 0.02, EXPERTS))


FAMILIES: dict[str, Callable[[Rng], Iterator[Case]]] = {
    "random": _random,
    "ties": _ties,
    "near_ties": _near_ties,
    "range": _range,
    "denormal": _denormal,
    "non_finite": _non_finite,
    "few_selectable": _few_selectable,
    "lane_classes": _lane_classes,
    "merge": _merge,
    "shape": _shape,
    "batch": _batch,
}


# --- mistakes ----------------------------------------------------------------------------------

Mistake = Callable[[Case, Routing], tuple[Array, Array] | None]
"""Takes a case and the right answer to its first row, and returns wrong ids and weights, or None
where the mistake would leave the answer right or too close to right."""


def swap_a_tie(case: Case, right: Routing) -> tuple[Array, Array] | None:
    ids = right.ids.copy()
    pairs = zip(ids[0, :-1], ids[0, 1:], strict=True)
    for index, (a, b) in enumerate(pairs):
        equal = case.logits[0, a] == case.logits[0, b] and case.bias[a] == case.bias[b]
        if equal and right.valid[0, a] and right.valid[0, b]:
            ids[0, index], ids[0, index + 1] = b, a
            return ids, right.weights
    return None


def duplicate_an_id(case: Case, right: Routing) -> tuple[Array, Array] | None:
    ids = right.ids.copy()
    ids[0, -1] = ids[0, 0]
    return ids, right.weights


def take_the_next_best(case: Case, right: Routing) -> tuple[Array, Array] | None:
    choice = right.choice[0].astype(np.float64)
    order = np.argsort(-choice, kind="stable")
    last, runner_up = order[TOP_K - 1], order[TOP_K]
    if not right.valid[0, runner_up] or case.form_dependent:
        return None
    if choice[last] - choice[runner_up] < 2e-6 * max(1.0, abs(choice[runner_up])):
        return None
    ids = right.ids.copy()
    ids[0, -1] = runner_up
    return ids, right.weights


def let_a_non_finite_win(case: Case, right: Routing) -> tuple[Array, Array] | None:
    holes = np.flatnonzero(~right.valid[0])
    if not holes.size or right.valid[0].sum() < TOP_K:
        return None
    ids = right.ids.copy()
    ids[0, 0] = holes[0]
    return ids, right.weights


def forget_to_normalise(case: Case, right: Routing) -> tuple[Array, Array] | None:
    weights = np.take_along_axis(right.score, right.ids, axis=1)
    total = float(weights.sum())
    if case.form_dependent or total < 1e-4 or abs(total - 1) < 1e-3:
        return None
    return right.ids, weights


def weigh_with_the_bias(case: Case, right: Routing) -> tuple[Array, Array] | None:
    choice = np.take_along_axis(right.choice, right.ids, axis=1).astype(np.float64)
    total = choice.sum()
    if case.form_dependent or not np.isfinite(total) or abs(total) < 1e-6:
        return None
    weights = (choice / total).astype(np.float32)
    if np.allclose(weights, right.weights, rtol=1e-4, atol=1e-6) or right.score.max() < 1e-4:
        return None
    return right.ids, weights


def fill_with_the_highest(case: Case, right: Routing) -> tuple[Array, Array] | None:
    if right.valid[0].sum() >= TOP_K or right.valid[0, -1]:
        return None
    ids = right.ids.copy()
    ids[0, -1] = EXPERTS - 1
    return ids, right.weights


def swap_best_and_worst(case: Case, right: Routing) -> tuple[Array, Array] | None:
    choice = right.choice[0, right.ids[0]].astype(np.float64)
    if case.form_dependent or not right.valid[0].any():
        return None
    if choice[0] - choice[-1] < 2e-6 * max(1.0, abs(choice[0])):
        return None
    ids, weights = right.ids.copy(), right.weights.copy()
    for answer in (ids, weights):
        answer[0, [0, -1]] = answer[0, [-1, 0]]
    return ids, weights


def leak_a_placeholder(case: Case, right: Routing) -> tuple[Array, Array] | None:
    ids = right.ids.copy()
    ids[0, -1] = -1
    return ids, right.weights


def return_nan(case: Case, right: Routing) -> tuple[Array, Array] | None:
    weights = right.weights.copy()
    weights[0, 3] = np.nan
    return right.ids, weights


def weigh_the_fill(case: Case, right: Routing) -> tuple[Array, Array] | None:
    if not 0 < right.valid[0].sum() < TOP_K:
        return None
    weights = right.weights.copy()
    weights[0, -1] = 1e-7
    return right.ids, weights


MISTAKES: list[Mistake] = [
    swap_a_tie,
    duplicate_an_id,
    take_the_next_best,
    let_a_non_finite_win,
    forget_to_normalise,
    weigh_with_the_bias,
    fill_with_the_highest,
    swap_best_and_worst,
    leak_a_placeholder,
    return_nan,
    weigh_the_fill,
]

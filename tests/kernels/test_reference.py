"""The plain torch collectives against the NumPy oracle, and the oracle against itself."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import router_corpus
import router_oracle
import torch
from router_corpus import EXPERTS, FAMILIES, INF, MISTAKES, NAN, TOP_K, Mistake, corpus, row
from router_oracle import Array, Rule, lane_queues, route, violations

from pcie_comm.errors import InvalidArgumentError, UnsupportedError
from pcie_comm.kernels.reference import gather_columns, gather_heads, router_topk
from pcie_comm.kernels.router_spec import KIMI_K3, RouterSpec

RULES = {"torch": Rule(none_valid="zero"), "vllm": Rule(none_valid="uniform")}
SPECS = {numerics: RouterSpec(EXPERTS, TOP_K, numerics=numerics) for numerics in RULES}
LOWEST = list(range(TOP_K))


@pytest.fixture(params=RULES)
def numerics(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def run(logits: Array, bias: Array | float, numerics: str) -> tuple[Array, Array]:
    """Return (ids, weights) of the reference for NumPy input."""
    rows = torch.from_numpy(np.atleast_2d(np.asarray(logits, np.float32)).copy())
    biases = np.broadcast_to(np.asarray(bias, np.float32), (EXPERTS,)).copy()
    weights, ids = router_topk(rows, torch.from_numpy(biases), SPECS[numerics])
    return ids.numpy(), weights.numpy()


def same_bits(left: Array, right: Array) -> bool:
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()


# --- the corpus ------------------------------------------------------------------------------


def test_the_corpus_is_large_and_repeatable():
    first, again = list(corpus()), list(corpus())
    assert sum(case.logits.shape[0] for case in first) >= 3200
    assert len({case.name for case in first}) == len(first)
    assert {case.family for case in first} == set(FAMILIES)
    for left, right in zip(first, again, strict=True):
        assert left.name == right.name
        assert same_bits(left.logits, right.logits)
        assert same_bits(left.bias, right.bias)
    assert not same_bits(next(corpus()).logits, next(corpus(seed=1)).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_router_topk_keeps_the_contract(family: str, numerics: str):
    for case in corpus(family):
        ids, weights = run(case.logits, case.bias, numerics)
        found = violations(ids, weights, case.logits, case.bias, RULES[numerics])
        assert not found, f"{case.name}: {found}"
        if case.ids is not None:
            assert (ids == case.ids).all(), f"{case.name}: {ids}, expected {case.ids}"
        if case.weights is not None:
            valid = router_oracle.selectable(case.logits, case.bias).any()
            uniform = numerics == "vllm" and not valid
            want = router_corpus.EQUAL if uniform else case.weights
            assert (weights == want).all(), f"{case.name}: {weights}, expected {want}"


@pytest.mark.parametrize("form", router_oracle.SIGMOID_FORMS)
def test_the_checker_accepts_every_fp32_sigmoid(form: str):
    for case in corpus():
        answer = route(case.logits, case.bias, form=form)
        assert not violations(answer.ids, answer.weights, case.logits, case.bias), case.name
        if case.ids is not None:
            assert (answer.ids == case.ids).all(), case.name


def test_the_corpus_finds_queues_that_refill_with_a_used_expert():
    caught = dict.fromkeys(FAMILIES, 0)
    for case in corpus("ties", "non_finite", "few_selectable", "lane_classes", "merge", "shape"):
        answer = route(case.logits[:1], case.bias)
        want = answer.ids[0].tolist()
        assert lane_queues(answer.choice[0], refill="empty") == want, case.name
        if lane_queues(answer.choice[0], refill="last") != want:
            assert answer.valid[0].sum() < TOP_K, case.name
            caught[case.family] += 1
    assert min(caught["few_selectable"], caught["lane_classes"], caught["merge"]) >= 10


# --- the checker rejects planted mistakes ----------------------------------------------------


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_checker_rejects(mistake: Mistake):
    planted = 0
    for case in corpus():
        logits = case.logits[:1]
        wrong = mistake(case, route(logits, case.bias))
        if wrong is None:
            continue
        planted += 1
        assert violations(*wrong, logits, case.bias), case.name
    assert planted > 0


def test_the_checker_rejects_the_other_rule_for_an_empty_row():
    logits, bias = row(NAN, {})[None], row(0.0, {})
    zero, uniform = (route(logits, bias, rule) for rule in RULES.values())
    assert violations(uniform.ids, uniform.weights, logits, bias, RULES["torch"])
    assert violations(zero.ids, zero.weights, logits, bias, RULES["vllm"])


def test_the_checker_rejects_a_wrong_form():
    case = next(corpus("batch"))
    right = route(case.logits, case.bias)
    for ids, weights in (
        (right.ids.astype(np.int64), right.weights),
        (right.ids, right.weights.astype(np.float64)),
        (right.ids[:, :8], right.weights),
    ):
        assert violations(ids, weights, case.logits, case.bias)


# --- public bug reports ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "ids", "weights"),
    [
        pytest.param(
            {5: 1.0, 600: 2.0},
            [600, 5, 0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14],
            [0.546449, 0.453551],
            id="two",
        ),
        pytest.param({512: 1.0}, [512, *range(15)], [1.0], id="one"),
        pytest.param({767: 1.0}, [767, *range(15)], [1.0], id="one_last"),
        pytest.param(
            {2: 1.0, 3: 0.0, 700: 2.0}, [700, 2, 3, 0, 1, *range(4, 15)], None, id="three"
        ),
        pytest.param(
            {3 + 32 * n: 1 + 0.01 * n for n in range(8)},
            [227, 195, 163, 131, 99, 67, 35, 3, 0, 1, 2, 4, 5, 6, 7, 8],
            None,
            id="one_lane",
        ),
    ],
)
def test_b01_few_selectable_experts_never_repeat_an_id(values, ids, weights, numerics):
    got, got_weights = run(row(-INF, values), 0.0, numerics)
    assert got.tolist() == [ids]
    assert (got_weights[0, len(values) :] == 0).all()
    assert got_weights.sum() == pytest.approx(1.0, abs=1e-6)
    if weights is not None:
        assert got_weights[0, : len(weights)] == pytest.approx(weights, abs=1e-6)


def test_b03_nan_rows_give_distinct_ids_and_leave_the_others_alone(numerics):
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1, (4, EXPERTS)).astype(np.float32)
    bias = rng.normal(0, 0.02, EXPERTS).astype(np.float32)
    logits[2:] = NAN
    ids, weights = run(logits, bias, numerics)
    assert ids[2:].tolist() == [LOWEST, LOWEST]
    assert (weights[2:] == (0.0625 if numerics == "vllm" else 0.0)).all()
    for index in (0, 1):
        alone, alone_weights = run(logits[index], bias, numerics)
        assert same_bits(alone, ids[index : index + 1])
        assert same_bits(alone_weights, weights[index : index + 1])


def test_b03_one_number_among_nan_wins(numerics):
    ids, weights = run(row(NAN, {895: 0.0}), 0.0, numerics)
    assert ids.tolist() == [[895, *range(15)]]
    assert weights.tolist() == [[1.0] + [0.0] * 15]


def test_b03_a_row_of_minus_infinity(numerics):
    ids, weights = run(row(-INF, {}), 0.0, numerics)
    assert ids.tolist() == [LOWEST]
    assert (weights == (0.0625 if numerics == "vllm" else 0.0)).all()


def test_b22_underflow_of_all_selected_scores_gives_zero_not_nan(numerics):
    bias = row(0.0, dict.fromkeys(range(100, 116), 12.0))
    ordinary = np.random.default_rng(22).normal(0, 1, EXPERTS).astype(np.float32)
    ids, weights = run(np.stack([row(-120.0, {}), ordinary]), bias, numerics)
    assert ids[0].tolist() == list(range(100, 116))
    assert weights[0].tolist() == [0.0] * TOP_K
    alone, alone_weights = run(ordinary, bias, numerics)
    assert same_bits(alone, ids[1:])
    assert same_bits(alone_weights, weights[1:])


@pytest.mark.parametrize(
    ("bias", "ids"),
    [
        pytest.param(row(-3.0, {}), LOWEST, id="below_minus_one"),
        pytest.param(row(-3.0, {700: -2.9}), [700, *range(15)], id="one_above"),
        pytest.param(row(-3e38, {}), LOWEST, id="near_the_least_fp32"),
    ],
)
def test_b33_choices_below_any_start_value_are_ranked(bias, ids, numerics):
    got, weights = run(row(0.0, {}), bias, numerics)
    assert got.tolist() == [ids]
    assert weights.tolist() == [[0.0625] * TOP_K]


def test_b34_experts_beyond_255_can_win(numerics):
    logits = row(-5.0, dict(zip(range(880, 896), np.linspace(1, 2, 16), strict=True)))
    ids, _ = run(logits, 0.0, numerics)
    assert ids.tolist() == [list(range(895, 879, -1))]


@pytest.mark.parametrize(("experts", "top_k"), [(1025, 16), (2048, 16), (896, 33), (1024, 64)])
def test_b34_unsupported_counts_are_refused(experts, top_k):
    with pytest.raises(UnsupportedError):
        RouterSpec(experts, top_k)


@pytest.mark.parametrize("experts", [384, 895, 897, 1024])
def test_b34_logits_of_another_count_are_refused(experts):
    with pytest.raises(InvalidArgumentError, match=rf"\[2, {experts}\]"):
        router_topk(torch.zeros(2, experts), torch.zeros(experts), KIMI_K3)


# --- rows, layouts and arguments -------------------------------------------------------------


def test_a_row_has_the_same_bits_alone_and_in_any_batch(numerics, threads):
    rng = np.random.default_rng(7)
    logits = torch.from_numpy(rng.normal(0, 4, (257, EXPERTS)).astype(np.float32))
    bias = torch.from_numpy(rng.normal(0, 0.02, EXPERTS).astype(np.float32))
    threads(1)
    alone = [router_topk(line[None], bias, SPECS[numerics]) for line in logits]
    want_weights, want_ids = (torch.cat(part) for part in zip(*alone, strict=True))
    for count in (1, 2, 3, 5):
        threads(count)
        for begin, end in ((0, 257), (3, 20), (100, 229), (256, 257)):
            weights, ids = router_topk(logits[begin:end], bias, SPECS[numerics])
            assert torch.equal(weights, want_weights[begin:end]), (count, begin, end)
            assert torch.equal(ids, want_ids[begin:end]), (count, begin, end)


def test_the_number_of_threads_does_not_change_a_bit(numerics, threads):
    """Over a batch of this size, torch.sigmoid itself fails this with three threads.

    The bias brings 16 experts after the other to the top, so that every sigmoid is seen.
    """
    logits = torch.randn(257, EXPERTS, generator=torch.Generator().manual_seed(0)) * 4
    for first in range(0, EXPERTS, TOP_K):
        bias = torch.zeros(EXPERTS)
        bias[first : first + TOP_K] = 2.0
        threads(1)
        want = router_topk(logits, bias, SPECS[numerics])
        threads(3)
        got = router_topk(logits, bias, SPECS[numerics])
        assert torch.equal(got[0], want[0]), first
        assert torch.equal(got[1], want[1]), first


@pytest.mark.parametrize("offset", [0, 1, 3, 8, 15])
def test_strides_and_alignment_do_not_change_a_bit(offset, numerics):
    generator = torch.Generator().manual_seed(offset)
    logits = torch.randn(5, EXPERTS, generator=generator)
    bias = torch.randn(EXPERTS, generator=generator) * 0.02
    want = router_topk(logits, bias, SPECS[numerics])
    wide = torch.zeros(5, EXPERTS + 21)
    shifted = wide[:, offset : offset + EXPERTS].copy_(logits)
    by_column = logits.t().contiguous().t()
    for view in (shifted, by_column):
        got = router_topk(view, bias, SPECS[numerics])
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_torch_numerics_are_torch_sigmoid():
    logits = torch.linspace(-20, 20, EXPERTS).reshape(1, EXPERTS)
    weights, ids = router_topk(logits, torch.zeros(EXPERTS), KIMI_K3)
    score = torch.sigmoid(logits[0])[ids[0].long()]
    total = torch.zeros(())
    for value in score:
        total = total + value
    assert torch.equal(weights[0], score / (total + 1e-20))


def test_vllm_numerics_lose_a_score_that_tanh_rounds_away():
    for numerics, weight in (("torch", 0.0625), ("vllm", 0.0)):
        ids, weights = run(row(-30.0, {}), 0.0, numerics)
        assert ids.tolist() == [LOWEST]
        assert weights[0] == pytest.approx([weight] * TOP_K, rel=1e-6)


def test_no_rows(numerics):
    weights, ids = router_topk(torch.zeros(0, EXPERTS), torch.zeros(EXPERTS), SPECS[numerics])
    assert weights.shape == ids.shape == (0, TOP_K)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)


def test_inputs_are_left_alone(numerics):
    logits = torch.from_numpy(np.stack([row(NAN, {3: -0.0}), row(-INF, {})]))
    bias = torch.full((EXPERTS,), -0.0)
    before = logits.view(torch.int32).clone(), bias.view(torch.int32).clone()
    weights, ids = router_topk(logits, bias, SPECS[numerics])
    assert weights.is_contiguous()
    assert ids.is_contiguous()
    assert torch.equal(logits.view(torch.int32), before[0])
    assert torch.equal(bias.view(torch.int32), before[1])


@pytest.mark.parametrize(
    ("logits", "bias", "problem"),
    [
        (torch.zeros(EXPERTS), torch.zeros(EXPERTS), "wrong shape"),
        (torch.zeros(1, EXPERTS), torch.zeros(1, EXPERTS), "wrong shape"),
        (torch.zeros(1, EXPERTS), torch.zeros(EXPERTS - 1), "wrong shape"),
        (torch.zeros(1, EXPERTS).double(), torch.zeros(EXPERTS), "wrong dtype"),
        (torch.zeros(1, EXPERTS), torch.zeros(EXPERTS).bfloat16(), "wrong dtype"),
        (torch.zeros(1, EXPERTS), torch.zeros(EXPERTS, device="meta"), "wrong device"),
    ],
)
def test_wrong_router_inputs_are_refused(logits, bias, problem):
    with pytest.raises(InvalidArgumentError, match=f"{problem}: logits=.* on one device"):
        router_topk(logits, bias, KIMI_K3)


# --- gathers ---------------------------------------------------------------------------------

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
NAN_BITS = {
    torch.bfloat16: (np.uint16, [0x7FC0, 0xFFC0, 0x7F81, 0xFFFF]),
    torch.float16: (np.uint16, [0x7E00, 0xFE00, 0x7C01, 0xFFFF]),
    torch.float32: (np.uint32, [0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF]),
    torch.float8_e4m3fn: (np.uint8, [0x7F, 0xFF, 0x7F, 0xFF]),
    torch.float8_e5m2: (np.uint8, [0x7D, 0xFE, 0x7F, 0xFF]),
}


def bit_patterns(
    dtype: torch.dtype, shape: tuple[int, ...], seed: int
) -> tuple[Array, torch.Tensor]:
    """Random bits with NaN payloads, -0 and denormals, as unsigned integers and as `dtype`."""
    kind, nans = NAN_BITS[dtype]
    bits = np.random.default_rng(seed).integers(0, np.iinfo(kind).max, shape, kind, endpoint=True)
    flat = bits.reshape(-1)
    specials = [*nans, 1, int(np.iinfo(kind).max) // 2 + 1]
    count = min(flat.size, len(specials))
    flat[:count] = specials[:count]
    as_bytes = torch.tensor(flat.view(np.uint8))
    return bits, as_bytes.view(dtype).reshape(shape)


def bits_of(tensor: torch.Tensor, kind: type) -> Array:
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8).numpy().reshape(-1).view(kind).reshape(tensor.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_gathers_move_every_bit(dtype, world, rows):
    kind = NAN_BITS[dtype][0]
    for gather, shape in ((gather_columns, (rows, 37)), (gather_heads, (rows, 3, 11))):
        bits, shards = zip(
            *(bit_patterns(dtype, shape, seed) for seed in range(world)), strict=True
        )
        out = gather(shards)
        assert out.dtype == dtype
        assert same_bits(bits_of(out, kind), np.concatenate(bits, axis=1))
        assert rows == 0 or all(out.data_ptr() != shard.data_ptr() for shard in shards)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pattern_of_a_narrow_dtype_survives(dtype):
    kind = NAN_BITS[dtype][0]
    bits = np.arange(min(np.iinfo(kind).max, 0xFFFF) + 1, dtype=kind)
    shard = torch.from_numpy(bits.view(np.uint8).copy()).view(dtype).reshape(1, -1)
    out = gather_columns([shard, shard])
    assert same_bits(bits_of(out, kind), np.concatenate([bits, bits])[None])


def test_gathers_honour_strides():
    bits, wide = bit_patterns(torch.bfloat16, (4, 24), 1)
    left, right = wide[:, 1:9], wide[:, 15:23]
    want = np.concatenate([bits[:, 1:9], bits[:, 15:23]], axis=1)
    assert same_bits(bits_of(gather_columns([left, right]), np.uint16), want)
    heads = [left.reshape(4, 2, 4).transpose(1, 2), right.reshape(4, 2, 4).transpose(1, 2)]
    want = np.concatenate([bits_of(shard.contiguous(), np.uint16) for shard in heads], axis=1)
    assert same_bits(bits_of(gather_heads(heads), np.uint16), want)


def test_gathers_accept_strides_that_no_element_depends_on():
    """Torch calls these contiguous although the last stride is not 1."""
    empty = torch.zeros(0, 4).as_strided((0, 4), (1, 0))
    assert gather_columns([empty, empty]).shape == (0, 8)
    column = torch.arange(10.0).reshape(2, 5).t()[:, :1]
    assert column.is_contiguous()
    assert gather_columns([column, column]).tolist() == [[float(n), float(n)] for n in range(5)]


@pytest.mark.parametrize("gather", [gather_columns, gather_heads])
def test_gathers_refuse_what_does_not_fit(gather):
    good = torch.zeros(2, 3) if gather is gather_columns else torch.zeros(2, 3, 4)
    for wrong in (good.bfloat16(), good[:1], good[..., :1], good[0], good.to("meta")):
        with pytest.raises(InvalidArgumentError, match="rank 1 does not fit"):
            gather([good, wrong])
    with pytest.raises(InvalidArgumentError, match="shards=0"):
        gather([])

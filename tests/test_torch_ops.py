"""The collectives as torch operators: opcheck, torch.compile, handles.

One rank is enough for what a compiler does; where the answer depends on the ranks there are two.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from launcher import run_threads, succeeded
from test_plugins import PLUGIN, LargestOfRanks, values_of
from worlds import small

from pcie_comm import (
    ClosedError,
    InvalidArgumentError,
    RouterSpec,
    kimi_topk16,
    local_world,
    register,
    router_topk,
    torch_ops,
    tracing,
)
from pcie_comm.kernels import registry
from pcie_comm.kernels.all_gathers import GATHERS, AllGather
from pcie_comm.kernels.all_reduce_norm import AllReduceRmsNorm
from pcie_comm.kernels.router_presets import DEEPSEEK_V3, QWEN3_MOE

pytestmark = [
    pytest.mark.usefixtures("nothing_left_behind"),
    # torch's own: of its compiler's caches, and of what it calls itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]

BACKENDS = ["aot_eager", *(["inductor"] if shutil.which("g++") else [])]
VLLM = RouterSpec(896, 16, numerics="vllm")
OPS = torch.ops.pcie_comm


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Remember nothing of earlier tests and runs: caches know neither effects nor counts."""
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(automatic_dynamic_local_pgo=False),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        yield
    torch._dynamo.reset()


@pytest.fixture
def group():
    with local_world(1, "cpu", config=small(slot_nbytes=1 << 20)) as world:
        yield world.groups[0]


def kimi_inputs(rows: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(rows)
    return (
        torch.randn(rows, 3584, generator=random).bfloat16(),
        torch.randn(rows, 896, generator=random),
        torch.randn(896, generator=random),
    )


def check(operator, args, outs=None, **options) -> None:
    """Run torch's own checks on both forms of an operator."""
    passed = torch.library.opcheck(operator.default, args, options)
    assert set(passed.values()) == {"SUCCESS"}, passed
    results = operator(*args, **options)
    results = (results,) if isinstance(results, torch.Tensor) else results
    given = {f"out{i}": torch.empty_like(result) for i, result in enumerate(results)}
    passed = torch.library.opcheck(operator.out, args, {**options, **given})
    assert set(passed.values()) == {"SUCCESS"}, passed
    operator.out(*args, **options, **given)
    for result, out in zip(results, given.values(), strict=True):
        assert torch.equal(result.view(torch.uint8), out.view(torch.uint8))


def test_opcheck_of_every_operator(group):
    down, logits, bias = kimi_inputs(3)
    first, second = torch.randn(3, 5), torch.randn(3, 8).bfloat16()
    check(OPS.all_gather_pair, (group.handle, first, second))
    check(OPS.all_gather_heads, (group.handle, torch.randn(3, 2, 4).half()))
    for numerics in ("torch", "vllm"):
        check(OPS.all_gather_pair_kimi_topk, (group.handle, down, logits, bias), numerics=numerics)
        check(OPS.kimi_topk16, (logits, bias), numerics=numerics)


def test_a_registered_plugin_has_an_operator(group, monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    plugin = register(LargestOfRanks())
    bias = torch.ones(3, dtype=torch.int32)
    check(OPS.largest_of_ranks, (group.handle, values_of(0), bias))
    run = torch.compile(lambda x: group.run(plugin, x * 2, bias) + 1, fullgraph=True)
    assert torch.equal(run(values_of(0)), values_of(0) * 2 + 2)


def test_any_plugin_has_the_operator_run(group):
    """Also one that is not registered; outputs of several kinds, and tensors in any number."""
    bias = torch.ones(3, dtype=torch.int32)
    check_run(group, PLUGIN, [values_of(0), bias])
    check_run(group, GATHERS[3], [torch.randn(2, 3), torch.ones(2, 5).half(), torch.ones(2, 1)])
    with pytest.raises(Exception, match="takes 2 tensors, got 1"):
        torch.compile(lambda x: group.run(PLUGIN, x), fullgraph=True, backend="aot_eager")(bias)
    for handle in ("", "99999999/LargestOfRanks"):
        with pytest.raises(InvalidArgumentError, match="names no plugin"):
            OPS.run(group.handle, handle, [bias])


def check_run(group, plugin, tensors) -> None:
    """Run torch's own checks on both forms of `run`, and compare with the method."""
    args = group.handle, plugin.handle, tensors
    wanted = group.run(plugin, *tensors)
    wanted = [wanted] if isinstance(wanted, torch.Tensor) else list(wanted)
    assert set(torch.library.opcheck(OPS.run.default, args).values()) == {"SUCCESS"}
    outs = [torch.empty_like(one) for one in wanted]
    passed = torch.library.opcheck(OPS.run.out, args, {"outs": outs})
    assert set(passed.values()) == {"SUCCESS"}, passed
    OPS.run.out(*args, outs=outs)
    for found in (OPS.run(*args), outs):
        for want, one in zip(wanted, found, strict=True):
            assert torch.equal(want, one)


def test_results_have_no_gradient_compiled_or_not(group):
    x = torch.ones(2, 4, requires_grad=True)
    for call in (
        lambda x: group.run("all_reduce", x * 2),
        lambda x: group.run(NORM, x, x, x[0])[0],
        lambda x: group.all_gather_pair(x, x)[0],
    ):
        for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
            assert not run(x).requires_grad
            assert run(x * 1).grad_fn is None


def test_an_operator_is_made_anew_for_another_schema(group, monkeypatch):
    """The old one is undone at once, not when Python collects it."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    x = torch.ones(2, 4)
    try:
        register(AllGather(2))
        assert len(OPS.all_gather(group.handle, x, x)) == 2
    finally:
        register(AllGather(1))
    assert torch.equal(OPS.all_gather(group.handle, x), x)


def test_a_plugin_is_not_made_where_calls_are_traced(group):
    """Its handle would be of an instance that never was."""
    inputs = torch.ones(2, 4), torch.ones(2, 4), torch.ones(4)
    with pytest.raises(Exception, match="make it outside"):
        torch.compile(lambda *given: group.run(AllReduceRmsNorm(1e-5), *given), fullgraph=True)(
            *inputs
        )


@pytest.mark.parametrize("spec", [DEEPSEEK_V3, QWEN3_MOE, VLLM], ids=lambda spec: spec.token)
def test_any_router_has_operators(group, spec):
    """With a bias and without."""
    down = torch.randn(3, 64).bfloat16()
    logits = torch.randn(3, spec.num_experts)
    bias = torch.randn(spec.num_experts) if spec.bias else None
    check(OPS.router_topk, (logits, bias), spec=spec.token)
    if spec != VLLM:
        check(OPS.all_gather_pair_topk, (group.handle, down, logits, bias), spec=spec.token)
        with pytest.raises(InvalidArgumentError, match="spec="):
            OPS.all_gather_pair_topk(group.handle, down, logits, bias, spec="deepseek")
    if bias is None:
        with pytest.raises(InvalidArgumentError, match="leave it None"):
            OPS.router_topk(logits, logits[0], spec=spec.token)


NORM = AllReduceRmsNorm(1e-3)


def every_other_call(group, down, logits, bias, heads):
    """Calls by options, of other routers, and of plugins by instance and by name."""
    own = logits[:, :256]
    return (
        *group.all_gather_pair(down, logits, widths=(3584, 896)),
        group.all_gather_heads(heads, heads=2),
        *group.all_gather_pair_topk(down, own, bias[:256], spec=DEEPSEEK_V3, width=3584),
        *group.all_gather_pair_topk(down, own[:, :128], None, spec=QWEN3_MOE),
        *group.all_gather_pair_kimi_topk(down, logits, bias, spec=VLLM),
        *router_topk(own, bias[:256], DEEPSEEK_V3),
        *router_topk(own[:, :128], None, QWEN3_MOE),
        *kimi_topk16(logits, bias, spec=VLLM),
        *group.run("all_gather", down, logits, heads),
        *group.run(NORM, down, down, down[0]),
        group.run("all_reduce", logits, out=torch.empty_like(logits)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_other_call_compiles_without_a_graph_break(group, backend):
    compiled = torch.compile(every_other_call, fullgraph=True, backend=backend)
    for rows in (2, 3, 5):
        inputs = (group, *kimi_inputs(rows), torch.randn(rows, 2, 4).half())
        wanted, found = every_other_call(*inputs), compiled(*inputs)
        for index, (want, result) in enumerate(zip(wanted, found, strict=True)):
            torch.testing.assert_close(result, want, msg=lambda m, i=index: f"result {i}: {m}")


def test_compiled_calls_of_uneven_shards():
    """On three ranks, each of which compiles for itself."""
    down, heads = torch.randn(2, 10), torch.randn(2, 5, 4).half()
    downs, parts = down.tensor_split(3, dim=1), heads.tensor_split(3, dim=1)
    logits = torch.randn(2, 128).tensor_split(3, dim=1)

    def layer(group, down, part, logit):
        pair = group.all_gather_pair(down, down * 2, widths=(10, 10))
        fused = group.all_gather_pair_topk(down.half(), logit, None, spec=QWEN3_MOE, width=10)
        return *pair, group.all_gather_heads(part, heads=5), *fused

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    with local_world(3, "cpu", config=small(slot_nbytes=1 << 16)) as world:
        given = [(g, downs[g.rank], parts[g.rank], logits[g.rank]) for g in world.groups]
        wanted = world.run(lambda g: layer(*given[g.rank]))
        results = world.run(lambda g: compiled(*given[g.rank]))
    for want, result in zip(wanted, results, strict=True):
        for one, other in zip(want, result, strict=True):
            assert torch.equal(one, other)


def block(group, down, logits, bias, heads):
    """A layer's worth of calls, with computation before, between and after."""
    first, second = group.all_gather_pair(down * 2, logits + 1)
    mixed = group.all_gather_heads(heads.relu()).sum(-1)
    gathered, weights, ids = group.all_gather_pair_kimi_topk(down, logits, bias)
    vllm = group.all_gather_pair_kimi_topk(down, logits, bias, spec=VLLM)[1]
    again, twice = kimi_topk16(logits, bias)
    out = (torch.empty_like(down), torch.empty_like(logits))
    group.all_gather_pair(down, logits, out=out)
    same = kimi_topk16(logits, bias, out=(torch.empty_like(weights), torch.empty_like(ids)))
    return (
        first + 1,
        second,
        mixed,
        gathered,
        weights.sum(1),
        ids + 1,
        vllm,
        again,
        twice,
        *out,
        *same,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_compiles_without_a_graph_break(group, backend):
    """For several numbers of rows; two graphs serve all: one for a number, one for any."""
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(block, fullgraph=True, backend=graphs)
    for rows in (2, 3, 5, 8):
        down, logits, bias = kimi_inputs(rows)
        inputs = (group, down, logits, bias, torch.randn(rows, 2, 4).half())
        wanted, found = block(*inputs), compiled(*inputs)
        for index, (want, result) in enumerate(zip(wanted, found, strict=True)):
            torch.testing.assert_close(result, want, msg=lambda m, i=index: f"result {i}: {m}")
    assert graphs.frame_count == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_block_keeps_the_order_of_its_calls(group, backend, monkeypatch):
    """Also of calls whose results nobody uses, and of those with `out=`: peers count them."""
    seen = []
    issue = group._channels["default"].issue

    def watched(collective, tensors, out):
        seen.append(int(tensors[0][0, 0]))
        return issue(collective, tensors, out)

    monkeypatch.setattr(group._channels["default"], "issue", watched)

    def calls(x):
        total = x.sum()
        for factor in (2, 3, 4, 5, 6, 7):
            if factor == 3:
                group.all_gather_pair(x * factor, x)
                continue
            out = (torch.empty_like(x), torch.empty_like(x)) if factor % 2 else None
            first, _ = group.all_gather_pair(x * factor, x, out=out)
            total = total + first.sum() if factor < 7 else total * first.sum()
        return total

    compiled = torch.compile(calls, fullgraph=True, backend=backend)
    assert float(compiled(torch.ones(2, 2))) == (4 * (1 + 2 + 4 + 5 + 6)) * 28
    assert seen == [2, 3, 4, 5, 6, 7]


def test_the_order_is_not_kept_without_the_effect(group, monkeypatch):
    """Negative control: an operator that is only functional is dropped where it is not used."""
    library = torch.library.Library("pcie_comm_test", "FRAGMENT")
    seen = []
    library.define("twin(Tensor x) -> Tensor")
    library.impl("twin", lambda x: seen.append(int(x[0])) or x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("pcie_comm_test::twin", torch.empty_like, lib=library)

    def calls(x):
        torch.ops.pcie_comm_test.twin(x * 3)
        return torch.ops.pcie_comm_test.twin(x * 2)

    torch.compile(calls, fullgraph=True, backend="aot_eager")(torch.ones(2))
    assert seen == [2]


def test_without_effects_nothing_is_compiled(group, monkeypatch):
    """A torch that calls them otherwise: refused, and eager calls work."""
    from torch._higher_order_ops import effects

    monkeypatch.setattr(tracing, "unordered", "")
    monkeypatch.delattr(effects, "_register_effectful_op")
    torch_ops._keep_in_order(OPS.all_gather_heads.default)
    assert "does not keep their order" in tracing.unordered
    heads = torch.ones(1, 1, 4).half()
    with pytest.raises(Exception, match="cannot be compiled"):
        torch.compile(group.all_gather_heads, fullgraph=True, backend="aot_eager")(heads)
    assert torch.equal(group.all_gather_heads(heads), heads)


def test_two_ranks_run_one_compiled_function():
    """Each rank compiles for its own handle; lanes have handles of their own."""

    def on_rank(group):
        lane = group.channel("draft")
        assert lane.handle != group.handle

        def layer(x):
            first, second = group.all_gather_pair(x, x + 10)
            return lane.all_gather_heads((first + second)[:, None].half())

        x = torch.full((2, 2), float(group.rank))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        return layer, compiled, x

    with local_world(2, "cpu", config=small()) as world:
        made = world.run(on_rank)
        eager = world.run(lambda g: made[g.rank][0](made[g.rank][2]))
        results = world.run(lambda g: made[g.rank][1](made[g.rank][2]))
    want = torch.tensor([10.0, 10, 12, 12]).half().expand(2, 4).repeat(1, 2).view(2, 2, 4)
    for result in (*eager, *results):
        assert torch.equal(result, want)


def test_a_closed_or_unknown_handle_is_refused():
    pair, heads = (torch.ones(1, 2), torch.ones(1, 2)), torch.ones(1, 1, 2).half()
    with local_world(1, "cpu", config=small()) as world:
        group = world.groups[0]
        handle, lane = group.handle, group.channel("draft").handle
        assert OPS.all_gather_pair(handle, *pair)[0].tolist() == [[1.0, 1.0]]
        compiled = torch.compile(group.all_gather_heads, fullgraph=True, backend="aot_eager")
        compiled(heads)
    for name in (handle, lane):
        with pytest.raises(ClosedError, match="is closed"):
            OPS.all_gather_pair(name, *pair)
    with pytest.raises(ClosedError):
        compiled(heads)
    del group, world, compiled
    torch._dynamo.reset()
    with pytest.raises(ClosedError):
        OPS.all_gather_pair(handle, *pair)
    for name in ("none", "", "99999999/default", "-1/default"):
        with pytest.raises(InvalidArgumentError, match="names no channel"):
            OPS.all_gather_pair(name, *pair)


def test_wrong_shapes_are_refused_while_tracing(group):
    def wrong(x):
        return group.all_gather_heads(x, out=torch.empty(1, 2, 4, dtype=torch.float16))

    with pytest.raises(Exception, match=r"out\[0\] has another shape"):
        torch.compile(wrong, fullgraph=True, backend="aot_eager")(torch.randn(3, 2, 4).half())
    with pytest.raises(InvalidArgumentError, match="local_heads"):
        OPS.all_gather_heads(group.handle, torch.randn(3, 2, 4))


def test_ranks_run_operators_and_methods_alike():
    with local_world(3, "cpu", config=small()) as world:

        def on_rank(rank):
            group = world.groups[rank]
            x = torch.full((1, 2), float(rank))
            return OPS.all_gather_pair(group.handle, x, -x)[0].tolist()

        assert succeeded(run_threads(on_rank, 3)) == [[[0.0, 0, 1, 1, 2, 2]]] * 3

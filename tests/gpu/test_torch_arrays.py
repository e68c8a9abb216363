"""At home in torch and CuPy on a GPU: operators compile, arrays go in and out without a copy."""

from __future__ import annotations

import harness
import pytest
import torch

from pcie_comm import kimi_topk16, local_world
from pcie_comm.cuda_engine import CudaEngine
from pcie_comm.kernels.launch import Arguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]

OPS = torch.ops.pcie_comm


@pytest.fixture
def group():
    with local_world(1, harness.DEVICE) as world:
        stream, world.groups[0].stream = world.streams[0], world.streams[0]
        for op in ("all_gather_pair", "all_gather_heads", "all_gather_pair_kimi_topk"):
            world.groups[0].prepare(op)
        with torch.cuda.stream(stream):
            yield world.groups[0]
            stream.synchronize()
        world.groups[0].check()


@pytest.fixture
def launched(monkeypatch):
    """Addresses that launches got."""
    found = []
    bind, point_to = CudaEngine.bind, Arguments.point_to

    def binding(engine, kernel, plan, addresses):
        if any(addresses):
            found.append(list(addresses))
        return bind(engine, kernel, plan, addresses)

    def pointing(arguments, addresses):
        found.append(list(addresses))
        point_to(arguments, addresses)

    monkeypatch.setattr(CudaEngine, "bind", binding)
    monkeypatch.setattr(Arguments, "point_to", pointing)
    return found


def make_inputs(rows: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(rows, 3584, device=harness.DEVICE).bfloat16(),
        torch.randn(rows, 896, device=harness.DEVICE),
        torch.randn(896, device=harness.DEVICE),
        torch.randn(rows, 2, 128, device=harness.DEVICE).half(),
    )


def test_opcheck(group):
    down, logits, bias, heads = make_inputs(3)
    calls = {
        OPS.all_gather_pair: (group.handle, down, logits),
        OPS.all_gather_heads: (group.handle, heads),
        OPS.all_gather_pair_kimi_topk: (group.handle, down, logits, bias),
        OPS.kimi_topk16: (logits, bias),
    }
    for operator, args in calls.items():
        assert set(torch.library.opcheck(operator.default, args).values()) == {"SUCCESS"}
        results = operator(*args)
        results = (results,) if isinstance(results, torch.Tensor) else results
        outs = {f"out{i}": torch.empty_like(result) for i, result in enumerate(results)}
        assert set(torch.library.opcheck(operator.out, args, outs).values()) == {"SUCCESS"}


def block(group, down, logits, bias, heads):
    first, second = group.all_gather_pair(down * 2, logits + 1)
    mixed = group.all_gather_heads(heads.relu()).float().sum(-1)
    gathered, weights, ids = group.all_gather_pair_kimi_topk(down, logits, bias)
    again, twice = kimi_topk16(logits, bias)
    out = (torch.empty_like(down), torch.empty_like(logits))
    group.all_gather_pair(down, logits, out=out)
    return first + 1, second, mixed, gathered, weights.sum(1), ids + 1, again, twice, *out


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_block_compiles_and_is_captured(group, backend, figures):
    """Eagerly for several rows, then in a CUDA graph, which replays with new inputs."""
    if backend == "inductor":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for rows in (2, 3, 8):
        inputs = make_inputs(rows)
        for want, found in zip(block(group, *inputs), compiled(group, *inputs), strict=True):
            torch.testing.assert_close(found, want)
    inputs = make_inputs(8)
    compiled(group, *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=group.stream):
        results = compiled(group, *inputs)
    for _ in range(3):
        for tensor, new in zip(inputs, make_inputs(8), strict=True):
            tensor.copy_(new)
        graph.replay()
        for want, found in zip(block(group, *inputs), results, strict=True):
            torch.testing.assert_close(found, want)
    figures(backend=backend, fullgraph=True, captured=True)
    torch._dynamo.reset()


def test_reduce_overhead_mode(group):
    """Inductor's own CUDA graphs, where it makes them."""
    pytest.importorskip("triton")
    torch._dynamo.reset()
    down, logits, bias, _ = make_inputs(4)

    def layer(down, logits):
        return group.all_gather_pair_kimi_topk(down * 2, logits, bias)[1] * 3

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        torch.testing.assert_close(compiled(down, logits).clone(), layer(down, logits))
    torch._dynamo.reset()


def test_cupy_goes_in_and_comes_out_without_a_copy(group, launched, figures):
    cupy = pytest.importorskip("cupy")
    first = cupy.random.standard_normal((3, 8), dtype=cupy.float32)
    second = first[:, :4].astype(cupy.float16)
    results = group.all_gather_pair(first, second)
    assert [type(result) for result in results] == [cupy.ndarray] * 2
    assert launched[-1] == [array.data.ptr for array in (first, second, *results)]
    assert bool((results[0] == first).all())
    assert bool((results[1] == second).all())
    out = tuple(cupy.zeros_like(result) for result in results)
    assert group.all_gather_pair(first, second, out=out) is out
    assert launched[-1] == [array.data.ptr for array in (first, second, *out)]
    assert bool((out[0] == first).all())
    heads = cupy.ones((3, 2, 4), dtype=cupy.float16)
    gathered = group.all_gather_heads(heads)
    assert launched[-1] == [heads.data.ptr, gathered.data.ptr]
    logits = cupy.random.standard_normal((5, 896), dtype=cupy.float32)
    bias = cupy.zeros(896, dtype=cupy.float32)
    weights, ids = kimi_topk16(logits, bias)
    assert launched[-1] == [array.data.ptr for array in (logits, bias, weights, ids)]
    want = kimi_topk16(torch.from_dlpack(logits), torch.from_dlpack(bias))
    assert bool((ids == cupy.from_dlpack(want[1])).all())
    figures(cupy=cupy.__version__, copies=0, calls=len(launched))


def test_cupy_streams_are_ordered(group):
    """Nobody synchronises: long work before the call, use of the result after it."""
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True):
        for value in range(20):
            array = cupy.zeros((64, 4096), dtype=cupy.float32)
            for _ in range(20):
                array += 1
            array *= value
            first, _ = group.all_gather_pair(array[:8], array[:8])
            out = (cupy.zeros((8, 4096), cupy.float32), cupy.zeros((8, 4096), cupy.float32))
            group.all_gather_pair(array[:8], array[:8], out=out)
            assert float((first + out[0]).sum()) == 2 * 8 * 4096 * 20.0 * value

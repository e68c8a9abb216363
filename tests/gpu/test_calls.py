"""Capture, wrong input and failures on the GPU. What could hang has a bound of a second or two."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import harness
import pytest
import torch

from pcie_comm import (
    BrokenError,
    ClosedError,
    CompileError,
    Config,
    InvalidArgumentError,
    MismatchError,
    PeerAbortedError,
    PeerTimeoutError,
    UnsupportedError,
    local_world,
)

pytestmark = pytest.mark.gpu

KIMI_OP = "all_gather_pair_kimi_topk"
TRANSPORTS = ["cuda_local", "host_pinned"]
"""In host memory block 0 looks at the flags for the others; rows enough for several blocks."""

FAST = Config(timeout_s=1.0)


def own_inputs(group, batch):
    return [tensor[0, group.rank] for tensor in batch.inputs] + batch.shared


def test_b17_cold_capture_is_refused_and_named():
    """Nothing is recorded, the capture ends cleanly, eager calls and a warm capture work."""
    with local_world(1, harness.DEVICE) as world:
        group = world.groups[0]
        batch = harness.make_batch(KIMI_OP, 1, 1, 1)
        inputs, out = own_inputs(group, batch), tuple(t[0, 0] for t in batch.outputs)
        stream = world.streams[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out[1].add_(0)
            with pytest.raises(CompileError, match=r"group\.prepare\(\"all_gather_pair_kimi_topk"):
                group.all_gather_pair_kimi_topk(*inputs, out=out)
        graph.replay()
        torch.cuda.synchronize()
        group.prepare("all_gather_pair_kimi_topk", rows=8)
        with torch.cuda.graph(graph2 := torch.cuda.CUDAGraph(), stream=stream):
            group.all_gather_pair_kimi_topk(*inputs, out=out)
        graph2.replay()
        torch.cuda.synchronize()
        assert batch.mismatches() == 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("protocol", ["tagged", "push"])
def test_eager_calls_and_replays_mix(protocol, overlap):
    config = Config(timeout_s=5, protocol=protocol, overlap=overlap)
    with local_world(4, harness.DEVICE, config=config) as world:
        for group in world.groups:
            group.prepare("all_gather_pair")
        eager = harness.make_batch("all_gather_pair", 40, 4, 3)
        captured = harness.make_batch("all_gather_pair", 1, 4, 1)
        graphs = []
        for group, stream in zip(world.groups, world.streams, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                captured.call(group, 0)
            graphs.append(graph)
        for index in range(40):
            for group, stream, graph in zip(world.groups, world.streams, graphs, strict=True):
                torch.cuda.set_stream(stream)
                eager.call(group, index)
                graph.replay()
                if index % 3 == 0:
                    graph.replay()
        torch.cuda.set_stream(torch.cuda.default_stream())
        torch.cuda.synchronize()
        assert eager.mismatches() == 0
        assert captured.mismatches() == 0


def test_channels_are_independent_lanes():
    with local_world(2, harness.DEVICE, config=Config(timeout_s=5)) as world:
        first, second = (harness.make_batch("all_gather_pair", 20, 2, 2) for _ in range(2))
        lanes = world.run(lambda group: group.channel("draft"))
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        for index in range(20):
            for rank in (0, 1) if index % 2 else (1, 0):
                order = [(world.groups, first, world.streams), (lanes, second, streams)]
                for callers, batch, own in order if rank else order[::-1]:
                    torch.cuda.set_stream(own[rank])
                    inputs = [t[index, rank] for t in batch.inputs]
                    callers[rank].all_gather_pair(
                        *inputs, out=tuple(t[index, rank] for t in batch.outputs)
                    )
        torch.cuda.set_stream(torch.cuda.default_stream())
        torch.cuda.synchronize()
        assert first.mismatches() == 0
        assert second.mismatches() == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_missing_peer_ends_in_a_timeout_that_names_it(transport):
    """The launch ends by itself, later calls fail at once, the context lives on."""
    with local_world(2, harness.DEVICE, transport, config=FAST) as world:
        batch = harness.make_batch("all_gather_pair", 2, 2, 32)
        for group in world.groups:
            group.prepare("all_gather_pair")
        torch.cuda.synchronize()
        started = time.monotonic()
        with torch.cuda.stream(world.streams[0]):
            batch.call(world.groups[0], 0)
        torch.cuda.synchronize()
        elapsed = time.monotonic() - started
        assert 0.9 < elapsed < 2.0
        with pytest.raises(PeerTimeoutError) as caught:
            world.groups[0].check()
        error = caught.value
        assert (error.rank, error.peer, error.op) == (0, 1, "all_gather_pair")
        assert error.wanted == error.epoch == 1
        assert error.seen == 0
        assert 0.9e9 < error.elapsed_ns < 2e9
        with pytest.raises(BrokenError) as caught, torch.cuda.stream(world.streams[0]):
            batch.call(world.groups[0], 1)
        assert isinstance(caught.value.__cause__, PeerTimeoutError)
        assert bool((batch.outputs[0][1].view(torch.uint8) == harness.POISON).all())
        assert torch.ones(4, device="cuda").sum().item() == 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_different_ops_are_a_mismatch_on_both(transport):
    with local_world(2, harness.DEVICE, transport, config=Config(timeout_s=5)) as world:
        pair = harness.make_batch("all_gather_pair", 1, 2, 1)
        heads = harness.make_batch("all_gather_heads", 1, 2, 1)
        for group in world.groups:
            group.prepare("all_gather_pair")
            group.prepare("all_gather_heads")
        torch.cuda.synchronize()
        started = time.monotonic()
        for batch, rank in ((pair, 0), (heads, 1)):
            with torch.cuda.stream(world.streams[rank]):
                batch.call(world.groups[rank], 0)
        torch.cuda.synchronize()
        assert time.monotonic() - started < 2.0
        for group in world.groups:
            with pytest.raises(MismatchError) as caught:
                group.check()
            assert set(caught.value.values) == {0, 1}
        for batch, rank in ((pair, 0), (heads, 1)):  # the peer's half holds nothing of its bytes
            halves = batch.outputs[0][0, rank].flatten(1).view(torch.uint8).chunk(2, dim=1)
            assert bool((halves[1 - rank] == harness.POISON).all())


@pytest.mark.parametrize(("rows_0", "rows_1"), [(4, 8), (8, 4), (1, 64)])
def test_b36_different_rows_are_a_mismatch(rows_0, rows_1):
    with local_world(2, harness.DEVICE, config=Config(timeout_s=2)) as world:
        batches = [harness.make_batch(KIMI_OP, 1, 2, rows) for rows in (rows_0, rows_1)]
        for group in world.groups:
            group.prepare("all_gather_pair_kimi_topk")
        torch.cuda.synchronize()
        for rank, batch in enumerate(batches):
            with torch.cuda.stream(world.streams[rank]):
                batch.call(world.groups[rank], 0)
        torch.cuda.synchronize()
        for group in world.groups:
            with pytest.raises(MismatchError):
                group.check()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_abort_ends_a_wait_at_once(transport):
    with local_world(2, harness.DEVICE, transport, config=Config(timeout_s=20)) as world:
        batch = harness.make_batch("all_gather_pair", 1, 2, 1)
        world.groups[0].prepare("all_gather_pair")
        torch.cuda.synchronize()
        with torch.cuda.stream(world.streams[0]):
            batch.call(world.groups[0], 0)
        threading.Timer(0.2, world.groups[0].abort).start()
        started = time.monotonic()
        torch.cuda.synchronize()
        assert time.monotonic() - started < 2.0
        with pytest.raises(PeerAbortedError):
            world.groups[0].check()


def test_b36_rows_on_one_rank_only_are_a_mismatch():
    with local_world(2, harness.DEVICE, config=Config(timeout_s=2)) as world:
        full = torch.zeros(1, 16, device="cuda")
        for group, rows in zip(world.groups, (0, 1), strict=True):
            with torch.cuda.stream(world.streams[group.rank]):
                group.all_gather_pair(full[:rows], full[:rows])
        torch.cuda.synchronize()
        for group in world.groups:
            with pytest.raises(MismatchError):
                group.check()


def test_zero_rows_return_empty_outputs():
    with local_world(2, harness.DEVICE) as world:
        down = torch.empty(0, 1792, dtype=torch.bfloat16, device="cuda")
        router, bias = torch.empty(0, 448, device="cuda"), torch.zeros(896, device="cuda")
        for result in world.run(lambda g: g.all_gather_pair_kimi_topk(down, router, bias)):
            assert [tuple(t.shape) for t in result] == [(0, 3584), (0, 16), (0, 16)]


WRONG = {
    "dtype": lambda g, d, r, b: g.all_gather_pair_kimi_topk(d.half(), r, b),
    "shape": lambda g, d, r, b: g.all_gather_pair_kimi_topk(d[:, :-8], r, b),
    "bias shape": lambda g, d, r, b: g.all_gather_pair_kimi_topk(d, r, b[:-1]),
    "device": lambda g, d, r, b: g.all_gather_pair_kimi_topk(d.cpu(), r, b),
    "rows differ": lambda g, d, r, b: g.all_gather_pair_kimi_topk(d, r[:1], b),
    "inner stride": lambda g, d, r, b: g.all_gather_pair_kimi_topk(d, r.t().contiguous().t(), b),
    "no tensor": lambda g, d, r, b: g.all_gather_pair(d, None),
    "out overlaps": lambda g, d, r, b: g.all_gather_pair(d, d, out=(d.repeat(1, 2), r)),
    "out shape": lambda g, d, r, b: g.all_gather_pair(d, d, out=(d, d)),
    "out layout": lambda g, d, r, b: g.all_gather_heads(
        d.view(2, 2, -1), out=d.new_empty(4, 896, 2).permute(2, 0, 1)
    ),
}


def test_wrong_input_is_refused_before_anything_is_enqueued():
    with local_world(2, harness.DEVICE, config=FAST) as world:
        down = torch.randn(2, 1792, device="cuda").bfloat16()
        router, bias = torch.randn(2, 448, device="cuda"), torch.randn(896, device="cuda")
        group = world.groups[0]
        for name, call in WRONG.items():
            print(name)
            with pytest.raises(InvalidArgumentError, match="="):
                call(group, down, router, bias)
        buffer = torch.zeros(4, 1792 * 2, dtype=torch.bfloat16, device="cuda")
        with pytest.raises(InvalidArgumentError, match="overlaps"):
            group.all_gather_heads(
                buffer[:2, :1792].view(2, 1, 1792), out=buffer[:2].view(2, 2, 1792)
            )
        torch.cuda.synchronize()
        results = world.run(lambda g: g.all_gather_pair(down, down))  # epochs still agree
        assert all(torch.equal(first, down.repeat(1, 2)) for first, _ in results)


def test_equal_shards_of_what_does_not_divide():
    with local_world(3, harness.DEVICE) as world:
        world.groups[0].prepare("all_gather_pair_kimi_topk")
        down = torch.empty(1, 1194, dtype=torch.bfloat16, device="cuda")
        router, bias = torch.empty(1, 298, device="cuda"), torch.empty(896, device="cuda")
        with pytest.raises(InvalidArgumentError, match=r"\[rows, 299\]"):
            world.groups[0].all_gather_pair_kimi_topk(down, router, bias)


def test_a_closed_group_says_so():
    with local_world(1, harness.DEVICE) as world:
        group = world.groups[0]
        heads = torch.zeros(1, 1, 8, device="cuda").bfloat16()
        group.close()
        group.close()
        with pytest.raises(ClosedError):
            group.all_gather_heads(heads)


def test_two_ranks_of_one_process_cannot_use_cuda_ipc():
    """B37 (c): a clear error at setup, on both."""
    world = local_world(2, harness.DEVICE, transport="cuda_ipc")
    with pytest.raises(UnsupportedError, match="cuda_local"):
        world.__enter__()


EXPANDABLE = """
import sys
sys.path[:0] = {paths!r}
import torch, harness
from pcie_comm import local_world, Config
with local_world(2, "cuda:0", config=Config(timeout_s=5)) as world:
    batch = harness.make_batch("all_gather_pair", 20, 2, 2)
    harness.run_eager(world, batch)
    harness.Replayed(world, [harness.make_batch("all_gather_pair", 3, 2, 2)]).run()
    print("mismatches", batch.mismatches())
"""


def test_b13_expandable_segments(monkeypatch):
    """Slabs are the library's own plain allocations, whatever torch's allocator does."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE.format(paths=paths)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "mismatches 0" in done.stdout, done.stdout + done.stderr


def test_b37_ranks_of_one_gpu_and_the_callers_device():
    """Two ranks on one GPU work; the caller's device and stream are what they were."""
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
    with local_world(2, harness.DEVICE) as world:
        heads = torch.randn(2, 1, 8, device="cuda").bfloat16()
        world.run(lambda group: group.all_gather_heads(heads))
        with pytest.raises(InvalidArgumentError):
            world.groups[0].all_gather_heads(heads.cpu())
    assert torch.cuda.current_device() == device
    assert torch.cuda.current_stream() == stream


def test_b05_the_caller_may_overwrite_its_input_on_the_same_stream():
    with local_world(2, harness.DEVICE, config=Config(timeout_s=5)) as world:
        local = [torch.zeros(1, 4096, device="cuda") for _ in range(2)]
        other = [torch.zeros(1, 16, device="cuda") for _ in range(2)]
        out = torch.empty(2000, 2, 1, 8192, device="cuda")
        small = torch.empty(2000, 2, 1, 32, device="cuda")
        local[0].fill_(0)
        torch.cuda._sleep(1)  # torch loads code at first use, and may wait for spinning kernels
        torch.cuda.synchronize()
        for index in range(2000):
            for group, stream in zip(world.groups, world.streams, strict=True):
                torch.cuda.set_stream(stream)
                rank = group.rank
                local[rank].fill_(float(index))
                if rank == 1 and index % 50 == 0:
                    torch.cuda._sleep(400_000)
                group.all_gather_pair(
                    local[rank], other[rank], out=(out[index, rank], small[index, rank])
                )
                local[rank].fill_(-1.0)
        torch.cuda.set_stream(torch.cuda.default_stream())
        torch.cuda.synchronize()
        want = torch.arange(2000, device="cuda", dtype=torch.float32).view(-1, 1, 1, 1)
        assert bool((out == want).all())

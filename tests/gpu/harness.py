"""Drives N ranks on one GPU from one thread: inputs of every round at once, checks in bulk.

Nothing is synchronised between rounds: launches queue up back to back on the ranks' streams, each
round with its own random bytes and its own poisoned outputs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pcie_comm import KIMI_K3, PcieDcpGroup, RouterSpec, kimi_topk16
from pcie_comm.local import LocalWorld

DEVICE = "cuda:0"
HIDDEN, EXPERTS, TOP_K = 3584, 896, 16
KIMI_WORLDS = (1, 2, 4, 7, 8, 14, 16)
POISON = 0xA5
FULL_ROUNDS = int(os.environ.get("PCIE_COMM_TEST_ROUNDS", "1000"))
"""Rounds per combination; smaller for a quick look."""

VLLM = RouterSpec(EXPERTS, TOP_K, numerics="vllm")


@dataclass
class Batch:
    """All rounds of one operation: per input and output one tensor [rounds, world, ...]."""

    op: str
    inputs: list[torch.Tensor]
    shared: list[torch.Tensor]
    outputs: list[torch.Tensor]
    expected: list[torch.Tensor]

    def call(self, group: PcieDcpGroup, index: int, spec: RouterSpec = KIMI_K3) -> None:
        """Enqueue round `index` of this rank on the current stream."""
        rank = group.rank
        inputs = [tensor[index, rank] for tensor in self.inputs]
        out = tuple(tensor[index, rank] for tensor in self.outputs)
        self.enqueue(group, inputs, out, spec)

    def enqueue(self, group, inputs, out, spec: RouterSpec = KIMI_K3) -> None:
        if self.op == "all_gather_pair":
            group.all_gather_pair(*inputs, out=out)
        elif self.op == "all_gather_heads":
            group.all_gather_heads(*inputs, out=out[0])
        else:
            group.all_gather_pair_kimi_topk(*inputs, *self.shared, out=out, spec=spec)

    def mismatches(self, ranks: Iterable[int] | None = None) -> int:
        """Return how many (round, rank) outputs differ from what they must be, in any byte."""
        bad = torch.zeros(self.outputs[0].shape[:2], dtype=torch.bool, device=DEVICE)
        for output, expected in zip(self.outputs, self.expected, strict=True):
            for rank in range(output.shape[1]) if ranks is None else ranks:
                got = output[:, rank].contiguous().view(torch.uint8).flatten(1)
                want = expected.contiguous().view(torch.uint8).flatten(1)
                bad[:, rank] |= (got != want).any(1)
        return int(bad.sum())


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return random bits of every pattern, NaNs and tag look-alikes included."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, device=DEVICE)
    return raw.view(dtype)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor full of poison bytes."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.full((*shape[:-1], shape[-1] * size), POISON, dtype=torch.uint8, device=DEVICE)
    return raw.view(dtype)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """[rounds, world, rows, w] -> [rounds, rows, world * w], in bytes."""
    raw = tensor.view(torch.uint8) if tensor.dim() == 4 else tensor
    return raw.transpose(1, 2).flatten(2).contiguous()


def pair_batch(rounds: int, world: int, rows: int) -> Batch:
    """Two tensors of different dtype and width, widths a multiple of 16 bytes per shard."""
    first = random_bytes((rounds, world, rows, 224), torch.bfloat16)
    second = random_bytes((rounds, world, rows, 56), torch.float32)
    outputs = [
        poisoned((rounds, world, rows, 224 * world), torch.bfloat16),
        poisoned((rounds, world, rows, 56 * world), torch.float32),
    ]
    return Batch(
        "all_gather_pair", [first, second], [], outputs, [_gathered(first), _gathered(second)]
    )


def heads_batch(rounds: int, world: int, rows: int) -> Batch:
    """Four heads of 96 per rank, fp8."""
    local = random_bytes((rounds, world, rows, 4, 96), torch.float8_e4m3fn)
    flat = local.view(torch.uint8).flatten(3)
    outputs = [poisoned((rounds, world, rows, 4 * world, 96), torch.float8_e4m3fn)]
    return Batch("all_gather_heads", [local], [], outputs, [_gathered(flat)])


def kimi_batch(rounds: int, world: int, rows: int, spec: RouterSpec = KIMI_K3) -> Batch:
    """The fused op; some rows hold non-finite logits. Expected ids come from the stand-alone op."""
    down = random_bytes((rounds, world, rows, HIDDEN // world), torch.bfloat16)
    router = torch.randn((rounds, world, rows, EXPERTS // world), device=DEVICE)
    router.view(-1)[::9973] = float("nan")
    router.view(-1)[5::7919] = float("inf")
    bias = torch.randn(EXPERTS, device=DEVICE) * 0.1
    logits = router.transpose(1, 2).flatten(2).contiguous()
    weights, ids = kimi_topk16(logits.flatten(0, 1), bias, spec=spec)
    outputs = [
        poisoned((rounds, world, rows, HIDDEN), torch.bfloat16),
        poisoned((rounds, world, rows, TOP_K), torch.float32),
        poisoned((rounds, world, rows, TOP_K), torch.int32),
    ]
    expected = [
        _gathered(down),
        weights.view(rounds, rows, TOP_K),
        ids.view(rounds, rows, TOP_K),
    ]
    return Batch("all_gather_pair_kimi_topk", [down, router], [bias], outputs, expected)


BATCHES = {
    "all_gather_pair": pair_batch,
    "all_gather_heads": heads_batch,
    "all_gather_pair_kimi_topk": kimi_batch,
}


def make_batch(op: str, rounds: int, world: int, rows: int) -> Batch:
    return BATCHES[op](rounds, world, rows)


def ops_for(world: int) -> list[str]:
    """Return the operations that serve a world size."""
    return [op for op in BATCHES if world in KIMI_WORLDS or op != "all_gather_pair_kimi_topk"]


def run_eager(world: LocalWorld, batch: Batch, spec: RouterSpec = KIMI_K3) -> None:
    """Enqueue every round of every rank, then wait for the device and check the groups."""
    torch.cuda.synchronize()
    for index in range(batch.inputs[0].shape[0]):
        for group, stream in zip(world.groups, world.streams, strict=True):
            torch.cuda.set_stream(stream)
            batch.call(group, index, spec)
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
    for group in world.groups:
        group.check()


def run_replays(world: LocalWorld, batches: list[Batch]) -> None:
    """Capture one graph per rank with one op per batch; replay it once per round, back to back.

    Between two replays the stream copies fresh inputs in and the outputs out.
    """
    torch.cuda.synchronize()
    graphs, static = [], []
    for group, stream in zip(world.groups, world.streams, strict=True):
        with torch.cuda.stream(stream):
            inputs = [[t[0, group.rank].clone() for t in b.inputs] for b in batches]
            outputs = [[t[0, group.rank].clone() for t in b.outputs] for b in batches]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for batch, i, o in zip(batches, inputs, outputs, strict=True):
                    batch.enqueue(group, i, tuple(o))
        graphs.append(graph)
        static.append((inputs, outputs))
    for index in range(batches[0].inputs[0].shape[0]):
        for group, stream, graph, (inputs, outputs) in zip(
            world.groups, world.streams, graphs, static, strict=True
        ):
            torch.cuda.set_stream(stream)
            for batch, fresh in zip(batches, inputs, strict=True):
                for target, source in zip(fresh, batch.inputs, strict=True):
                    target.view(torch.uint8).copy_(source[index, group.rank].view(torch.uint8))
            graph.replay()
            for batch, result in zip(batches, outputs, strict=True):
                for source, target in zip(result, batch.outputs, strict=True):
                    target[index, group.rank].view(torch.uint8).copy_(source.view(torch.uint8))
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
    for group in world.groups:
        group.check()


def warm_up() -> None:
    """Load torch's own kernels that the checks use, before any rank spins."""
    batch = pair_batch(1, 1, 1)
    batch.mismatches()
    kimi_batch(1, 1, 1)
    kimi_batch(1, 1, 1, VLLM)
    torch.cuda.synchronize()

"""Drives N ranks on one GPU from one thread, a ring of rounds at a time; checks in bulk.

Nothing is synchronised between the rounds of a ring: launches queue up back to back on the ranks'
streams, each round with its own random bytes and its own poisoned outputs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence

import torch

from pcie_comm import KIMI_K3, PcieDcpGroup, RouterSpec, kimi_topk16
from pcie_comm.local import LocalWorld

DEVICE = "cuda:0"
HIDDEN, EXPERTS, TOP_K = 3584, 896, 16
KIMI_WORLDS = (1, 2, 4, 7, 8, 14, 16)
POISON = 0xA5
FULL_ROUNDS = int(os.environ.get("PCIE_COMM_TEST_ROUNDS", "1000"))
"""Rounds per combination; smaller for a quick look."""

RING = min(FULL_ROUNDS, 50)
"""Rounds in memory at once; they are refreshed and checked ring by ring."""

VLLM = RouterSpec(EXPERTS, TOP_K, numerics="vllm")

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


class Batch:
    """A ring of rounds of one operation; every round has bytes of its own.

    Inputs and outputs are views [rounds, world, ...] into one buffer each, [rounds, world, nbytes],
    so that a round can be copied in one piece.

    Args:
        op: Name of the operation.
        inputs, outputs: Shape per rank and dtype of each tensor.
    """

    def __init__(self, op: str, rounds: int, world: int, inputs: Shapes, outputs: Shapes) -> None:
        self.op = op
        self.shared: list[torch.Tensor] = []
        self.flat_inputs, self.inputs = _ring(rounds, world, inputs)
        self.flat_outputs, self.outputs = _ring(rounds, world, outputs)
        self.expected: list[torch.Tensor] = []
        self.views = [
            [
                (
                    [t[index, rank] for t in self.inputs],
                    tuple([t[index, rank] for t in self.outputs]),
                )
                for rank in range(world)
            ]
            for index in range(rounds)
        ]

    @property
    def rounds(self) -> int:
        return self.flat_inputs.shape[0]

    def refresh(self) -> None:
        """Draw new bytes of every pattern, NaNs included, and poison the outputs."""
        self.flat_inputs.random_(0, 256)
        self.flat_outputs.fill_(POISON)
        self.expected = [_gathered(tensor) for tensor in self.inputs]

    def call(self, group: PcieDcpGroup, index: int) -> None:
        """Enqueue round `index` of this rank on the current stream."""
        inputs, outputs = self.views[index][group.rank]
        self.enqueue(group, inputs, outputs)

    def enqueue(self, group, inputs, out) -> None:
        if self.op == "all_gather_pair":
            group.all_gather_pair(*inputs, out=out)
        elif self.op == "all_gather_heads":
            group.all_gather_heads(*inputs, out=out[0])
        else:
            group.all_gather_pair_kimi_topk(*inputs, *self.shared, out=out, spec=self.spec)

    def mismatches(self, ranks: Iterable[int] | None = None) -> int:
        """Return how many (round, rank) outputs differ from what they must be, in any byte."""
        rounds, world = self.flat_outputs.shape[:2]
        bad = torch.zeros((rounds, world), dtype=torch.bool, device=DEVICE)
        for output, expected in zip(self.outputs, self.expected, strict=True):
            want = expected.contiguous().view(torch.uint8).flatten(1)
            for rank in range(world) if ranks is None else ranks:
                got = output[:, rank].contiguous().view(torch.uint8).flatten(1)
                bad[:, rank] |= (got != want).any(1)
        return int(bad.sum())


class KimiBatch(Batch):
    """The fused op; some logits are not finite. What it must return is what the router returns."""

    def __init__(self, rounds: int, world: int, rows: int, spec: RouterSpec = KIMI_K3) -> None:
        self.spec = spec
        super().__init__(
            "all_gather_pair_kimi_topk",
            rounds,
            world,
            [((rows, HIDDEN // world), torch.bfloat16), ((rows, EXPERTS // world), torch.float32)],
            [
                ((rows, HIDDEN), torch.bfloat16),
                ((rows, TOP_K), torch.float32),
                ((rows, TOP_K), torch.int32),
            ],
        )
        self.shared = [torch.empty(EXPERTS, device=DEVICE)]

    def refresh(self) -> None:
        super().refresh()
        router, bias = self.inputs[1], self.shared[0]
        logits = torch.randn(router.shape, device=DEVICE)
        logits.view(-1)[::9973] = float("nan")
        logits.view(-1)[5::7919] = float("inf")
        router.copy_(logits)
        bias.normal_().mul_(0.1)
        rows = logits.transpose(1, 2).flatten(2).contiguous()
        weights, ids = kimi_topk16(rows.flatten(0, 1), bias, spec=self.spec)
        shape = (*rows.shape[:2], TOP_K)
        self.expected = [_gathered(self.inputs[0]), weights.view(shape), ids.view(shape)]


def _ring(rounds: int, world: int, shapes: Shapes) -> tuple[torch.Tensor, list[torch.Tensor]]:
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 64) * 64)
    flat = torch.empty((rounds, world, starts[-1]), dtype=torch.uint8, device=DEVICE)
    views = []
    for start, size, (shape, dtype) in zip(starts, sizes, shapes, strict=False):
        view = flat[:, :, start : start + size].view(dtype)
        views.append(view.unflatten(2, shape))
    return flat, views


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return random bits of every pattern."""
    raw = torch.randint(
        0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, device=DEVICE
    )
    return raw.view(dtype)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """[rounds, world, rows, ...] -> [rounds, rows, world * bytes of a row]."""
    raw = tensor.contiguous().view(torch.uint8).flatten(3)
    return raw.transpose(1, 2).flatten(2).contiguous()


def pair_batch(rounds: int, world: int, rows: int) -> Batch:
    """Two tensors of different dtype and width."""
    widths = ((224, torch.bfloat16), (56, torch.float32))
    return Batch(
        "all_gather_pair",
        rounds,
        world,
        [((rows, width), dtype) for width, dtype in widths],
        [((rows, width * world), dtype) for width, dtype in widths],
    )


def heads_batch(rounds: int, world: int, rows: int) -> Batch:
    """Four heads of 96 per rank, fp8."""
    dtype = torch.float8_e4m3fn
    local, gathered = (rows, 4, 96), (rows, 4 * world, 96)
    return Batch("all_gather_heads", rounds, world, [(local, dtype)], [(gathered, dtype)])


BATCHES = {
    "all_gather_pair": pair_batch,
    "all_gather_heads": heads_batch,
    "all_gather_pair_kimi_topk": KimiBatch,
}


def make_batch(op: str, rounds: int, world: int, rows: int) -> Batch:
    batch = BATCHES[op](rounds, world, rows)
    batch.refresh()
    return batch


def ops_for(world: int) -> list[str]:
    """Return the operations that serve a world size."""
    return [op for op in BATCHES if world in KIMI_WORLDS or op != "all_gather_pair_kimi_topk"]


def run_eager(world: LocalWorld, batch: Batch) -> None:
    """Enqueue every round of every rank, then wait for the device and check the groups."""
    torch.cuda.synchronize()
    for index in range(batch.rounds):
        for group, stream in zip(world.groups, world.streams, strict=True):
            torch.cuda.set_stream(stream)
            batch.call(group, index)
    settle(world)


def settle(world: LocalWorld) -> None:
    """Go back to the default stream, wait for the device, check the groups."""
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
    for group in world.groups:
        group.check()


class Replayed:
    """One graph per rank with one op per batch; between replays fresh inputs are copied in."""

    def __init__(self, world: LocalWorld, batches: list[Batch]) -> None:
        self.world, self.batches = world, batches
        self.graphs, self.static = [], []
        torch.cuda.synchronize()
        for group, stream in zip(world.groups, world.streams, strict=True):
            own = [type(b).__new__(type(b)) for b in batches]
            for mine, batch in zip(own, batches, strict=True):
                mine.__dict__.update(batch.__dict__)
                mine.flat_inputs, mine.inputs = _like(batch.flat_inputs, batch.inputs)
                mine.flat_outputs, mine.outputs = _like(batch.flat_outputs, batch.outputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for mine in own:
                    inputs = [tensor[0, 0] for tensor in mine.inputs]
                    mine.enqueue(group, inputs, tuple([tensor[0, 0] for tensor in mine.outputs]))
            self.graphs.append(graph)
            self.static.append(own)

    def run(self) -> None:
        """Replay once per round, back to back."""
        torch.cuda.synchronize()
        for index in range(self.batches[0].rounds):
            for rank, graph in enumerate(self.graphs):
                torch.cuda.set_stream(self.world.streams[rank])
                for batch, mine in zip(self.batches, self.static[rank], strict=True):
                    mine.flat_inputs[0, 0].copy_(batch.flat_inputs[index, rank])
                graph.replay()
                for batch, mine in zip(self.batches, self.static[rank], strict=True):
                    batch.flat_outputs[index, rank].copy_(mine.flat_outputs[0, 0])
        settle(self.world)


def _like(flat: torch.Tensor, views: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    shapes = [(tuple(view.shape[2:]), view.dtype) for view in views]
    return _ring(1, 1, shapes)


def warm_up() -> None:
    """Load torch's own kernels that the checks use, before any rank spins."""
    for batch in (pair_batch(1, 1, 1), heads_batch(1, 1, 1), KimiBatch(1, 1, 1, VLLM)):
        batch.refresh()
        batch.flat_outputs[0, 0].copy_(batch.flat_outputs[0, 0].clone())
        batch.mismatches()
    kimi_topk16(torch.zeros(1, EXPERTS, device=DEVICE), torch.zeros(EXPERTS, device=DEVICE))
    torch.cuda.synchronize()

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

RING = min(FULL_ROUNDS, 100)
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
        self.expected: list[torch.Tensor] = []
        self.shapes = (inputs, outputs)
        self.rebase(*(_empty((rounds, world, _nbytes(shapes))) for shapes in self.shapes))

    def rebase(self, flat_inputs: torch.Tensor, flat_outputs: torch.Tensor) -> None:
        """Lie in these buffers, [rounds, world, nbytes], from now on."""
        self.flat_inputs, self.flat_outputs = flat_inputs, flat_outputs
        self.inputs = _views(flat_inputs, self.shapes[0])
        self.outputs = _views(flat_outputs, self.shapes[1])
        self.views = [
            [
                (
                    [t[index, rank] for t in self.inputs],
                    tuple([t[index, rank] for t in self.outputs]),
                )
                for rank in range(flat_inputs.shape[1])
            ]
            for index in range(flat_inputs.shape[0])
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


def _empty(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=DEVICE)


def _places(shapes: Shapes) -> list[int]:
    """Return where each tensor starts in a buffer, and where the buffer ends."""
    starts = [0]
    for shape, dtype in shapes:
        starts.append(starts[-1] + -(-math.prod(shape) * dtype.itemsize // 64) * 64)
    return starts


def _nbytes(shapes: Shapes) -> int:
    return _places(shapes)[-1]


def _views(flat: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    views = []
    for start, (shape, dtype) in zip(_places(shapes), shapes, strict=False):
        size = math.prod(shape) * dtype.itemsize
        views.append(flat[:, :, start : start + size].view(dtype).unflatten(2, shape))
    return views


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


def replay_twice(world: LocalWorld, call, outputs) -> None:
    """Capture every rank's call, then replay all of them, twice."""
    graphs = []
    for group, stream in zip(world.groups, world.streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call(group, outputs[group.rank])
        graphs.append(graph)
    for one in (one for each in outputs for one in each):
        one.view(torch.uint8).fill_(POISON)
    torch.cuda.synchronize()
    for _ in range(2):
        world.run(lambda group: graphs[group.rank].replay())


class Replayed:
    """One graph per rank with one op per batch; one copy in and one out per replay.

    The batches move into buffers of this object, side by side.
    """

    def __init__(self, world: LocalWorld, batches: list[Batch]) -> None:
        self.world, self.batches = world, batches
        self.inputs = self._gather([batch.flat_inputs for batch in batches])
        self.outputs = self._gather([batch.flat_outputs for batch in batches])
        begin_in = begin_out = 0
        for batch in batches:
            end_in = begin_in + batch.flat_inputs.shape[2]
            end_out = begin_out + batch.flat_outputs.shape[2]
            batch.rebase(self.inputs[:, :, begin_in:end_in], self.outputs[:, :, begin_out:end_out])
            begin_in, begin_out = end_in, end_out
        torch.cuda.synchronize()
        self.graphs = [
            self._capture(group, stream)
            for group, stream in zip(world.groups, world.streams, strict=True)
        ]

    @staticmethod
    def _gather(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts, dim=2)

    def _capture(self, group: PcieDcpGroup, stream: torch.cuda.Stream) -> tuple:
        fresh = _empty((1, 1, self.inputs.shape[2]))
        result = _empty((1, 1, self.outputs.shape[2]))
        graph = torch.cuda.CUDAGraph()
        begin_in = begin_out = 0
        calls = []
        for batch in self.batches:
            end_in = begin_in + batch.flat_inputs.shape[2]
            end_out = begin_out + batch.flat_outputs.shape[2]
            inputs = _views(fresh[:, :, begin_in:end_in], batch.shapes[0])
            outputs = _views(result[:, :, begin_out:end_out], batch.shapes[1])
            calls.append((batch, [t[0, 0] for t in inputs], tuple([t[0, 0] for t in outputs])))
            begin_in, begin_out = end_in, end_out
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for batch, inputs, outputs in calls:
                batch.enqueue(group, inputs, outputs)
        return graph, fresh[0, 0], result[0, 0], calls

    def run(self) -> None:
        """Replay once per round, back to back."""
        torch.cuda.synchronize()
        sources = [list(rank.unbind()) for rank in self.inputs.unbind(1)]
        targets = [list(rank.unbind()) for rank in self.outputs.unbind(1)]
        for index in range(self.batches[0].rounds):
            for rank, (graph, fresh, result, _) in enumerate(self.graphs):
                torch.cuda.set_stream(self.world.streams[rank])
                fresh.copy_(sources[rank][index])
                graph.replay()
                targets[rank][index].copy_(result)
        settle(self.world)


def warm_up() -> None:
    """Load torch's own kernels that the checks use, before any rank spins."""
    for batch in (pair_batch(1, 1, 1), heads_batch(1, 1, 1), KimiBatch(1, 1, 1, VLLM)):
        batch.refresh()
        batch.flat_outputs[0, 0].copy_(batch.flat_outputs[0, 0].clone())
        batch.mismatches()
    kimi_topk16(torch.zeros(1, EXPERTS, device=DEVICE), torch.zeros(EXPERTS, device=DEVICE))
    torch.cuda.synchronize()

"""The standalone collectives on one GPU: random data, eager and captured, both memories."""

from __future__ import annotations

import time

import harness
import pytest
import torch
from collective_cases import CASES, Case, wrong

from pcie_comm import Config, local_world
from pcie_comm.bench.floors import Handshake
from pcie_comm.kernels.collective import Collective

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MEMORIES = {"VRAM": "cuda_local", "pinned host": "host_pinned"}
PROTOCOLS = ("push", "pull", "tagged")
WORLDS = (2, 3, 8, 16)
ROUNDS = 3
TIMED_CALLS, TIMED_REPLAYS = 32, 10


def open_world(world_size: int, memory: str, protocol: str):
    config = Config(protocol=protocol, timeout_s=10)
    return local_world(world_size, harness.DEVICE, MEMORIES[memory], config)


class Rounds:
    """Inputs and poisoned outputs of one case, round by round and rank by rank."""

    def __init__(self, case: Case, world: int, rows: int, seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.case = case
        self.inputs = [case.make(world, rows, generator) for _ in range(ROUNDS)]
        wanted = case.expected(self.inputs[0])
        dtypes = [t.dtype for t in self.inputs[0][0]]
        self.outputs = [
            [
                tuple(self._like(one, dtypes, index) for index, one in enumerate(wanted[rank]))
                for rank in range(world)
            ]
            for _ in range(ROUNDS)
        ]

    def _like(self, want: torch.Tensor, dtypes: list[torch.dtype], index: int) -> torch.Tensor:
        """Return an output; a float64 of `expected` stands for the dtype of the first input."""
        gathers = self.case.plugin.name in ("all_gather", "barrier")
        float64 = want.dtype == torch.float64 and not gathers
        out = torch.empty(want.shape, dtype=dtypes[0] if float64 else want.dtype, device="cuda")
        harness_view = out.view(-1).view(torch.uint8) if out.numel() else out
        harness_view.fill_(harness.POISON)
        return out

    def wrong(self) -> list[str]:
        return [
            text[:200]
            for inputs, outputs in zip(self.inputs, self.outputs, strict=True)
            for text in wrong(self.case, inputs, outputs)
        ]

    def run_eager(self, world) -> None:
        torch.cuda.synchronize()
        for inputs, outputs in zip(self.inputs, self.outputs, strict=True):
            for group, stream in zip(world.groups, world.streams, strict=True):
                torch.cuda.set_stream(stream)
                rank = group.rank
                group.run(self.case.plugin, *inputs[rank], out=outputs[rank])
        harness.settle(world)

    def run_captured(self, world) -> None:
        """Replay one graph per rank; inputs are copied in, outputs are copied out."""
        graphs = []
        for group, stream in zip(world.groups, world.streams, strict=True):
            fresh = [tensor.clone() for tensor in self.inputs[0][group.rank]]
            result = tuple(torch.empty_like(one) for one in self.outputs[0][group.rank])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                group.run(self.case.plugin, *fresh, out=result)
            graphs.append((graph, fresh, result))
        torch.cuda.synchronize()
        for inputs, outputs in zip(self.inputs, self.outputs, strict=True):
            for rank, (graph, fresh, result) in enumerate(graphs):
                torch.cuda.set_stream(world.streams[rank])
                for target, source in zip(fresh, inputs[rank], strict=True):
                    target.copy_(source)
                graph.replay()
                for target, source in zip(outputs[rank], result, strict=True):
                    target.copy_(source)
        harness.settle(world)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_case_is_right(protocol, memory, world_size, figures):
    bad, calls = [], 0
    with open_world(world_size, memory, protocol) as world:
        for case in CASES:
            for group in world.groups:
                group.prepare(case.plugin)
            for rows in (1, 7):
                for captured in (False, True):
                    rounds = Rounds(case, world_size, rows, seed=rows + captured)
                    (rounds.run_captured if captured else rounds.run_eager)(world)
                    bad += rounds.wrong()
                    calls += ROUNDS * world_size
    figures(protocol=protocol, memory=memory, world=world_size, calls=calls, wrong=len(bad))
    assert not bad


def time_of(world, plugin: Collective, inputs: list[list[torch.Tensor]]) -> float:
    """Return the microseconds of a call, from graphs of many, on all ranks at once."""
    graphs = []
    for group, stream in zip(world.groups, world.streams, strict=True):
        group.prepare(plugin)
        tensors = inputs[group.rank]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(TIMED_CALLS):
                group.run(plugin, *tensors)
        graphs.append(graph)
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(TIMED_REPLAYS):
            for graph, stream in zip(graphs, world.streams, strict=True):
                torch.cuda.set_stream(stream)
                graph.replay()
        harness.settle(world)
        elapsed = time.perf_counter() - started
        best = min(best, elapsed / TIMED_REPLAYS / TIMED_CALLS)
    return round(best * 1e6, 2)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("memory", MEMORIES)
def test_latencies_beside_the_handshake(memory, world_size, figures):
    """Records, and asserts nothing: one row, the protocol that `auto` chooses."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    with open_world(world_size, memory, "auto") as world:
        token = [[torch.zeros(4, device="cuda")] for _ in range(world_size)]
        times = {"handshake": time_of(world, Handshake(), token)}
        for case in CASES:
            inputs = case.make(world_size, 1, generator)
            times[case.name] = time_of(world, case.plugin, inputs)
    figures(memory=memory, world=world_size, microseconds=times)

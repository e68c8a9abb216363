"""Checks on a GPU, which all ranks share: one stream each, driven by one thread."""

from __future__ import annotations

import unittest
from typing import Any

import torch

from ..config import Config
from ..layout import SlabLayout
from ..local import LocalWorld, local_world
from .guard import paint, trespasses
from .subject import Subject, Tensors, empty_like, same

POISON = 0xA5
REPLAYS = 3


def _need_gpu(subject: Subject) -> None:
    index = torch.device(subject.device).index or 0
    if not torch.cuda.is_available() or torch.cuda.device_count() <= index:
        raise unittest.SkipTest(f"there is no {subject.device}")


class Round:
    """One call of every rank: inputs, poisoned outputs, and what these must become.

    Every tensor stays where it is, so that a graph that was captured with them can be replayed.
    """

    def __init__(self, subject: Subject, world: LocalWorld, rows: int) -> None:
        self.subject, self.world, self.rows = subject, world, rows
        size, device = len(world.groups), subject.device
        shards = subject.make(size, rows)
        self.wanted = [subject.wanted(shards, rank) for rank in range(size)]
        self.inputs = [tuple(one.to(device) for one in tensors) for tensors in shards]
        self.outputs = [empty_like(outputs, device) for outputs in self.wanted]

    def refresh(self, seed: int) -> None:
        """Draw new inputs, poison the outputs, and wait until both are there."""
        shards = self.subject.make(len(self.inputs), self.rows, seed)
        self.wanted = [self.subject.wanted(shards, rank) for rank in range(len(shards))]
        for tensors, fresh in zip(self.inputs, shards, strict=True):
            for target, source in zip(tensors, fresh, strict=True):
                target.copy_(source)
        for one in (one for outputs in self.outputs for one in outputs):
            if one.numel():
                one.reshape(-1).view(torch.uint8).fill_(POISON)
        torch.cuda.synchronize(self.subject.device)

    def enqueue(self, rank: int) -> None:
        """Call on a rank, on the current stream."""
        group, plugin = self.world.groups[rank], self.subject.plugin
        group.run(plugin, *self.inputs[rank], out=self.outputs[rank])

    def eager(self) -> None:
        """Call on every rank, and wait."""
        for rank, stream in enumerate(self.world.streams):
            with torch.cuda.stream(stream):
                self.enqueue(rank)
        self.settle()

    def capture(self) -> list[Any]:
        """Return a graph for each rank, with its call."""
        graphs = []
        for rank, stream in enumerate(self.world.streams):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.enqueue(rank)
            graphs.append(graph)
        return graphs

    def replay(self, graphs: list[Any]) -> None:
        """Replay every rank's graph, and wait."""
        for graph, stream in zip(graphs, self.world.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        self.settle()

    def settle(self) -> None:
        """Wait for the device; raise what a launch gave up for."""
        torch.cuda.synchronize(self.subject.device)
        for group in self.world.groups:
            group.check()

    def judge(self, how: str) -> None:
        """Compare the outputs.

        Raises:
            ConformanceError: One is wrong.
        """
        wanted: list[Tensors] = self.wanted
        for rank, (outputs, right) in enumerate(zip(self.outputs, wanted, strict=True)):
            for index, (got, want) in enumerate(zip(outputs, right, strict=True)):
                if not same(got, want, self.subject.plugin.tolerance):
                    self.subject.fail(
                        f"output {index} of rank {rank} is wrong on a GPU, {how}: {got}, not {want}"
                    )


def runs_on_a_device(subject: Subject) -> None:
    """Every rank gets the reference's result, by every protocol, eager and in replayed graphs."""
    _need_gpu(subject)
    for world_size in subject.served():
        for protocol in ("push", "pull", "tagged"):
            config = Config(protocol=protocol, timeout_s=5.0)
            with local_world(world_size, subject.device, config=config) as world:
                for group in world.groups:
                    group.prepare(subject.plugin)
                for rows in subject.rows:
                    how = f"world_size={world_size}, protocol={protocol}, rows={rows}"
                    one = Round(subject, world, rows)
                    one.refresh(seed=1)
                    one.eager()
                    one.judge(f"eager, {how}")
                    graphs = one.capture()
                    for seed in range(2, 2 + REPLAYS):
                        one.refresh(seed)
                        one.replay(graphs)
                        one.judge(f"replayed, {how}")


def stages_what_it_declares(subject: Subject) -> None:
    """A kernel leaves the guard bytes behind `staged_nbytes` alone. Slabs are in host memory."""
    _need_gpu(subject)
    world_size, _ = subject.communicating()
    rows = max(subject.rows)
    for protocol in ("push", "pull", "tagged"):
        config = Config(protocol=protocol, timeout_s=5.0)
        with local_world(world_size, subject.device, "host_pinned", config) as world:
            for group in world.groups:
                group.prepare(subject.plugin)
            one = Round(subject, world, rows)
            one.refresh(seed=1)
            layout = SlabLayout(config.slot_nbytes, world_size)
            slabs = [_slab(group) for group in world.groups]
            for slab in slabs:
                paint(slab, layout)
            one.eager()
            one.judge(f"protocol={protocol}, slabs in host memory")
            channel = world.groups[0]._channels["default"]
            staged = max(call.plan.staged_nbytes for call in channel._planned.values())
            for rank, slab in enumerate(slabs):
                if found := trespasses(slab, layout, staged):
                    subject.fail(f"the slab of rank {rank} was written to at {found[0]}")


def _slab(group: Any) -> memoryview:
    """Return the bytes of a rank's own slab."""
    view: memoryview = group._transports["default"]._own.view
    return view

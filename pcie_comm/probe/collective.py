"""A real fused collective between two ranks, eager and captured; checked without the library."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..config import Config
from ..demo.calls import FusedCall
from ..group import PcieDcpGroup
from ..local import LocalWorld, open_world
from ..topology.probed import CORRUPT, HOST, OK, Check
from .lab import Lab
from .task import Answer, Task

ROWS, EAGER, REPLAYS = 4, 8, 8
TIMEOUT_S = 10.0
OP = FusedCall.method


def collective(lab: Lab, task: Task) -> Answer:
    """Run the op between the task's ranks; its checks are eager and captured, in this order.

    Raises:
        CommError: A rank cannot address the other, or a call failed.
    """
    first = task.blanks[0]
    assert isinstance(first, Check)
    target = first.source if first.target == HOST else first.target
    devices = [f"cuda:{task.gpus[name]}" for name in (first.source, target)]
    transport = "host_pinned" if first.target == HOST else "cuda_local"
    checks = [blank for blank in task.blanks if isinstance(blank, Check)]
    found = []
    world = open_world(devices, transport, Config(timeout_s=TIMEOUT_S))
    try:
        world.run(lambda group: group.prepare(OP, rows=ROWS))
        for check, work in zip(checks, (_eager, _captured), strict=True):
            started = time.monotonic()
            faults = work(world)
            found.append(
                replace(
                    check,
                    verdict=CORRUPT if faults else OK,
                    detail="; ".join(faults[:2]),
                    rounds=EAGER if work is _eager else REPLAYS,
                    elapsed_s=round(time.monotonic() - started, 3),
                )
            )
    finally:
        world.close()
    return Answer(tuple(found))


def _draw(world: LocalWorld, number: int) -> list[FusedCall]:
    """Return a round's call of every rank; all see the same rows."""
    size = len(world.groups)
    return [FusedCall(group.rank, size, ROWS, group.device, number) for group in world.groups]


def _call(group: PcieDcpGroup, call: FusedCall) -> None:
    down, router, bias = call.inputs
    first, second, third = call.outputs
    group.all_gather_pair_kimi_topk(down, router, bias, out=(first, second, third))


def _eager(world: LocalWorld) -> list[str]:
    """Make calls back to back; return what was wrong."""
    rounds = [_draw(world, number) for number in range(EAGER)]
    _settle(world)

    def on_rank(group: PcieDcpGroup) -> None:
        for calls in rounds:
            _call(group, calls[group.rank])

    world.run(on_rank)
    return [fault for calls in rounds for call in calls for fault in call.faults()]


def _captured(world: LocalWorld) -> list[str]:
    """Capture one call of every rank and replay it with other rows; return what was wrong."""
    static = _draw(world, EAGER)
    _settle(world)
    graphs = [_capture(world, call, rank) for rank, call in enumerate(static)]
    faults = []
    for number in range(EAGER + 1, EAGER + 1 + REPLAYS):
        fresh = _draw(world, number)
        for call, new in zip(static, fresh, strict=True):
            for own, other in zip(
                (*call.inputs, *call.outputs), (*new.inputs, *new.outputs), strict=True
            ):
                own.copy_(other)
        _settle(world)
        _replay(world, graphs)
        for call, new in zip(static, fresh, strict=True):
            new.outputs = call.outputs
            faults += new.faults()
    return faults


def _capture(world: LocalWorld, call: FusedCall, rank: int) -> torch.cuda.CUDAGraph:
    group, graph = world.groups[rank], torch.cuda.CUDAGraph()
    with torch.cuda.device(group.device), torch.cuda.stream(world.streams[rank]):
        graph.capture_begin(capture_error_mode="thread_local")
        _call(group, call)
        graph.capture_end()
    return graph


def _replay(world: LocalWorld, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
    for rank, graph in enumerate(graphs):
        with torch.cuda.device(world.groups[rank].device), torch.cuda.stream(world.streams[rank]):
            graph.replay()
    _settle(world)
    for group in world.groups:
        group.check()


def _settle(world: LocalWorld) -> None:
    for device in {group.device for group in world.groups}:
        torch.cuda.synchronize(device)

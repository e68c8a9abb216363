"""Level 4, measure: bandwidths and latencies of pairs, and of GPUs with the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..kernels.collective import KernelKey
from ..topology.probed import (
    COPY_ENGINE,
    HOST,
    PINNED,
    VRAM,
    Exchange,
    ExchangePoint,
    Ladder,
    LadderPoint,
)
from ..topology.record import ANY
from .gpu import Gpu
from .kernels import PROTOCOLS
from .lab import Lab, Memory
from .pattern import chain
from .region import Region, may_run_on, nodes_of
from .sizes import PACK_NBYTES, RESULT_NBYTES
from .task import Answer, Figure, Task
from .transfer import Transfer, run
from .trial import Game, Played, exchange, ping_pong

CHAIN_NBYTES, CHAIN_STRIDE = 1 << 20, 512
TRIAL_LIMIT_S = 10.0
WARM_UP_ROUNDS = 16
LADDER_NBYTES = (16, 4096, 65_536, 1 << 20, 1 << 24)
EXCHANGE_NBYTES = (4096, 16_384, 65_536, 262_144, 1 << 20)


def bandwidth(lab: Lab, task: Task) -> Answer:
    """Figures of a pair of GPUs; one of two GPUs that are the same is of two regions on it."""
    return Answer(tuple(_measured(lab, task, blank) for blank in task.blanks))


def _measured(lab: Lab, task: Task, blank: Any) -> Figure:
    assert isinstance(blank, Figure)
    gpu, other = lab.gpu(blank.row), lab.gpu(blank.column)
    engine, what = blank.kind.split("-")
    nbytes = int(task.options["nbytes"])
    with lab.memory() as memory:
        if what == "staged":
            near, far = memory.unconnected(gpu, nbytes), memory.unconnected(other, nbytes, gpu)
        else:
            near = memory.of(gpu.name, nbytes, gpu)
            far = memory.of(other.name, nbytes, gpu)
        there = Transfer(gpu, 1, near, far, engine == "ce", lab.seed())
        ways = [there]
        if what == "read":
            ways = [replace(there, source=far, target=near)]
        elif what == "both":
            back = [memory.of(place.name, nbytes, other) for place in (other, gpu)]
            ways.append(Transfer(other, 2, back[0], back[1], engine == "ce", lab.seed()))
        rate = run(lab, ways, float(task.options["budget_s"]))
    value = rate.together if what == "both" else rate.each[0]
    return replace(blank, value=round(value, 3), nbytes=nbytes)


def host_bandwidth(lab: Lab, task: Task) -> Answer:
    """Figures of a GPU with memory of one NUMA node, or of any."""
    first = task.blanks[0]
    assert isinstance(first, Figure)
    gpu, nbytes = lab.gpu(first.row), int(task.options["nbytes"])
    cpus = tuple(task.options.get("cpus", ()))
    node = task.options.get("node")
    if node is not None and not may_run_on(cpus):
        raise UnsupportedError(
            f"no processor of NUMA node {node} may be used by this process; see taskset",
            reason=f"no processor of NUMA node {node} may be used",
        )
    with lab.memory() as memory:
        regions = [memory.near(gpu, nbytes, cpus) for _ in range(2)]
        for region in regions:
            _check_node(region, node)
        own = [memory.of(gpu.name, nbytes, gpu) for _ in range(2)]
        return Answer(
            tuple(_host_figure(lab, task, gpu, (regions, own), blank) for blank in task.blanks)
        )


def _check_node(region: Region, node: int | None) -> None:
    """Raise UnsupportedError if memory does not lie on the node that it was meant for."""
    if node is None:
        return
    found = nodes_of(region)
    if isinstance(found, str):
        raise UnsupportedError(
            f"it is not known on which NUMA node the memory lies: {found}", reason=found
        )
    if set(found) != {node}:
        reason = f"the memory lies on NUMA nodes {sorted(found)}, not {node}"
        raise UnsupportedError(f"{reason}; too little is free there", reason=reason)


def _host_figure(
    lab: Lab, task: Task, gpu: Gpu, memory: tuple[Sequence[Region], Sequence[Region]], blank: Any
) -> Figure:
    assert isinstance(blank, Figure)
    _, engine, what = blank.kind.split("-")
    host, own = memory
    by_copy_engine = engine == "ce"
    out = Transfer(gpu, 1, own[0], host[0], by_copy_engine, lab.seed())
    back = Transfer(gpu, 2, host[1], own[1], by_copy_engine, lab.seed())
    ways = {"write": [out], "read": [back], "both": [out, back]}[what]
    rate = run(lab, ways, float(task.options["budget_s"]))
    value = rate.together if what == "both" else rate.each[0]
    return replace(blank, value=round(value, 3), nbytes=host[0].nbytes)


def chase(lab: Lab, task: Task) -> Answer:
    """Microseconds of a load that depends on the one before."""
    (blank,) = task.blanks
    assert isinstance(blank, Figure)
    gpu = lab.gpu(blank.row)
    place = HOST if blank.kind.startswith("host") else blank.column
    data, hops = chain(CHAIN_NBYTES, CHAIN_STRIDE, lab.seed())
    with lab.memory() as memory:
        region = memory.of(place, CHAIN_NBYTES, gpu)
        result = memory.of(gpu.name, RESULT_NBYTES, gpu)
        if region.owner is None:
            assert region.view is not None
            region.view[:] = data
        else:
            region.owner.write(region.seen_by(region.owner), data)
        addresses = [region.seen_by(gpu), result.seen_by(gpu)]
        for _ in range(2):
            gpu.launch(KernelKey("probe_chase"), addresses, [hops], grid=1)
        elapsed_ns, end = gpu.read(result.seen_by(gpu), RESULT_NBYTES).view(np.uint64)
    if int(end) != 0:
        reason = f"the chain ended at offset {int(end)}, not at its beginning"
        return Answer((replace(blank, unknown={ANY: reason}),))
    return Answer((replace(blank, value=round(int(elapsed_ns) / hops / 1e3, 4)),))


def flag(lab: Lab, task: Task) -> Answer:
    """Microseconds that a flag takes from one resident kernel to the other."""
    blanks = [blank for blank in task.blanks if isinstance(blank, Figure)]
    row, column, memory = blanks[0].row, blanks[0].column, VRAM
    if blanks[0].kind.startswith("host"):
        column, memory = row, PINNED
    game = Game((row, column), memory, int(task.options["rounds"]), TRIAL_LIMIT_S)
    ping_pong(lab, replace(game, rounds=WARM_UP_ROUNDS))
    played = ping_pong(lab, game)
    value = _us(played, game.rounds)
    if value is None:
        reason = f"it gave up after {played[0].done} of {game.rounds} rounds"
        return Answer(tuple(replace(blank, unknown={ANY: reason}) for blank in blanks))
    return Answer(tuple(replace(blank, value=round(value / 2, 4)) for blank in blanks))


def _us(played: tuple[Played, Played], rounds: int) -> float | None:
    """Return microseconds a round, by the rank that did not wait for the other's start."""
    if any(one.done < rounds or one.wrong for one in played):
        return None
    return min(one.elapsed_ns for one in played) / rounds / 1e3


def exchanges(lab: Lab, task: Task) -> Answer:
    """Times of the three protocols by size, in device memory or in pinned host memory."""
    (blank,) = task.blanks
    assert isinstance(blank, Exchange)
    rounds = int(task.options["rounds"])
    game = Game((blank.source, blank.target), blank.memory, rounds, TRIAL_LIMIT_S)
    points = tuple(_point(lab, game, nbytes) for nbytes in EXCHANGE_NBYTES)
    return Answer((replace(blank, points=points),))


def _point(lab: Lab, game: Game, nbytes: int) -> ExchangePoint:
    times: dict[str, float | None] = {}
    for protocol in PROTOCOLS:
        exchange(lab, replace(game, rounds=WARM_UP_ROUNDS), protocol, nbytes)
        value = _us(exchange(lab, game, protocol, nbytes), game.rounds)
        times[f"{protocol}_us"] = None if value is None else round(value, 4)
    reason = {ANY: "it gave up waiting, or received wrong bytes"}
    return ExchangePoint(2 * nbytes, unknown=reason, **times)


def ladder(lab: Lab, task: Task) -> Answer:
    """Time of a transfer by its size, its launch included."""
    (blank,) = task.blanks
    assert isinstance(blank, Ladder)
    gpu = lab.gpu(blank.source)
    points = []
    for nbytes in LADDER_NBYTES:
        with lab.memory() as memory:
            ends = _ends(memory, gpu, blank, max(nbytes, PACK_NBYTES))
            one = Transfer(gpu, 1, *ends, blank.engine == COPY_ENGINE, lab.seed())
            rate = run(lab, [one], float(task.options["budget_s"]))
            points.append(LadderPoint(nbytes, round(rate.each_us[0], 3)))
    return Answer((replace(blank, points=tuple(points)),))


def _ends(memory: Memory, gpu: Gpu, blank: Ladder, nbytes: int) -> tuple[Region, Region]:
    near, far = memory.of(gpu.name, nbytes, gpu), memory.of(blank.target, nbytes, gpu)
    return (near, far) if blank.access == "write" else (far, near)

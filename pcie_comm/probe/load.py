"""Level 4, measure: the GPUs' links while copies in both directions keep them busy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from .. import driver
from ..errors import CudaError
from ..topology.probed import HOST, LinkLoad
from ..topology.record import ANY
from ..topology.under_load import links_now
from .gpu import Gpu
from .lab import Lab, Memory, fill_by_owner
from .task import Answer, Task
from .transfer import Transfer

NBYTES = 1 << 25
SETTLE_S = 0.15
"""How long a link carries traffic before it is looked at: idle ones take a moment to speed up."""

SHORT, LONG = 8, 512
"""Copies enqueued at a time: until the links have settled, and while they are looked at."""


def links(lab: Lab, task: Task) -> Answer:
    """Fill in links as they are while all GPUs copy from and to pinned host memory at once."""
    loads = [blank for blank in task.blanks if isinstance(blank, LinkLoad)]
    ends = task.options["gpus"]
    links_now(ends)  # what is slow the first time
    with lab.memory() as memory:
        ways = [way for load in loads for way in _both_ways(lab, memory, lab.gpu(load.gpu))]
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            _enqueue(ways, SHORT)
            _wait(ways)
        _enqueue(ways, LONG)
        found = links_now(ends)
        busy = all(_is_busy(way) for way in ways)
        _wait(ways)
    if not busy:
        reason = {ANY: "the copies ended before the links had been read"}
        return Answer(tuple(replace(load, unknown=reason) for load in loads))
    return Answer(tuple(found[load.gpu] for load in loads))


def _both_ways(lab: Lab, memory: Memory, gpu: Gpu) -> list[Transfer]:
    regions = [memory.of(place, NBYTES, gpu) for place in (gpu.name, HOST, HOST, gpu.name)]
    seed = lab.seed()
    for region in regions[::2]:
        fill_by_owner(region, seed)
    out = Transfer(gpu, 1, regions[0], regions[1], True, seed)
    return [out, Transfer(gpu, 2, regions[2], regions[3], True, seed)]


def _enqueue(ways: Sequence[Transfer], count: int) -> None:
    for _ in range(count):
        for way in ways:
            way.enqueue()


def _wait(ways: Sequence[Transfer]) -> None:
    for way in ways:
        way.gpu.synchronize(way.stream)


def _is_busy(way: Transfer) -> bool:
    """Tell whether a stream still has work."""
    with way.gpu.current():
        try:
            driver.call("cuStreamQuery", way.stream)
        except CudaError as error:
            if error.name == "CUDA_ERROR_NOT_READY":
                return True
            raise
    return False

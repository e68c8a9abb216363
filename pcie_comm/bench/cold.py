"""Cold samples: caches are evicted before every operation, as a model's layers do between two.

Eviction runs on the root stream, on every multiprocessor: an addition to a buffer of twice the
second-level cache, then a kernel whose instructions exceed the instruction caches. Then the ranks
fork, run one operation each and join. The time of a graph of such rounds, minus that of a graph of
evictions alone, over the number of rounds, is one cold operation, its fork and join included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import CompileError
from ..group import PcieDcpGroup
from .floors import Evict
from .measure import GraphStage, Lanes, Take

ROUNDS = 8
"""Evictions, each with an operation behind it, in one graph."""

ASSUMED_CACHE_NBYTES = 64 << 20
"""Of a device that does not tell the size of its second-level cache."""


class Eviction:
    """Evicts second-level and instruction caches of one device.

    Args:
        group: Of a rank on the device, without overlapping launches.

    Raises:
        CompileError: The kernel is not there and cannot be compiled.
    """

    def __init__(self, group: PcieDcpGroup) -> None:
        self._group, self._plugin = group, Evict()
        group.prepare(self._plugin)
        properties = torch.cuda.get_device_properties(group.device)
        nbytes = 2 * (getattr(properties, "L2_cache_size", 0) or ASSUMED_CACHE_NBYTES)
        self._buffer = torch.ones(nbytes // 4, dtype=torch.int32, device=group.device)
        blocks = 2 * properties.multi_processor_count
        self._values = torch.rand(blocks, 4, device=group.device)
        self._out = torch.empty_like(self._values)
        self.enqueue()  # loads what it uses: nothing may be loaded while ranks wait for each other
        torch.cuda.synchronize(group.device)

    def enqueue(self) -> None:
        """Evict, on the current stream."""
        self._buffer.add_(1)
        self._group.run(self._plugin, self._values, out=self._out)


def open_eviction(groups: Sequence[PcieDcpGroup]) -> tuple[Eviction | None, str]:
    """Return an eviction for these ranks, or None and why there is none."""
    if len({group.device for group in groups}) > 1:
        return None, "cold samples need all ranks on one GPU"
    try:
        return Eviction(groups[0]), ""
    except CompileError as error:
        return None, str(error)


class ColdStage(GraphStage):
    """Ranks on one GPU: a take replays ROUNDS evictions, each followed by one operation."""

    def __init__(self, lanes: Lanes, eviction: Eviction) -> None:
        super().__init__(lanes, ROUNDS)
        self._eviction = eviction

    def take_of(self, enqueue: Callable[[int], object]) -> Take:
        """Return a take of eviction and operation together."""

        def rounds() -> None:
            for _ in range(ROUNDS):
                self._eviction.enqueue()
                self.lanes.fork_join(enqueue)

        return self._take(rounds)

    def take_of_eviction(self) -> Take:
        """Return a take of the eviction alone."""

        def rounds() -> None:
            for _ in range(ROUNDS):
                self._eviction.enqueue()

        return self._take(rounds)

    def _take(self, rounds: Callable[[], None]) -> Take:
        graph = self.lanes.capture(rounds)
        return lambda: self.lanes.time_ns(graph) / ROUNDS

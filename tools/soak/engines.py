"""Host engines for a soak: one that dawdles, and two that also break the protocol on purpose.

Nothing of the product knows of them: `installed` puts one in place of HostEngine where groups make
their engines.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from pcie_comm import group as group_module
from pcie_comm.host_engine import HostEngine
from pcie_comm.kernels.collective import Plan
from pcie_comm.layout import SlabLayout, flag_value, slot_of
from pcie_comm.transport.base import PeerMap

SHORT_S, LONG_S = 100e-6, 2e-3
ONE_IN_SHORT, ONE_IN_LONG = 12, 400

_seed = 0


class DawdlingEngine(HostEngine):
    """Sleeps now and then where a slow rank would hurt most, each rank on its own dice.

    That is between payload and flag, in the middle of the payload, between the wait and the first
    read, and between the reads.
    """

    def __init__(
        self, rank: int, layout: SlabLayout, peers: PeerMap, protocol: str, timeout_s: float
    ) -> None:
        super().__init__(rank, layout, peers, protocol, timeout_s)
        self._dice = random.Random(f"{_seed}/rank {rank}")

    def _dawdle(self) -> None:
        if self._dice.randrange(ONE_IN_SHORT) == 0:
            time.sleep(self._dice.random() * SHORT_S)
        elif self._dice.randrange(ONE_IN_LONG) == 0:
            time.sleep(self._dice.random() * LONG_S)

    def _write(self, target: int, offset: int, payload: Sequence[torch.Tensor]) -> None:
        super()._write(target, offset, payload)
        self._dawdle()  # behind the last target, that is between payload and flag

    def _read(self, source: int, offset: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._dawdle()  # before the first source, that is between wait and read
        return super()._read(source, offset, like)


class OneSlot(SlabLayout):
    """Payload in slot 0 whatever the epoch is; flags still take turns, or all would wait."""

    def slot_offset(self, slot: int) -> int:
        """Offset of slot 0."""
        return super().slot_offset(0)


class OneSlotEngine(DawdlingEngine):
    """Control: double buffering off."""

    def __init__(
        self, rank: int, layout: SlabLayout, peers: PeerMap, protocol: str, timeout_s: float
    ) -> None:
        one_slot = OneSlot(layout.slot_nbytes, layout.world_size)
        super().__init__(rank, one_slot, peers, protocol, timeout_s)


class EarlyFlagEngine(DawdlingEngine):
    """Control: flags before payload."""

    def _exchange(self, plan: Plan, inputs: Sequence[torch.Tensor]) -> list[Any]:
        self._signature, self._raised = plan.signature, False
        return super()._exchange(plan, inputs)

    def _write(self, target: int, offset: int, payload: Sequence[torch.Tensor]) -> None:
        if not self._raised:
            self._raised = True
            for peer in range(len(self._bytes)):
                flag = self._flag(peer, slot_of(self.epoch), self.rank)
                flag[0] = flag_value(self.epoch, self._signature)
            self._dawdle()
        super()._write(target, offset, payload)


ENGINES: dict[str, type[HostEngine]] = {
    "": DawdlingEngine,
    "one_slot": OneSlotEngine,
    "early_flag": EarlyFlagEngine,
}
"""By control; the empty one is no control."""


@contextmanager
def installed(control: str, seed: int) -> Iterator[None]:
    """Have groups that are built meanwhile use an engine of this file."""
    global _seed
    _seed = seed
    with mock.patch.object(group_module, "HostEngine", ENGINES[control]):
        yield

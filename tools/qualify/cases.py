"""What is called and what must come out of it: rounds of one operation, of one rank.

Decode operations take their bytes from tests/gpu/harness.py, which the soak uses too: drawn on the
device, alike on every rank. The other registered collectives take them from `example_inputs` and
`reference`, through pcie_comm.testing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

import harness
import torch

from pcie_comm import PcieDcpGroup, UnsupportedError
from pcie_comm.kernels.registry import find, load_builtins, registered
from pcie_comm.testing import Subject
from pcie_comm.testing.subject import Tensors, empty_like, same

RING = 16
"""Rounds in memory at once; nothing is synchronised between them."""

DRAWS = 4
"""Different inputs of a collective with example inputs; neighbouring rounds take different ones."""


class Rounds(Protocol):
    """Rounds of one operation as one rank sees them, each with bytes and outputs of its own."""

    def refresh(self, lap: int) -> None:
        """Draw new inputs and poison the outputs. Nobody may be in a call."""

    def tensors(self, index: int) -> tuple[list[torch.Tensor], Tensors]:
        """Return inputs and outputs of a round."""

    def call(self, group: PcieDcpGroup, inputs: list[torch.Tensor], outputs: Tensors) -> None:
        """Make the call."""

    def mismatches(self) -> int:
        """Return how many rounds have a wrong output. Waits for the device."""

    def digest(self) -> int:
        """Return a number that ranks must have in common if they drew alike."""


@contextlib.contextmanager
def placed(device: torch.device) -> Iterator[None]:
    """Let the harness work on a device. One thread at a time."""
    harness.DEVICE = str(device)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


class DecodeRounds:
    """A decode operation. The rank draws what all ranks bring, and uses its own part."""

    def __init__(self, op: str, rows: int, count: int, group: PcieDcpGroup) -> None:
        self._device, self._rank, self._seed = group.device, group.rank, 1000 * rows + len(op)
        with placed(self._device):
            self._batch: Any = harness.BATCHES[op](count, group.world_size, rows)

    def refresh(self, lap: int) -> None:
        """See Rounds."""
        with placed(self._device):
            torch.manual_seed(self._seed + 7919 * lap)
            self._batch.refresh()

    def tensors(self, index: int) -> tuple[list[torch.Tensor], Tensors]:
        """See Rounds."""
        inputs, outputs = self._batch.views[index][self._rank]
        return inputs, outputs

    def call(self, group: PcieDcpGroup, inputs: list[torch.Tensor], outputs: Tensors) -> None:
        """See Rounds."""
        self._batch.enqueue(group, inputs, outputs)

    def mismatches(self) -> int:
        """See Rounds."""
        with placed(self._device):
            return int(self._batch.mismatches([self._rank]))

    def digest(self) -> int:
        """See Rounds."""
        return int(self._batch.flat_inputs.sum(dtype=torch.int64))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare dense tensors where they are."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@lru_cache(maxsize=256)
def _drawn(op: str, rows: int, world_size: int, seed: int) -> list[Tensors]:
    return Subject(find(op)).make(world_size, rows, seed)


class PluginRounds:
    """A collective with example inputs, drawn on the CPU."""

    def __init__(self, op: str, rows: int, count: int, group: PcieDcpGroup) -> None:
        subject, rank = Subject(find(op)), group.rank
        self.plugin = subject.plugin
        shards = [_drawn(op, rows, group.world_size, seed) for seed in range(DRAWS)]
        self._wanted = [subject.wanted(one, rank) for one in shards]
        self._inputs = [[local.to(group.device) for local in one[rank]] for one in shards]
        device = str(group.device)
        self._outputs = [empty_like(self._wanted[0], device) for _ in range(count)]
        self._proven: dict[int, Tensors] = {}
        self._shift = 0

    def refresh(self, lap: int) -> None:
        """See Rounds. A round takes the draw after the one it had."""
        self._shift = lap
        for one in (one for outputs in self._outputs for one in outputs):
            one.reshape(-1).view(torch.uint8).fill_(harness.POISON)

    def _draw(self, index: int) -> int:
        return (index + self._shift) % DRAWS

    def tensors(self, index: int) -> tuple[list[torch.Tensor], Tensors]:
        """See Rounds."""
        return self._inputs[self._draw(index)], self._outputs[index]

    def call(self, group: PcieDcpGroup, inputs: list[torch.Tensor], outputs: Tensors) -> None:
        """See Rounds."""
        group.run(self.plugin, *inputs, out=outputs)

    def mismatches(self) -> int:
        """See Rounds. What was found right once need only have the same bytes again."""
        return sum(
            not self._right(self._draw(index), outputs)
            for index, outputs in enumerate(self._outputs)
        )

    def _right(self, draw: int, outputs: Tensors) -> bool:
        proven = self._proven.get(draw)
        if proven is not None and all(map(_same_bytes, outputs, proven)):
            return True
        right = all(
            same(got, want, self.plugin.tolerance)
            for got, want in zip(outputs, self._wanted[draw], strict=True)
        )
        if right:
            self._proven[draw] = tuple(one.clone() for one in outputs)
        return right

    def digest(self) -> int:
        """See Rounds. Nothing: the CPU draws."""
        return 0


def operations(world_size: int, rows: tuple[int, ...]) -> list[tuple[str, int]]:
    """Return operations and rows that a world size is qualified with, decode operations first.

    Other packages' collectives are left out; so are rows beyond the first of a collective whose
    calls have none.
    """
    load_builtins()
    found = [(op, count) for op in harness.ops_for(world_size) for count in rows]
    for plugin in registered():
        if plugin.name in harness.BATCHES or not plugin.communicates:
            continue
        shapes = set()
        for count in rows:
            try:
                inputs = _drawn(plugin.name, count, world_size, 0)
            except UnsupportedError:
                continue  # it has no example inputs, or does not serve this world size
            shape = tuple(one.shape for one in inputs[0])
            if shape not in shapes:
                shapes.add(shape)
                found.append((plugin.name, count))
    return found


def rounds_of(op: str, rows: int, count: int, group: PcieDcpGroup) -> Rounds:
    """Return rounds of an operation for a group's rank."""
    made = DecodeRounds if op in harness.BATCHES else PluginRounds
    return made(op, rows, count, group)


def warm_up(device: torch.device) -> None:
    """Load torch's own kernels that the checks use, before any rank waits for another."""
    if device.type == "cuda":
        with placed(device):
            harness.warm_up()
            harness.pair_batch(1, 1, 1).flat_inputs.sum(dtype=torch.int64)

"""The groups that a benchmark case runs in: one world per protocol, and one more with overlap."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from ..config import Config
from ..errors import UnsupportedError
from ..layout import LINE_NBYTES, align_up
from ..local import LocalWorld, local_world
from .options import TRANSPORTS, Options
from .workload import slot_needed

TIMEOUT_S = 5.0
"""A wait on a GPU ends after this: whatever takes longer is no measurement."""

ROW_NBYTES = 10_752
"""Bytes that all ranks together stage per row of the largest operation of up to 16 ranks."""

HEADS_ROW_NBYTES = 384


def slot_nbytes(rows: int, world_size: int) -> int:
    """Return a slot that holds tagged push of `rows` rows.

    No larger: every rank pins every slab, and slabs that captured graphs address stay until the
    process ends.
    """
    staged = rows * max(ROW_NBYTES // world_size + LINE_NBYTES, HEADS_ROW_NBYTES) + LINE_NBYTES
    return max(4096, align_up(2 * staged, LINE_NBYTES) * world_size)


class Worlds:
    """The worlds of one world size and memory.

    Attributes:
        memory: Where their slabs lie.
        plain: By protocol.
        overlapping: By protocol, with overlapping launches; empty where launches cannot overlap.
        devices: Of the ranks.
    """

    def __init__(self, memory: str, plain: dict[str, LocalWorld]) -> None:
        self.memory = memory
        self.plain = plain
        self.overlapping: dict[str, LocalWorld] = {}

    @property
    def any(self) -> LocalWorld:
        """A world without overlap: the one for floors and for eviction."""
        return next(iter(self.plain.values()))

    @property
    def sharers(self) -> int:
        """Most ranks on one device."""
        return max(Counter(self.devices).values())

    def check(self) -> None:
        """Raise what broke a group, if anything did.

        Raises:
            CommError: A call gave up.
        """
        for world in (*self.plain.values(), *self.overlapping.values()):
            for group in world.groups:
                group.check()

    @property
    def devices(self) -> list[torch.device]:
        return [group.device for group in self.any.groups]


@contextlib.contextmanager
def opened(world_size: int, memory: str, device: str, options: Options) -> Iterator[Worlds]:
    """Build the worlds of a world size and a memory; close them on leaving.

    Raises:
        CommError: A world cannot be built.
    """
    rows = max(options.rows)
    on_gpu = device != "cpu"
    nbytes = slot_nbytes(rows, world_size)
    for op in options.operations:
        with contextlib.suppress(UnsupportedError):  # its cases are left out, and say why
            nbytes = max(nbytes, slot_needed(op, rows, world_size))

    def enter(protocol: str, overlap: bool) -> LocalWorld:
        config = Config(
            timeout_s=TIMEOUT_S if on_gpu else Config().timeout_s,
            protocol=protocol,
            overlap=overlap,
            slot_nbytes=nbytes,
            max_rows=rows,
        )
        return stack.enter_context(local_world(world_size, device, TRANSPORTS[memory], config))

    with contextlib.ExitStack() as stack:
        worlds = Worlds(memory, {name: enter(name, False) for name in options.protocols})
        if on_gpu and _can_overlap(worlds.devices):
            worlds.overlapping = {name: enter(name, True) for name in options.protocols}
        yield worlds


def _can_overlap(devices: Sequence[torch.device]) -> bool:
    return all(torch.cuda.get_device_capability(device) >= (9, 0) for device in devices)

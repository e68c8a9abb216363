"""A call that is cut, on a GPU: its launches one after another, as if they were one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from .cuda_engine import BoundLaunch
from .kernels.collective import Plan
from .kernels.pieces import Piece


class PieceLaunches:
    """What BoundLaunch is to a call of one launch. Pieces of one plan share their arguments.

    Args:
        pieces: In order.
        bind: Packs the arguments of a plan's launch, which point nowhere yet.
        addresses: Of inputs, then outputs, of the whole call.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        bind: Callable[[Plan], BoundLaunch],
        addresses: Sequence[int],
    ) -> None:
        bound: dict[int, BoundLaunch] = {}
        for piece in pieces:
            if id(piece.plan) not in bound:
                bound[id(piece.plan)] = bind(piece.plan)
        self._launches = [(bound[id(piece.plan)], piece) for piece in pieces]
        self._addresses = tuple(addresses)
        self._enqueuing = threading.Lock()

    @property
    def arguments(self) -> PieceLaunches:
        """What `point_to` belongs to; as BoundLaunch has it."""
        return self

    def point_to(self, addresses: Sequence[int]) -> None:
        """Replace the addresses of inputs and outputs."""
        self._addresses = tuple(addresses)

    def enqueue(self) -> None:
        """Enqueue every launch on torch's current stream. Threads take turns."""
        with self._enqueuing:
            addresses = self._addresses
            for launch, piece in self._launches:
                launch.arguments.point_to(piece.addresses(addresses))
                launch.enqueue()

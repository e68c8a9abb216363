"""The probes' kernels in NumPy, for fake_gpu.py: what device.py does, a few rounds of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from pcie_comm.probe.pattern import pattern
from pcie_comm.probe.sizes import FLAG_NBYTES, MOST_BLOCKS, PAYLOAD_OFFSET, RESULTS_OFFSET, THREADS

HOST = "host"
SIMULATED_ROUNDS = 4


class Kernels(ABC):
    """The kernels, on memory that a subclass has.

    Attributes:
        faults: By actor and owner.
        waiting: Players that wait for the other one.
    """

    faults: dict[tuple[Any, Any], str]
    waiting: list[tuple[Any, ...]]

    @abstractmethod
    def load(self, actor: int, address: int, nbytes: int, checked: bool = True) -> np.ndarray:
        """Return what an actor reads."""

    @abstractmethod
    def store(self, actor: int, address: int, data: np.ndarray, checked: bool = True) -> None:
        """Let an actor write."""

    def probe_fill(self, gpu: int, addresses: list[int], scalars: list[int], grid: int) -> None:
        packs, seed = scalars
        self.store(gpu, addresses[0], pattern(seed, 4 * packs))

    def probe_check(self, gpu: int, addresses: list[int], scalars: list[int], grid: int) -> None:
        packs, seed, stale = scalars
        found = self.load(gpu, addresses[0], 16 * packs).view(np.uint32)
        differs = found != pattern(seed, 4 * packs)
        counts = np.zeros((grid * THREADS, 2), dtype=np.uint32)
        counts[0] = differs.sum(), (differs & (found == pattern(stale, 4 * packs))).sum()
        self.store(gpu, addresses[1], counts)

    def probe_copy(self, gpu: int, addresses: list[int], scalars: list[int], grid: int) -> None:
        self.store(gpu, addresses[1], self.load(gpu, addresses[0], 16 * scalars[0]))

    def probe_chase(self, gpu: int, addresses: list[int], scalars: list[int], grid: int) -> None:
        at = 0
        for _ in range(scalars[0]):
            at = int(self.load(gpu, addresses[0] + at, 8).view(np.uint64)[0])
        self.store(gpu, addresses[1], np.array([1000 * scalars[0], at], dtype=np.uint64))

    def _play(self) -> None:
        players = sorted(self.waiting)
        self.waiting.clear()
        assert [player[0] for player in players] == [0, 1]
        assert players[0][1] != players[1][1], "two players on one stream"
        name, scalars, blocks = players[0][2], players[0][4], players[0][5]
        sides = [(player[6], player[3]) for player in players]
        hung = any(self.faults.get(pair) == "hang" for pair in _pairs(sides[0][0], sides[1][0]))
        rounds = scalars[0]
        done = 0
        wrong = [0, 0]
        for number in range(1, 1 + min(rounds, SIMULATED_ROUNDS)):
            if hung or not self._round(name, number, sides, scalars, (blocks, wrong)):
                break
            done = rounds if number == min(rounds, SIMULATED_ROUNDS) else number
        for (gpu, addresses), count in zip(sides, wrong, strict=True):
            heads = np.array([[2000 * rounds, done]] * blocks, dtype=np.uint64)
            self.store(gpu, addresses[2], heads)
            self.store(gpu, addresses[2] + RESULTS_OFFSET, np.array([count], dtype=np.uint32))

    def _round(
        self,
        name: str,
        number: int,
        sides: list[tuple[int, list[int]]],
        scalars: list[int],
        state: tuple[int, list[int]],
    ) -> bool:
        """Play a round; return whether both saw the other's flags, or tags."""
        if name == "probe_ping_pong":
            for gpu, (_, peer, _) in sides:
                self.store(gpu, peer, np.array([number], dtype=np.uint64))
            return all(self._word(gpu, own) == number for gpu, (own, _, _) in sides)
        blocks, wrong = state
        protocol = name.split("-")[1]
        packs, seed = scalars[1], scalars[2]
        size = blocks * packs * THREADS
        place = PAYLOAD_OFFSET + 16 * size * (number & 1)
        stamps = [seed + (2 * number + rank) * 0x632BE5AB for rank in range(2)]
        payload = [_payload(protocol, stamp, size, number) for stamp in stamps]
        for (gpu, (own, peer, _)), data in zip(sides, payload, strict=True):
            self.store(gpu, (own if protocol == "pull" else peer) + place, data)
        if protocol == "tagged":
            return self._collect_units(sides, payload, place, wrong)
        flags = [(MOST_BLOCKS * (number & 1) + block) * FLAG_NBYTES for block in range(blocks)]
        for gpu, (_, peer, _) in sides:
            for flag in flags:
                self.store(gpu, peer + flag, np.array([number], dtype=np.uint64))
        if not all(self._word(gpu, own + f) == number for gpu, (own, _, _) in sides for f in flags):
            return False
        for rank, (gpu, (own, peer, _)) in enumerate(sides):
            source = peer if protocol == "pull" else own
            found = self.load(gpu, source + place, 16 * size).view(np.uint32)
            wrong[rank] += int((found != payload[1 - rank]).sum())
        return True

    def _collect_units(
        self,
        sides: list[tuple[int, list[int]]],
        payload: list[np.ndarray],
        place: int,
        wrong: list[int],
    ) -> bool:
        complete = True
        for rank, (gpu, (own, _, _)) in enumerate(sides):
            found = self.load(gpu, own + place, payload[0].nbytes).view(np.uint32)
            good = payload[1 - rank]
            complete &= bool((found[1::2] == good[1::2]).all())
            wrong[rank] += int((found[::2] != good[::2]).sum()) if complete else 0
        return complete

    def _word(self, gpu: int, address: int) -> int:
        return int(self.load(gpu, address, 8).view(np.uint64)[0])


def _payload(protocol: str, stamp: int, size: int, number: int) -> np.ndarray:
    words = pattern(stamp, 4 * size)
    if protocol != "tagged":
        return words
    units = words.reshape(-1, 4).copy()
    units[:, 2], units[:, 1], units[:, 3] = words.reshape(-1, 4)[:, 1], number, number
    return units.reshape(-1)


def _pairs(one: int, other: int) -> Sequence[tuple[Any, Any]]:
    return [(one, other), (other, one), (one, HOST), (other, HOST)]

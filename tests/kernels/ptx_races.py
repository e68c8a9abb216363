"""Finds accesses to shared memory that nothing orders, while a kernel runs in ptx_machine.

Every thread has a vector clock. Barriers of a block or of a warp order what comes before with what
comes behind, for the threads that meet; shuffles and votes order nothing. Two accesses of one word,
one of them a store, by different threads must be ordered, whatever the threads did in this run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Races:
    """The clocks of a block's threads, and who last touched each word."""

    def __init__(self, threads: int) -> None:
        self.clocks = np.zeros((threads, threads), np.int64)
        self.clocks[np.diag_indices(threads)] = 1
        self.stores: dict[int, tuple[int, int]] = {}
        self.loads: dict[int, dict[int, int]] = {}
        self.found: set[str] = set()

    def meet(self, threads: Sequence[int]) -> None:
        """Note that threads met at a barrier."""
        index = list(threads)
        self.clocks[index] = self.clocks[index].max(axis=0)
        self.clocks[index, index] += 1

    def _ordered(self, other: int, clock: int, thread: int) -> bool:
        return other == thread or clock <= self.clocks[thread, other]

    def touch(self, thread: int, address: int, nbytes: int, stores: bool) -> None:
        """Note an access; keep what is wrong with it."""
        now = int(self.clocks[thread, thread])
        for word in range(address // 4, (address + nbytes + 3) // 4):
            writer = self.stores.get(word)
            if writer and not self._ordered(*writer, thread):
                kind = "store after store" if stores else "load after store"
                self.found.add(f"{kind} of word {word}: threads {writer[0]} and {thread}")
            readers = self.loads.setdefault(word, {})
            if stores:
                for reader, clock in readers.items():
                    if not self._ordered(reader, clock, thread):
                        what = f"threads {reader} and {thread}"
                        self.found.add(f"store after load of word {word}: {what}")
                self.stores[word] = (thread, now)
                readers.clear()
            else:
                readers[thread] = now

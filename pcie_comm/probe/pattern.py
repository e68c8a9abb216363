"""The bytes that probes move, as the host computes them: what `device.mixed` gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MASK = 0xFFFF_FFFF
WORD_NBYTES = 4


def pattern(seed: int, words: int) -> Words:
    """Return the first words of the pattern `seed`."""
    number = np.arange(words, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(seed & MASK)
    number = (number ^ (number >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    number = (number ^ (number >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed: Words = number ^ (number >> np.uint32(16))
    return mixed


@dataclass(frozen=True)
class Counts:
    """What was found where a pattern should be.

    Attributes:
        words: That were looked at, 4 bytes each.
        wrong: That are not of the pattern.
        stale: That are of an earlier one instead.
    """

    words: int
    wrong: int
    stale: int


def count(memory: Bytes, seed: int, stale: int) -> Counts:
    """Compare memory with a pattern, and with the one that was there before."""
    found = memory.view(np.uint32)
    differs = found != pattern(seed, len(found))
    before = differs & (found == pattern(stale, len(found)))
    return Counts(len(found), int(differs.sum()), int(before.sum()))


def chain(nbytes: int, stride: int, seed: int) -> tuple[Bytes, int]:
    """Return memory in which every `stride` bytes hold the offset of the next hop, and the hops.

    The hops visit each place once, in an order without regular steps, and end at offset 0.
    """
    places = nbytes // stride
    order = 1 + np.random.default_rng(seed).permutation(places - 1)
    path = np.concatenate([[0], order]).astype(np.uint64) * np.uint64(stride)
    memory = np.zeros(nbytes // 8, dtype=np.uint64)
    memory[path // 8] = np.roll(path, -1)
    return memory.view(np.uint8), places

"""What measured figures say about pairs of GPUs, for rules and for advice. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ..crossovers import Point, derive_limits
from .labels import components
from .model import Host, Measurement
from .probed import FAULTS, MEMORIES, NO_ACCESS, PINNED, SM, VRAM, Check, Exchange, best_us

NEAR = 0.8
"""Pairs are mates by traffic if they reach this share of the best pair, in rate and in delay."""

SLOWER = 0.9
"""Peer access must be at least this fast, compared with the way through the host."""

Pair = tuple[str, str]


def bad_checks(host: Host) -> dict[Pair, list[Check]]:
    """Return the checks by pair that found a fault, or no access."""
    found: dict[Pair, list[Check]] = {}
    for check in host.checks:
        if check.verdict in (*FAULTS, NO_ACCESS):
            found.setdefault((check.source, check.target), []).append(check)
    return found


def cells(matrix: Measurement, same: bool = False) -> Iterator[tuple[Pair, float]]:
    """Yield the figures between different rows and columns, with `same` all of them."""
    for row, values in zip(matrix.rows, matrix.cells, strict=True):
        for column, value in zip(matrix.columns, values, strict=True):
            if value is not None and (same or row != column):
                yield (row, column), value


def is_between_gpus(host: Host, matrix: Measurement) -> bool:
    """Tell whether rows and columns of a matrix are GPUs."""
    names = {gpu.name for gpu in host.gpus or ()}
    return {*matrix.rows, *matrix.columns} <= names


def slower_than_host(host: Host) -> dict[Pair, str]:
    """Return the pairs whose ranks exchange faster through the host's memory, with the figures."""
    times: dict[Pair, dict[str, float]] = {}
    for one in host.exchanges:
        us = best_us(one)
        if us is not None and one.source != one.target:
            times.setdefault((one.source, one.target), {})[one.memory] = us
    return {
        pair: f"an exchange takes {found[VRAM]:g} us, through pinned host memory {found[PINNED]:g}"
        for pair, found in times.items()
        if set(found) == set(MEMORIES) and found[PINNED] < SLOWER * found[VRAM]
    }


def traffic_islands(host: Host) -> list[tuple[str, ...]] | None:
    """Return the GPUs in groups that are near by measured traffic, a partition; None if unknown.

    Two GPUs are near if the slowest of their reads and writes, in both directions, reaches NEAR of
    that of the best pair, and the longest of their delays is within 1 / NEAR of the shortest.
    """
    names = [gpu.name for gpu in host.gpus or ()]
    rates = {pair: min(values) for pair, values in _by_pair(host, "GB/s").items()}
    if not rates:
        return None
    delays = {pair: max(values) for pair, values in _by_pair(host, "us").items()}
    best, least = max(rates.values()), min(delays.values(), default=0.0)
    near = [
        pair
        for pair, rate in rates.items()
        if rate >= NEAR * best and delays.get(pair, least) * NEAR <= least
    ]
    return components(names, near)


def _by_pair(host: Host, unit: str) -> dict[Pair, list[float]]:
    """Return the figures for each unordered pair: of what SMs did with peer access, one way."""
    found: dict[Pair, list[float]] = {}
    for matrix in host.measurements:
        fits = (matrix.unit, matrix.engine, matrix.p2p, matrix.direction)
        if fits == (unit, SM, True, "unidirectional") and is_between_gpus(host, matrix):
            for (row, column), value in cells(matrix):
                found.setdefault((min(row, column), max(row, column)), []).append(value)
    return found


def crossovers(host: Host) -> dict[str, dict[str, int | None]] | None:
    """Return up to which size which protocol is fastest, by memory; None if nothing is known.

    As Limits have it: bytes that a rank receives in all.
    """
    found = {}
    for memory in MEMORIES:
        limits = derive_limits([*_points(host, memory)])
        if limits is not None:
            found[memory] = {
                "tagged_nbytes": limits.tagged_nbytes,
                "push_nbytes": limits.push_nbytes,
            }
    return found or None


def _points(host: Host, memory: str) -> Iterator[Point]:
    """Yield the times of ranks on different GPUs; where there are none, of ranks that share one."""
    here = [one for one in host.exchanges if one.memory == memory and one.points]
    apart = [one for one in here if one.source != one.target]
    for one in apart or here:
        yield from _of_exchange(one)


def _of_exchange(one: Exchange) -> Iterator[Point]:
    for point in one.points or ():
        times = {"pull": point.pull_us, "push": point.push_us, "tagged": point.tagged_us}
        yield point.nbytes, {name: us for name, us in times.items() if us is not None}

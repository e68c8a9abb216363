"""Sizes at which another protocol becomes the fastest: built in, or from a benchmark report. Pure.

A report of `pcie-comm bench` holds the crossovers that it found, beside the figures that they were
derived from. So the file that a host runs by says in plain numbers what will be chosen, a later
version derives nothing else from it, and a cut-down file of `format`, `correct` and `crossovers`
serves as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from .errors import InvalidArgumentError

REPORT_FORMAT = "pcie_comm bench 1"
BUILT_IN = "built-in"
MOST_NBYTES = 1 << 40

PULL_MARGIN = 1.05
"""By how much pull must win: calls that may pull load one more set of kernels."""

REMEDY = (
    "give a report that `pcie-comm bench --out FILE` wrote on this host, or unset "
    "Config.policy_file (PCIE_COMM_POLICY)"
)

Point = tuple[int, Mapping[str, float]]
"""A size in bytes, and by protocol the time that a call of that size took."""


@dataclass(frozen=True)
class Limits:
    """Up to which size a protocol serves, in bytes that a rank receives in all.

    A rank's own bytes count, tags do not.

    Attributes:
        tagged_nbytes: Tagged push up to here.
        push_nbytes: Beyond that, push up to here, then pull; None: push whatever the size.
        patience_nbytes: Above this, tagged push polls flags before payload; None: never.
        wave_nbytes: Push stages in waves of so much; None: all at once. Like patience_nbytes not
            measured by a benchmark of protocols; see policy.pace.
    """

    tagged_nbytes: int = 65_536
    push_nbytes: int | None = None
    patience_nbytes: int | None = None
    wave_nbytes: int | None = None

    def shared_by(self, sharers: int) -> Limits:
        """Return the limits of each of `sharers` ranks that have these together."""
        tagged, *others = (None if value is None else value // sharers for value in astuple(self))
        return Limits(tagged or 0, *others)


VRAM = Limits()
PINNED = Limits(tagged_nbytes=160 << 10, patience_nbytes=64 << 10, wave_nbytes=256 << 10)
BUILT_IN_LIMITS = {"vram": VRAM, "pinned": PINNED}


@dataclass(frozen=True)
class Crossovers:
    """Limits by memory. The defaults come from one machine; docs/performance.md shows them.

    Attributes:
        vram: Slabs in device memory: bytes that a rank receives.
        pinned: Slabs in pinned host memory: bytes that all ranks on a device receive together,
            since they share its link.
        source: Where the limits come from, for people. Not part of what ranks must agree on.
    """

    vram: Limits = VRAM
    pinned: Limits = PINNED
    source: str = BUILT_IN

    def limits(self, transport: str, sharers: int) -> Limits:
        """Return the limits of a group.

        Args:
            transport: Its name.
            sharers: Most ranks on one device.
        """
        return self.pinned.shared_by(sharers) if transport == "host_pinned" else self.vram

    def contract(self) -> dict[str, list[int | None]]:
        """Return the numbers, which must be the same on all ranks."""
        return {
            name: list(astuple(limits))
            for name, limits in (("vram", self.vram), ("pinned", self.pinned))
        }


def from_report(report: object, source: str) -> Crossovers:
    """Return the crossovers of a report; a memory that was not measured keeps the defaults.

    Args:
        report: What its JSON says.
        source: Where it is from, for messages and for people.

    Raises:
        InvalidArgumentError: It is no report, its outputs were wrong, or a number is.
    """
    if not isinstance(report, dict) or report.get("format") != REPORT_FORMAT:
        raise InvalidArgumentError(f"{source} is no report of {REPORT_FORMAT!r}; {REMEDY}")
    if report.get("correct") is not True:
        raise InvalidArgumentError(f"{source} is of a run with wrong outputs; {REMEDY}")
    found = report.get("crossovers")
    if not isinstance(found, dict) or not found or not set(found) <= {"vram", "pinned"}:
        raise InvalidArgumentError(
            f"{source} has no crossovers (crossovers={found!r}): a report has them if tagged push "
            f"and push were measured on GPUs; {REMEDY}"
        )
    return from_limits(found, source)


def from_limits(found: Mapping[str, object], source: str) -> Crossovers:
    """Return the crossovers that a file states; a memory that is not in it keeps the defaults.

    Args:
        found: By memory, `tagged_nbytes` and `push_nbytes`.
        source: Where it is from, for messages and for people.

    Raises:
        InvalidArgumentError: A memory is unknown, or a number is wrong.
    """
    if unknown := set(found) - set(BUILT_IN_LIMITS):
        raise InvalidArgumentError(f"{source}: crossovers of unknown memory={sorted(unknown)}")
    limits = {memory: _limits(memory, values, source) for memory, values in found.items()}
    return Crossovers(**(BUILT_IN_LIMITS | limits), source=source)


def _limits(memory: str, values: object, source: str) -> Limits:
    names = {"tagged_nbytes", "push_nbytes"}
    if isinstance(values, dict) and set(values) == names:
        tagged, push = values["tagged_nbytes"], values["push_nbytes"]
        if _is_size(tagged) and (push is None or (_is_size(push) and push >= tagged)):
            return replace(BUILT_IN_LIMITS[memory], tagged_nbytes=tagged, push_nbytes=push)
    raise InvalidArgumentError(
        f"{source}: crossovers of {memory}={values!r} are damaged, expected tagged_nbytes and a "
        f"push_nbytes that is null or no smaller; {REMEDY}"
    )


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST_NBYTES


def derive_limits(points: Sequence[Point]) -> Limits | None:
    """Return the limits under which the measured calls are fastest, taken together.

    Every call counts alike: what is least is the product of the times of the protocols that the
    limits choose. Pull counts as slower by PULL_MARGIN. Of limits that are equal in this, those
    with less tagged push and less pull.

    Args:
        points: Those without a time of `tagged` and of `push` are left out.

    Returns:
        The limits, or None without points.
    """
    known = [(size, times) for size, times in points if {"tagged", "push"} <= set(times)]
    if not known:
        return None
    return min(_candidates(known), key=lambda limits: (cost(known, limits), *_order(limits)))


def _candidates(points: Sequence[Point]) -> Iterator[Limits]:
    sizes = [0, *sorted({size for size, _ in points})]
    may_pull = all("pull" in times for _, times in points)
    for tagged in sizes:
        yield Limits(tagged, None)
        if may_pull:
            for push in sizes[:-1]:
                if push >= tagged:
                    yield Limits(tagged, push)


def _order(limits: Limits) -> tuple[bool, int, int]:
    return limits.push_nbytes is not None, limits.tagged_nbytes, -(limits.push_nbytes or 0)


def cost(points: Sequence[Point], limits: Limits) -> float:
    """Return the sum of the logarithms of the times that the limits choose, rounded."""
    total = 0.0
    for size, times in points:
        if size <= limits.tagged_nbytes:
            total += math.log(times["tagged"])
        elif limits.push_nbytes is not None and size > limits.push_nbytes:
            total += math.log(times["pull"] * PULL_MARGIN)
        else:
            total += math.log(times["push"])
    return round(total, 9)

"""What a run found: rows with raw samples, ratios, what was left out; as JSON."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..crossovers import REPORT_FORMAT, Point, derive_limits
from ..errors import InvalidArgumentError
from .contenders import FLOORS, NO_PROTOCOL, OURS
from .options import OPERATIONS, PINNED, VRAM

WARM, COLD = "warm", "cold"
COPY = "copy"
"""The contender of a ladder."""

EVICTION = "eviction alone"
DIRECTION = (
    "ratio = median time of `of` / median time of `to`; above 1, `to` is faster; for a floor it is "
    "the part of `to` that the floor takes"
)


@dataclass(frozen=True)
class Row:
    """One contender of one case.

    Attributes:
        op, ranks, rows, memory: The case.
        protocol, contender: What ran.
        cache: WARM or COLD.
        received_nbytes: Bytes a rank receives in all, its own included; tags not counted.
        sharers: Most ranks on one GPU.
        samples_ns: Time of one operation, in the order taken.
        faults_before, faults_after: What was wrong with the outputs before and after the timing.
    """

    op: str
    ranks: int
    rows: int
    memory: str
    protocol: str
    contender: str
    cache: str
    received_nbytes: int
    sharers: int
    samples_ns: tuple[int, ...]
    faults_before: tuple[str, ...] = ()
    faults_after: tuple[str, ...] = ()

    @property
    def median_us(self) -> float:
        """Median of the samples in microseconds."""
        return statistics.median(self.samples_ns) / 1e3

    @property
    def gigabytes_per_s(self) -> float:
        """What a rank gets from its peers, over the median."""
        return self.received_nbytes * (self.ranks - 1) / self.ranks / self.median_us / 1e3

    @property
    def correct(self) -> bool:
        """Whether the outputs were right, before and after."""
        return not self.faults_before and not self.faults_after

    @property
    def case(self) -> tuple[str, int, int, str, str]:
        """What a row must share with another to be compared with it; the protocol apart."""
        return self.op, self.ranks, self.rows, self.memory, self.cache

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain values; times in microseconds but for the raw samples."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("samples_ns", "faults_before", "faults_after"):
            values[name] = list(values[name])
        figures = {
            "median_us": round(self.median_us, 3),
            "min_us": round(min(self.samples_ns) / 1e3, 3),
            "max_us": round(max(self.samples_ns) / 1e3, 3),
            "gigabytes_per_s": round(self.gigabytes_per_s, 3),
        }
        return {**values, **figures, "correct": self.correct}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Row:
        """Return the row that `as_json` made these values of."""
        own = {name: values[name] for name in cls.__dataclass_fields__}
        for name in ("samples_ns", "faults_before", "faults_after"):
            own[name] = tuple(own[name])
        return cls(**own)


@dataclass(frozen=True)
class LeftOut:
    """Something that was not measured, where, and why."""

    what: str
    where: str
    why: str


@dataclass
class Report:
    """All of a run.

    Attributes:
        provenance: Where the figures come from; see provenance.py.
        method: How they were taken, in words.
        rows: One per contender, case and cache state.
        left_out: What was not measured.
        complete: The run came to its end.
    """

    provenance: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    complete: bool = False

    @property
    def correct(self) -> bool:
        """Whether every output was right."""
        return all(row.correct for row in self.rows)

    @property
    def is_ladder(self) -> bool:
        """Whether it is of a ladder."""
        return any(row.contender == COPY for row in self.rows)

    def leave_out(self, what: str, where: str, why: str) -> None:
        """Note something that is not measured, once."""
        entry = LeftOut(what, where, why)
        if entry not in self.left_out:
            self.left_out.append(entry)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "format": REPORT_FORMAT,
            "complete": self.complete,
            "correct": self.correct,
            "provenance": self.provenance,
            "method": self.method,
            "left_out": [vars(entry) for entry in self.left_out],
            "crossovers": crossovers(self.rows),
            "ratio_direction": DIRECTION,
            "ratios": list(ratios(self.rows)),
            "rows": [row.as_json() for row in self.rows],
        }

    @classmethod
    def read(cls, path: Path) -> Report:
        """Return the report of an earlier run.

        Raises:
            InvalidArgumentError: The file cannot be read, or is none.
        """
        try:
            values = json.loads(path.read_bytes())
            if values["format"] != REPORT_FORMAT:
                raise ValueError(f"format={values['format']!r}")
            rows = [Row.from_json(row) for row in values["rows"]]
            left_out = [LeftOut(**entry) for entry in values["left_out"]]
            facts = (values["provenance"], values["method"])
            return cls(*facts, rows, left_out, values["complete"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(
                f"read={path} is no report of {REPORT_FORMAT!r} ({type(error).__name__}: {error}); "
                "name a file that --out wrote"
            ) from error

    def write(self, path: Path) -> None:
        """Write the report as JSON; a reader sees the old file or the new one.

        Raises:
            InvalidArgumentError: The file cannot be written.
        """
        text = _text(self.as_json())
        try:
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except OSError as error:
            raise InvalidArgumentError(f"out={path} cannot be written ({error})") from error


def _text(report: dict[str, Any]) -> str:
    """Return JSON with one line per row and ratio."""
    lists = ("left_out", "ratios", "rows")
    head = json.dumps(
        {name: value for name, value in report.items() if name not in lists}, indent=1
    )
    parts = [head[: head.rindex("\n}")]]
    for name in lists:
        lines = ",\n".join(f"  {json.dumps(one)}" for one in report[name])
        parts.append(f' "{name}": [\n{lines}\n ]')
    return ",\n".join(parts) + "\n}\n"


def crossovers(rows: Sequence[Row]) -> dict[str, dict[str, int | None]]:
    """Return by memory the limits that the warm figures of our single launches speak for.

    What `Config.policy_file` reads. A memory without figures of tagged push and push is not in it.
    """
    found = {}
    for name, memory in (("vram", VRAM), ("pinned", PINNED)):
        limits = derive_limits(points(rows, memory))
        if limits is not None:
            found[name] = {one: getattr(limits, one) for one in ("tagged_nbytes", "push_nbytes")}
    return found


def points(rows: Sequence[Row], memory: str) -> list[Point]:
    """Return size and time by protocol of every case in a memory; see crossovers.Crossovers."""
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        measured = (row.contender, row.cache, row.memory) == (OURS, WARM, memory)
        if measured and row.op in OPERATIONS:  # plugins may go by other limits, or by none
            shared = row.sharers if memory == PINNED else 1
            key = (row.received_nbytes * shared, row.case)
            times.setdefault(key, {})[row.protocol] = row.median_us
    return [(key[0], by_protocol) for key, by_protocol in times.items()]


def ratios(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Compare every contender with ours of the same case and protocol; see DIRECTION."""
    ours = {(row.case, row.protocol): row for row in rows if row.contender == OURS}
    for row in rows:
        if row.contender in (OURS, EVICTION):
            continue
        for (case, protocol), other in ours.items():
            if case != row.case or row.protocol not in (NO_PROTOCOL, protocol):
                continue
            op, ranks, count, memory, cache = case
            yield {
                "op": op,
                "ranks": ranks,
                "rows": count,
                "memory": memory,
                "cache": cache,
                "protocol": protocol,
                "of": row.contender,
                "to": OURS,
                "ratio": round(row.median_us / other.median_us, 3),
                "floor": row.contender in FLOORS,
            }

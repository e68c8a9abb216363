"""Figures of pairs become matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..topology.model import ANY, Measurement
from ..topology.probed import COPY_ENGINE, SM, Gap
from .task import Figure

GBPS, MICROSECONDS = "GB/s", "us"
ONE_WAY, BOTH_WAYS = "unidirectional", "bidirectional"
PLAIN = "it has no such property"


@dataclass(frozen=True)
class Kind:
    """What the figures of a kind have in common; fields as of Measurement."""

    title: str
    unit: str = GBPS
    engine: str | None = None
    access: str | None = None
    direction: str | None = ONE_WAY
    p2p: bool | None = True


def _of_host(title: str, engine: str, access: str | None, direction: str = ONE_WAY) -> Kind:
    return Kind(title, GBPS, engine, access, direction, None)


KINDS: dict[str, Kind] = {
    "ce-write": Kind("copy engine of the row writes to the column", GBPS, COPY_ENGINE, "write"),
    "ce-read": Kind("copy engine of the row reads from the column", GBPS, COPY_ENGINE, "read"),
    "ce-both": Kind("copy engines write both ways", GBPS, COPY_ENGINE, "write", BOTH_WAYS),
    "ce-staged": Kind(
        "copy engines without peer access, row to column",
        GBPS,
        COPY_ENGINE,
        "write",
        ONE_WAY,
        False,
    ),
    "sm-write": Kind("SMs of the row write to the column", GBPS, SM, "write"),
    "sm-read": Kind("SMs of the row read from the column", GBPS, SM, "read"),
    "sm-both": Kind("SMs write both ways", GBPS, SM, "write", BOTH_WAYS),
    "chase": Kind("dependent load of the row from the column", MICROSECONDS, SM, "read"),
    "flag": Kind("flag between resident kernels, one way", MICROSECONDS, SM, "write"),
    "host-ce-write": _of_host("copy engine, GPU to host memory", COPY_ENGINE, "write"),
    "host-ce-read": _of_host("copy engine, host memory to GPU", COPY_ENGINE, "read"),
    "host-ce-both": _of_host("copy engines, both ways at once", COPY_ENGINE, None, BOTH_WAYS),
    "host-sm-write": _of_host("SMs write to host memory", SM, "write"),
    "host-sm-read": _of_host("SMs read from host memory", SM, "read"),
    "host-sm-both": _of_host("SMs read and write host memory at once", SM, None, BOTH_WAYS),
    "host-chase": Kind("dependent load from host memory", MICROSECONDS, SM, "read", ONE_WAY, None),
    "host-flag": Kind(
        "flag through host memory, one way", MICROSECONDS, SM, "write", ONE_WAY, None
    ),
}
"""By name. Those of `host-` have places of the host as columns, the others GPUs."""


def assemble(figures: Iterable[Figure]) -> tuple[Measurement, ...]:
    """Return a matrix for each kind of which there is a figure, rows and columns as they come."""
    by_kind: dict[str, list[Figure]] = {}
    for figure in figures:
        by_kind.setdefault(figure.kind, []).append(figure)
    return tuple(_matrix(KINDS[name], by_kind[name]) for name in KINDS if name in by_kind)


def _matrix(kind: Kind, figures: Sequence[Figure]) -> Measurement:
    rows = tuple(dict.fromkeys(figure.row for figure in figures))
    columns = tuple(dict.fromkeys(figure.column for figure in figures))
    found = {(figure.row, figure.column): figure for figure in figures}
    gaps = (
        Gap(figure.row, figure.column, figure.why("value"))
        for figure in figures
        if figure.value is None
    )
    sizes = {figure.nbytes for figure in figures if figure.nbytes}
    return Measurement(
        title=f"{kind.title} ({kind.unit})",
        rows=rows,
        columns=columns,
        cells=tuple(
            tuple(
                found[row, column].value if (row, column) in found else None for column in columns
            )
            for row in rows
        ),
        unit=kind.unit,
        p2p=kind.p2p,
        direction=kind.direction,
        access=kind.access,
        engine=kind.engine,
        nbytes=sizes.pop() if len(sizes) == 1 else None,
        gaps=tuple(gaps),
        unknown={ANY: PLAIN, "nbytes": "no size, or several"},
    )

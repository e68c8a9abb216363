"""Reads matrices of figures: nvbandwidth, p2pBandwidthLatencyTest, and such without a title."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...errors import InvalidArgumentError
from ..model import ANY, Gpu, Host, Measurement, unknown_system

NVBANDWIDTH = "nvbandwidth text"
P2P_TEST = "p2pBandwidthLatencyTest text"
MATRIX = "matrix of figures"

ABSENT = "a matrix of figures does not have it"
_UNIT = re.compile(r"\((GB/s|us|ns)\)\s*$")
_INDEX = re.compile(r"(?:GPU)?(\d+):?")
_CELL = re.compile(r"-?\d+(?:\.\d+)?|[-—–]+|N/A|nan", re.IGNORECASE)


def is_nvbandwidth(text: str) -> bool:
    """Whether a text is the output of nvbandwidth."""
    return "memcpy" in text and any("memcpy" in matrix.title for matrix in matrices(text))


def is_p2p_test(text: str) -> bool:
    """Whether a text is the output of p2pBandwidthLatencyTest."""
    return "P2P=" in text and any("P2P=" in matrix.title for matrix in matrices(text))


def is_matrix(text: str) -> bool:
    """Whether a text has a matrix of figures."""
    return next(matrices(text), None) is not None


def _columns(line: str) -> int:
    """Return how many GPUs a header numbers from 0 on; 0 if the line is no header."""
    words = line.split()
    if words and not re.fullmatch(r"(?:GPU)?\d+", words[0]):
        words = words[1:]  # the corner: D\D, GPU, CPU, Dst
    numbers = [match[1] for word in words if (match := _INDEX.fullmatch(word))]
    right = len(numbers) == len(words) and numbers == [str(at) for at in range(len(words))]
    return len(words) if right else 0


def _row(line: str, columns: int) -> tuple[str, tuple[float | None, ...]] | None:
    words = line.split()
    if len(words) != columns + 1 or not (match := _INDEX.fullmatch(words[0])):
        return None
    if not all(_CELL.fullmatch(word) for word in words[1:]):
        return None
    return match[1], tuple(_figure(word) for word in words[1:])


def _figure(word: str) -> float | None:
    return float(word) if re.fullmatch(r"-?\d+(?:\.\d+)?", word) else None


def matrices(text: str) -> Iterator[Measurement]:
    """Yield the matrices of a text, each with the line above it as title."""
    lines = text.splitlines()
    title, at = "", 0
    while at < len(lines):
        columns, start = _columns(lines[at]), at + 1
        at = start
        rows = []
        while columns and at < len(lines) and (row := _row(lines[at], columns)):
            rows.append(row)
            at += 1
        if rows:
            yield _measurement(title, lines[start - 1], columns, rows)
            title = ""
        elif lines[start - 1].strip():
            title = lines[start - 1].strip()


def _measurement(
    title: str, header: str, columns: int, rows: list[tuple[str, tuple[float | None, ...]]]
) -> Measurement:
    unit = _UNIT.search(title)
    low = title.lower()
    on_host = "CPU(row)" in title or header.split()[0] == "CPU"
    # Each word that a title may have decides one fact; without the word the fact stays unknown.
    direction = "bidirectional" if "bidirectional" in low or "<->" in title else None
    if direction is None and ("unidirectional" in low or "<-" in title or "->" in title):
        direction = "unidirectional"
    access = next((kind for kind in ("read", "write") if f"p2p {kind}s" in low), None)
    return Measurement(
        title=title,
        rows=tuple("CPU" if on_host else f"GPU{name}" for name, _ in rows),
        columns=tuple(f"GPU{at}" for at in range(columns)),
        cells=tuple(cells for _, cells in rows),
        unit=unit[1] if unit else None,
        p2p={"p2p=enabled": True, "p2p=disabled": False}.get(
            next((word for word in low.split() if word.startswith("p2p=")), "")
        ),
        direction=direction,
        access=access,
        unknown={ANY: "the title does not say" if title else "there is no title"},
    )


def read(text: str, source: str) -> Host:
    """Read every matrix of a text.

    Raises:
        InvalidArgumentError: There is none.
    """
    found = tuple(matrices(text))
    if not found:
        raise InvalidArgumentError(f"file={source} has no complete matrix of figures")
    kind = NVBANDWIDTH if is_nvbandwidth(text) else P2P_TEST if is_p2p_test(text) else MATRIX
    names = max((matrix.columns for matrix in found), key=len)
    return Host(
        sources=(f"{kind}: {source}",),
        system=unknown_system(ABSENT),
        gpus=tuple(Gpu(name, unknown={ANY: ABSENT}) for name in names),
        measurements=found,
        unknown={ANY: ABSENT},
    )

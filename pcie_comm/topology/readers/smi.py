"""Reads `nvidia-smi topo -m` and `-p2p`, old forms and pastes of both included."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import InvalidArgumentError
from ..model import ANY, Gpu, Host, LabelMatrix, Pair, unknown_system

KIND = "nvidia-smi topo"
ABSENT = "nvidia-smi topo does not print it"

_GPU = re.compile(r"GPU\d+")
_DEVICE = re.compile(r"(?:GPU|NIC)\d+|[a-z]+[a-z0-9]*_\w+")
_LABEL = re.compile(r"X|PIX|PXB|PHB|NODE|SYS|SOC|NV\d+")
_STATUS = re.compile(r"X|OK|U|[A-Z]{0,2}NS|DR|NVLS?")
_RANGES = re.compile(r"\d[\d,-]*")


@dataclass(frozen=True)
class _Table:
    columns: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]
    rest: dict[str, tuple[str, ...]]

    @property
    def is_status(self) -> bool:
        cells = {cell for row in self.rows.values() for cell in row} - {"X"}
        return bool(cells) and not any(_LABEL.fullmatch(cell) for cell in cells)


def _header(line: str) -> tuple[str, ...]:
    """Return the devices that a line names as columns, nothing if it is no header."""
    words = line.split()
    if not words or words[0] != "GPU0" or (len(words) > 1 and words[1] in ("X", "OK")):
        return ()
    names = []
    for word in words:
        if not _DEVICE.fullmatch(word):
            break
        names.append(word)
    return tuple(names)


def _tables(text: str) -> list[_Table]:
    found: list[_Table] = []
    for line in text.splitlines():
        if columns := _header(line):
            found.append(_Table(columns, {}, {}))
            continue
        words = line.split()
        if not found or not words or not _DEVICE.fullmatch(words[0].rstrip(":")):
            continue
        cells = []
        for word in words[1 : len(found[-1].columns) + 1]:
            if not (_LABEL.fullmatch(word) or _STATUS.fullmatch(word)):
                break
            cells.append(word)
        if cells:
            found[-1].rows[words[0]] = tuple(cells)
            found[-1].rest[words[0]] = tuple(words[1 + len(cells) :])
    return [table for table in found if table.rows]


def matches(text: str) -> bool:
    """Whether a text holds such a matrix."""
    return bool(_tables(text))


def read(text: str, source: str) -> Host:
    """Read the first matrix of labels and every matrix of P2P status.

    Raises:
        InvalidArgumentError: There is no such matrix.
    """
    tables = _tables(text)
    if not tables:
        raise InvalidArgumentError(f"file={source} has no matrix of nvidia-smi")
    topo = next((table for table in tables if not table.is_status), None)
    status = [table for table in tables if table.is_status]
    names = tuple(name for name in tables[0].columns if _GPU.fullmatch(name))
    remarks = []
    if topo and (lost := [name for name in topo.columns if name not in topo.rows]):
        remarks.append(f"{source}: rows are missing: {', '.join(lost)}")
    return Host(
        sources=(f"{KIND}: {source}",),
        system=unknown_system(ABSENT),
        gpus=tuple(_gpu(name, topo) for name in names),
        driver_labels=_matrix(topo) if topo else None,
        pairs=_pairs(names, status) if status else None,
        remarks=tuple(remarks),
        unknown={ANY: ABSENT},
    )


def _gpu(name: str, topo: _Table | None) -> Gpu:
    rest = topo.rest.get(name, ()) if topo else ()
    cpus = rest[0] if rest and _RANGES.fullmatch(rest[0]) else None
    numa = rest[1] if len(rest) > 1 and rest[1].isdecimal() else None
    return Gpu(
        name=name,
        nvml_index=int(name.removeprefix("GPU")),
        cpus=cpus,
        numa_node=None if numa is None else int(numa),
        unknown={ANY: ABSENT},
    )


def _matrix(table: _Table) -> LabelMatrix:
    """Return a matrix with a row for every column; what is not printed is None."""
    width = len(table.columns)
    rows = []
    for name in table.columns:
        cells = table.rows.get(name, ())
        renamed = tuple("SYS" if cell == "SOC" else cell for cell in cells)
        rows.append((*renamed, *(None for _ in range(width - len(cells)))))
    return LabelMatrix(table.columns, table.columns, tuple(rows))


def _pairs(names: tuple[str, ...], tables: list[_Table]) -> tuple[Pair, ...]:
    """Return the status of each ordered pair in the first matrix; none says of what it is."""
    rows = tables[0].rows
    found = []
    for source in names:
        cells = dict(zip(tables[0].columns, rows.get(source, ()), strict=False))
        for target in names:
            if source != target and target in cells:
                unknown = {ANY: ABSENT}
                found.append(Pair(source, target, p2p={"?": cells[target]}, unknown=unknown))
    return tuple(found)

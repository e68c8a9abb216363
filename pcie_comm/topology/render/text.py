"""A host as plain text that can be pasted: tree, labels, P2P status, figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..labels import islands, labels
from ..model import Host, Measurement, Pair
from ..traffic import traffic_islands
from .grid import UNKNOWN, Table, gaps, number, tables
from .tree import Branch, forest

CUDA_FIELDS = ("cuda_access", "performance_rank", "native_atomics")


def to_text(host: Host) -> str:
    """Return everything that a terminal shows of a host."""
    parts = [_system(host), _trees(host), _labels(host), _p2p(host)]
    parts += [_table(table) for table in tables(host)]
    parts += [_figures(matrix) for matrix in host.measurements]
    if host.remarks:
        parts.append("\n".join(f"remark: {remark}" for remark in host.remarks))
    return "\n\n".join(part for part in parts if part)


def _system(host: Host) -> str:
    system = host.system
    numa = None if system.numa is None else len(system.numa)
    facts: list[tuple[str, object, str]] = [
        ("GPUs", None if host.gpus is None else len(host.gpus), host.why("gpus")),
        *(
            (name, getattr(system, name), system.why(name))
            for name in (
                "hostname",
                "cpu",
                "sockets",
                "kernel",
                "driver",
                "iommu",
                "container",
                "virtual_machine",
            )
        ),
        ("NUMA nodes", numa, system.why("numa")),
    ]
    lines = [f"from {'; '.join(host.sources)}"]
    lines += [f"{name}: {value}" for name, value, _ in facts if value is not None]
    reasons: dict[str, list[str]] = {}
    for name, value, why in facts:
        if value is None:
            reasons.setdefault(why, []).append(name)
    lines += [f"unknown: {', '.join(names)} ({why})" for why, names in reasons.items()]
    return "\n".join(lines)


def _trees(host: Host) -> str:
    lines: list[str] = []
    for top in forest(host):
        lines.append(_line(top))
        lines += _below(top, "")
    return "\n".join(lines)


def _line(branch: Branch) -> str:
    return f"{branch.key} {branch.title}" + (f": {branch.details}" if branch.details else "")


def _below(branch: Branch, margin: str) -> Iterable[str]:
    for at, child in enumerate(branch.below):
        last = at == len(branch.below) - 1
        yield f"{margin}{'`-' if last else '+-'} {_line(child)}"
        yield from _below(child, margin + ("   " if last else "|  "))


def grid(corner: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return a matrix as text, columns aligned to the right."""
    table = [[corner, *columns], *([name, *cells] for name, cells in rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(columns) + 1)]
    return "\n".join(
        " ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def _labels(host: Host) -> str:
    gpus = [gpu.name for gpu in host.gpus or ()]
    if not gpus:
        return ""
    every = labels(host)

    def cell(row: str, column: str) -> str:
        label = every[row, column]
        return f"{label.derived}!{label.driver}" if label.mismatch else label.best or UNKNOWN

    rows = [(row, [cell(row, column) for column in gpus]) for row in gpus]
    text = "labels\n" + grid("", gpus, rows)
    if any(label.mismatch for label in every.values()):
        text += "\nA!B: the tree says A and the driver B"
    if reasons := {label.reason for label in every.values() if label.best is None}:
        text += f"\n{UNKNOWN}: {'; '.join(sorted(reasons))}"
    groups = " | ".join(" ".join(group) for group in islands(host))
    text += f"\nislands: {groups}"
    if near := traffic_islands(host):
        text += f"\nislands by traffic: {' | '.join(' '.join(group) for group in near)}"
    return text


def _p2p(host: Host) -> str:
    if host.pairs is None or not host.gpus:
        return ""
    names = [gpu.name for gpu in host.gpus]
    parts = []
    for kind in sorted({kind for pair in host.pairs for kind in pair.p2p or {}}):
        cells = {(pair.source, pair.target): (pair.p2p or {}).get(kind) for pair in host.pairs}
        rows = [
            (row, ["X" if row == col else cells.get((row, col)) or UNKNOWN for col in names])
            for row in names
        ]
        title = "P2P status of an unnamed kind" if kind == "?" else f"P2P {kind}"
        parts.append(f"{title}\n{grid('', names, rows)}")
    parts += [_cuda(names, host.pairs, field) for field in CUDA_FIELDS]
    return "\n\n".join(filter(None, parts))


def _cuda(names: Sequence[str], pairs: Sequence[Pair], field: str) -> str:
    """Return a matrix of what CUDA says, nothing where it was not asked."""
    cells = {(pair.source, pair.target): getattr(pair, field) for pair in pairs}
    if all(value is None for value in cells.values()):
        return ""

    def cell(row: str, column: str) -> str:
        value = cells.get((row, column))
        if row == column or value is None:
            return "X" if row == column else UNKNOWN
        return ("no", "yes")[value] if isinstance(value, bool) else str(value)

    rows = [(row, [cell(row, column) for column in names]) for row in names]
    return f"CUDA {field.replace('_', ' ')}\n{grid('', names, rows)}"


def _table(table: Table) -> str:
    rows = [(name, list(cells)) for name, cells in table.rows]
    shown = grid("", table.columns, rows) if rows else ""
    return "\n".join(filter(None, (table.title, shown, *table.notes)))


def _figures(matrix: Measurement) -> str:
    rows = [
        (name, [number(value) for value in cells])
        for name, cells in zip(matrix.rows, matrix.cells, strict=True)
    ]
    title = matrix.title or f"figures without a title, unit {matrix.unit or 'unknown'}"
    return "\n".join((title, grid("", matrix.columns, rows), *gaps(matrix)))

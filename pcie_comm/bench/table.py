"""The report as a table for people: a line per case and protocol, a column per contender."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from .contenders import FLOORS, NO_PROTOCOL, OURS
from .report import COPY, EVICTION, Row


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table per operation and cache state: medians in us, in brackets that over ours."""
    kinds = dict.fromkeys((row.op, row.cache) for row in rows)
    return [
        _table([row for row in rows if (row.op, row.cache) == kind], f"{kind[0]}, {kind[1]} caches")
        for kind in kinds
    ]


def _table(rows: Sequence[Row], title: str) -> Table:
    names = list(dict.fromkeys(row.contender for row in rows if row.contender != EVICTION))
    names.sort(key=lambda name: name in FLOORS)
    table = Table(title=f"{title}: us per operation, median (its time / time of ours)")
    table.add_column("memory")
    for head in ("ranks", "rows"):
        table.add_column(head, justify="right")
    table.add_column("protocol")
    for name in names:
        table.add_column(name, justify="right")
    found = {(row.case, row.protocol, row.contender): row for row in rows}
    for row in rows:
        if row.contender != OURS:
            continue
        cells = []
        for name in names:
            other = found.get((row.case, row.protocol, name))
            cells.append(_cell(other or found.get((row.case, NO_PROTOCOL, name)), row))
        where = (row.memory, str(row.ranks), str(row.rows), row.protocol)
        table.add_row(*where, *cells)
    return table


def _cell(row: Row | None, ours: Row) -> str:
    if row is None:
        return ""
    wrong = "" if row.correct else " WRONG"
    if row is ours:
        return f"{row.median_us:.2f}{wrong}"
    return f"{row.median_us:.2f} ({row.median_us / ours.median_us:.2f}){wrong}"


def ladders(rows: Sequence[Row]) -> list[Table]:
    """Return a table per operation of a ladder: time, rate and copy of each size."""
    found = {(row.case, row.contender): row for row in rows}
    tables = []
    for op in dict.fromkeys(row.op for row in rows):
        table = Table(title=f"{op}: us per operation, median; GB/s that a rank gets from its peers")
        for head in ("memory", "ranks", "bytes per rank", "protocol", "us", "GB/s"):
            table.add_column(head, justify="left" if head in ("memory", "protocol") else "right")
        for head in ("copy: us", "GB/s", "ours / copy"):
            table.add_column(head, justify="right")
        for row in rows:
            if row.op != op or row.contender != OURS:
                continue
            copy = found[row.case, COPY]
            where = (row.memory, str(row.ranks), str(row.received_nbytes // row.ranks))
            cells = [f"{one.median_us:.2f}{'' if one.correct else ' WRONG'}" for one in (row, copy)]
            rates = [f"{one.gigabytes_per_s:.2f}" for one in (row, copy)]
            ratio = f"{row.median_us / copy.median_us:.2f}"
            table.add_row(*where, row.protocol, cells[0], rates[0], cells[1], rates[1], ratio)
        tables.append(table)
    return tables

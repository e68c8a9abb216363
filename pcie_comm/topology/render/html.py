"""A host as one HTML page: no script, no network, tree and heat maps as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from ..doctor import Case, Finding, examine
from ..labels import ORDER, best_matrix, distance, islands
from ..model import Host, Measurement
from ..probed import FAULTS, NO_ACCESS, OK
from ..traffic import traffic_islands
from .grid import Table, gaps, number, tables
from .tree import Branch, forest

ROW, STEP, CHARACTER = 24, 28, 7
CELL_WIDTH, CELL_HEIGHT = 58, 26

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem;
  color: #1b1f24; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .3rem .8rem .3rem 0;
  vertical-align: top; border-bottom: 1px solid #d8dee4; }
.scroll { overflow-x: auto; } svg text { font: 12px ui-monospace, monospace; fill: #1b1f24; }
svg .line { stroke: #8c959f; fill: none; } svg .gpu { fill: #1a7f37; } svg .port { fill: #57606a; }
.error { color: #b3261e; font-weight: 600; } .warning { color: #8a5300; font-weight: 600; }
.info { color: #57606a; } .good { color: #1a7f37; }
"""


def to_html(host: Host) -> str:
    """Return the page."""
    findings, unjudged = examine(Case(host))
    gaps = "".join(f"<li>{escape(item.id)}: {escape(item.reason)}</li>" for item in unjudged)
    parts = [
        f"<h1>PCIe topology{_of(host)}</h1>",
        f"<p>From {escape('; '.join(host.sources))}.</p>",
        _facts(host),
        "<h2>PCI tree above the GPUs</h2>",
        _tree(host),
        "<h2>Labels</h2>",
        _labels(host),
        *(_table(table) for table in tables(host)),
        *(_figures(matrix) for matrix in host.measurements),
        "<h2>Findings</h2>",
        _findings(findings),
        f"<h2>Not judged</h2><ul>{gaps}</ul>" if gaps else "",
    ]
    head = f'<meta charset="utf-8"><title>PCIe topology</title><style>{STYLE}</style>'
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _of(host: Host) -> str:
    return f" of {escape(host.system.hostname)}" if host.system.hostname else ""


def _facts(host: Host) -> str:
    names = ("cpu", "sockets", "kernel", "driver", "iommu", "container", "virtual_machine")
    rows = []
    for name in names:
        value = getattr(host.system, name)
        shown = f"unknown: {host.system.why(name)}" if value is None else str(value)
        rows.append(f"<tr><th>{name.replace('_', ' ')}</th><td>{escape(shown)}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _tree(host: Host) -> str:
    tops = forest(host)
    if not tops:
        return f"<p>No GPU is known: {escape(host.why('gpus') or 'there is none')}.</p>"
    drawn: list[str] = []
    row, width = 0, 0
    for top in tops:
        starts: dict[int, int] = {}
        for depth, branch in top.walk():
            x, y = depth * STEP + 10, row * ROW + 16
            if depth:
                drawn.append(_elbow(depth, starts[depth - 1], y))
            starts[depth] = y
            drawn += _device(branch, x, y)
            width = max(width, x + 20 + CHARACTER * len(_words(branch)) + 40)
            row += 1
    size = f'width="{width}" height="{row * ROW + 16}"'
    return _picture("PCI tree", size, drawn)


def _picture(label: str, size: str, drawn: Sequence[str]) -> str:
    svg = f'<svg role="img" aria-label="{label}" {size}>{"".join(drawn)}</svg>'
    return f'<div class="scroll">{svg}</div>'


def _elbow(depth: int, top: int, y: int) -> str:
    x = (depth - 1) * STEP + 10
    return f'<path class="line" d="M{x} {top + 5} V{y} H{x + STEP - 6}"/>'


def _words(branch: Branch) -> str:
    return f"{branch.key}  {branch.title}" + (f", {branch.details}" if branch.details else "")


def _device(branch: Branch, x: int, y: int) -> Iterator[str]:
    kind = "gpu" if branch.gpu is not None else "port"
    yield f'<circle class="{kind}" cx="{x}" cy="{y}" r="5"/>'
    yield f'<text x="{x + 12}" y="{y + 4}">{escape(_words(branch))}</text>'


def _labels(host: Host) -> str:
    matrix = best_matrix(host)
    if not matrix.rows:
        return ""
    shades = [
        [
            None
            if cell is None
            else 0.0
            if cell == "X"
            else 1 - (distance(cell) + 1) / len(ORDER) / 1.2
            for cell in row
        ]
        for row in matrix.cells
    ]
    words = [[cell or "?" for cell in row] for row in matrix.cells]
    groups = " | ".join(" ".join(group) for group in islands(host))
    picture = heat_map(matrix.rows, matrix.columns, words, shades)
    near = traffic_islands(host)
    shown = " | ".join(" ".join(group) for group in near) if near else "not measured"
    return f"{picture}<p>Islands: {escape(groups)}. By traffic: {escape(shown)}.</p>"


def _table(table: Table) -> str:
    """Return a table; cells that are a verdict have its class."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *table.columns))
    rows = [
        "".join(
            (
                f"<th>{escape(name)}</th>",
                *(f"<td{_class(cell)}>{escape(cell)}</td>" for cell in cells),
            )
        )
        for name, cells in table.rows
    ]
    body = "".join(f"<tr>{row}</tr>" for row in (head, *rows))
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    listed = f"<ul>{notes}</ul>" if notes else ""
    shown = f'<div class="scroll"><table>{body}</table></div>' if rows else ""
    return f"<h2>{escape(table.title)}</h2>{shown}{listed}"


def _class(cell: str) -> str:
    if cell == OK:
        return ' class="good"'
    return ' class="error"' if cell in (*FAULTS, NO_ACCESS) else ""


def _figures(matrix: Measurement) -> str:
    known = [value for row in matrix.cells for value in row if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = (high - low) or 1.0
    shades = [
        [None if value is None else (value - low) / span for value in row] for row in matrix.cells
    ]
    words = [["" if value is None else number(value) for value in row] for row in matrix.cells]
    title = matrix.title or f"Figures without a title, unit {matrix.unit or 'unknown'}"
    notes = "".join(f"<p>{escape(note)}</p>" for note in gaps(matrix))
    return f"<h2>{escape(title)}</h2>{heat_map(matrix.rows, matrix.columns, words, shades)}{notes}"


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    words: Sequence[Sequence[str]],
    shades: Sequence[Sequence[float | None]],
) -> str:
    """Return a matrix as SVG.

    Args:
        rows: Names.
        columns: Names.
        words: What each cell says.
        shades: 0 (pale) to 1 (strong) for each cell, None for white.
    """
    drawn = []
    for at, name in enumerate(columns):
        x = (at + 1) * CELL_WIDTH + CELL_WIDTH // 2
        drawn.append(f'<text x="{x}" y="17" text-anchor="middle">{escape(name)}</text>')
    for line, name in enumerate(rows):
        y = (line + 1) * CELL_HEIGHT
        drawn.append(f'<text x="4" y="{y + 17}">{escape(name)}</text>')
        for at, word in enumerate(words[line]):
            x = (at + 1) * CELL_WIDTH
            drawn.append(
                f'<rect x="{x}" y="{y}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" '
                f'fill="{_colour(shades[line][at])}"/>'
                f'<text x="{x + CELL_WIDTH // 2 - 1}" y="{y + 17}" text-anchor="middle">'
                f"{escape(word)}</text>"
            )
    width, height = (len(columns) + 1) * CELL_WIDTH, (len(rows) + 1) * CELL_HEIGHT
    size = f'width="{width}" height="{height}"'
    return _picture("matrix", size, drawn)


def _colour(shade: float | None) -> str:
    """Return a blue of a given strength that dark text can be read on."""
    return "#ffffff" if shade is None else f"hsl(210 80% {96 - 36 * shade:.0f}%)"


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<p>None.</p>"
    head = "".join(
        f"<th>{name}</th>"
        for name in (
            "severity",
            "rule",
            "about",
            "evidence",
            "expected",
            "seen",
            "remedy",
            "source",
        )
    )
    rows = []
    for item in findings:
        words = (
            item.id,
            item.subject,
            item.evidence,
            item.expected,
            item.seen,
            item.remedy,
            item.source,
        )
        cells = "".join(f"<td>{escape(word)}</td>" for word in words)
        rows.append(f'<tr><td class="{item.severity}">{item.severity}</td>{cells}</tr>')
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'

"""The report as a picture: latency against ranks and against rows, one line a contender.

Needs matplotlib, the extra `plot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ..errors import InvalidArgumentError
from .contenders import FLOORS
from .options import FUSED, ROUTER
from .report import COPY, EVICTION, WARM, Row

Axis = Literal["ranks", "rows"]
Line = list[tuple[int, float]]

PANEL_INCHES = (5.5, 3.6)


def pictured(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the picture: warm ones of one operation, the fused one if it is there."""
    warm = [row for row in rows if row.cache == WARM and row.contender != EVICTION]
    ops = list(dict.fromkeys(row.op for row in warm))
    op = FUSED if FUSED in ops else next((one for one in ops if one != ROUTER), ops[0])
    return [row for row in warm if row.op == op]


def lines(rows: Sequence[Row], axis: Axis, memory: str, held: int) -> dict[str, Line]:
    """Return a line per contender: its points (x, median in us), by x.

    Args:
        rows: Of one operation and one cache state.
        axis: What x is.
        memory: That the rows must be of.
        held: The value of the other axis.

    Returns:
        By contender; each point is that of its fastest protocol.
    """
    other = "rows" if axis == "ranks" else "ranks"
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.memory == memory and getattr(row, other) == held:
            line, x = found.setdefault(row.contender, {}), getattr(row, axis)
            line[x] = min(row.median_us, line.get(x, row.median_us))
    return {name: sorted(line.items()) for name, line in found.items()}


def draw(rows: Sequence[Row], path: Path, caption: str) -> None:
    """Write the picture; its format is that of the file's name.

    Raises:
        InvalidArgumentError: The file cannot be written, or has a name of no format.
    """
    from matplotlib.figure import Figure

    chosen = pictured(rows)
    memories = list(dict.fromkeys(row.memory for row in chosen))
    width, height = PANEL_INCHES
    figure = Figure(figsize=(2 * width, height * len(memories)), layout="constrained")
    panels = figure.subplots(len(memories), 2, squeeze=False)
    for memory, (left, right) in zip(memories, panels, strict=True):
        few_rows = min(row.rows for row in chosen)
        most_ranks = max(row.ranks for row in chosen)
        _panel(left, lines(chosen, "ranks", memory, few_rows), "ranks")
        left.set_title(f"{memory}, rows={few_rows}")
        _panel(right, lines(chosen, "rows", memory, most_ranks), "rows")
        right.set_title(f"{memory}, ranks={most_ranks}")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    figure.suptitle(f"{chosen[0].op}: time of one operation, best protocol, median\n{caption}")
    _save(figure, path)


def draw_ladder(rows: Sequence[Row], path: Path, caption: str) -> None:
    """Write the picture of a ladder: time against bytes per rank, a panel for each operation.

    Raises:
        InvalidArgumentError: See draw.
    """
    from matplotlib.figure import Figure

    ops = list(dict.fromkeys(row.op for row in rows))
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(ops), 1.3 * height), layout="constrained")
    panels = figure.subplots(1, len(ops), squeeze=False)[0]
    for op, panel in zip(ops, panels, strict=True):
        for name, line in ladder_lines([row for row in rows if row.op == op]).items():
            style = "--" if name.startswith(COPY) else "-"
            panel.plot(*zip(*line, strict=True), style, marker="o", markersize=4, label=name)
        panel.set_title(op)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("bytes per rank")
        panel.set_ylabel("µs")
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize="small")
    figure.suptitle(f"Time of one operation, median\n{caption}")
    _save(figure, path)


def ladder_lines(rows: Sequence[Row]) -> dict[str, Line]:
    """Return a line per contender, ranks and memory of one operation: (bytes per rank, us)."""
    found: dict[str, Line] = {}
    for row in rows:
        name = f"{row.contender}, {row.ranks} ranks, {row.memory}"
        found.setdefault(name, []).append((row.received_nbytes // row.ranks, row.median_us))
    return {name: sorted(line) for name, line in found.items()}


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: no such format
        raise InvalidArgumentError(f"plot={path} cannot be written ({error})") from error


def _panel(panel: Any, found: dict[str, Line], axis: Axis) -> None:
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    for name, line in found.items():
        style = "--" if name in FLOORS else "-"
        panel.plot(*zip(*line, strict=True), style, marker="o", markersize=4, label=name)
    ticks = sorted({x for line in found.values() for x, _ in line})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(x) for x in ticks])
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel(axis)
    panel.set_ylabel("µs")
    panel.grid(alpha=0.3, which="both")

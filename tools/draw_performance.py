"""Draws the picture of docs/performance.md from the table that a run on a GPU printed.

Needs matplotlib, the extra `plot`. The same versions give the same file.

Usage: python tools/draw_performance.py [--read FILE.txt] [--out FILE.svg]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EVIDENCE = Path(__file__).resolve().parent.parent / "docs" / "evidence"
RANKS = (2, 4, 8, 16)
OP = "all_gather_pair_kimi_topk"
MEMORIES = ("VRAM", "pinned host")
LINES = {
    "tagged": ("tagged push", "#00796b", "-"),
    "tagged+o": ("tagged push, overlapping", "#43a047", "-"),
    "push": ("push", "#ef6c00", "-"),
}
FLOORS = {
    "empty kernel": ("floor: empty kernel", "#9e9e9e"),
    "handshake": ("floor: handshake of flags", "#616161"),
}

ROW = re.compile(r"^(VRAM|pinned host)/(\S+)\s+(\w+)\s+(\d+)((?:\s+[\d.]+){4})$", re.MULTILINE)

Table = dict[tuple[str, str, int], list[float]]


def table(text: str) -> Table:
    """Return the fused operation's figures by memory, protocol and rows, in the order of RANKS.

    Only the first table counts; those below it are of variants that were not kept.
    """
    found: Table = {}
    for memory, protocol, op, rows, figures in ROW.findall(text):
        if op == OP:
            key = (memory, protocol, int(rows))
            found.setdefault(key, [float(word) for word in figures.split()])
    return found


def floors(text: str) -> dict[str, list[float]]:
    """Return the floors, in the order of RANKS."""
    found = {}
    for name in FLOORS:
        match = re.search(rf"\b{name} ((?:\s*[\d.]+){{4}})", text)
        if match:
            found[name] = [float(word) for word in match[1].split()]
    return found


def draw(text: str, path: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.rcParams |= {"svg.hashsalt": "pcie_comm", "svg.fonttype": "none", "font.size": 10}
    from matplotlib.figure import Figure

    figures, bottom = table(text), floors(text)
    figure = Figure(figsize=(9.6, 4.4), layout="constrained", facecolor="white")
    for panel, memory in zip(figure.subplots(1, 2), MEMORIES, strict=True):
        _panel(panel, memory, figures, bottom if memory == "VRAM" else {})
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(f"{OP}, 1 row, ranks on one H200: µs per operation, lower is better")
    figure.savefig(path, metadata={"Date": None})


def _panel(panel: Any, memory: str, figures: Table, bottom: dict[str, list[float]]) -> None:
    for protocol, (label, colour, style) in LINES.items():
        values = figures[memory, protocol, 1]
        panel.plot(RANKS, values, style, color=colour, marker="o", markersize=4, label=label)
    for name, values in bottom.items():
        label, colour = FLOORS[name]
        panel.plot(RANKS, values, "--", color=colour, label=label)
    panel.set_title(f"slabs in {memory} memory" if memory != "VRAM" else "slabs in VRAM")
    panel.set_xscale("log", base=2)
    panel.set_xticks(RANKS, [str(count) for count in RANKS])
    panel.set_xlabel("ranks")
    panel.set_ylabel("µs")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--read", type=Path, default=EVIDENCE / "development_h200.txt")
    parser.add_argument("--out", type=Path, default=EVIDENCE / "performance_h200.svg")
    options = parser.parse_args(argv)
    draw(options.read.read_text(encoding="utf-8"), options.out)
    print(f"{options.out}: {options.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Rows of reports that nobody measured."""

from __future__ import annotations

from pcie_comm.bench.contenders import OURS
from pcie_comm.bench.options import FUSED, VRAM
from pcie_comm.bench.report import WARM, Row


def row(contender: str = OURS, us: float = 1.0, **facts: object) -> Row:
    """Return a row; its samples lie around `us` microseconds."""
    around = tuple(round(1000 * us * factor) for factor in (0.9, 1.0, 1.2))
    usual = {
        "op": FUSED,
        "ranks": 8,
        "rows": 1,
        "memory": VRAM,
        "protocol": "tagged",
        "cache": WARM,
        "received_nbytes": 1000,
        "sharers": 8,
        "samples_ns": around,
    }
    return Row(contender=contender, **{**usual, **facts})

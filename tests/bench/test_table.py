"""The table for people."""

from __future__ import annotations

import io

from made import row
from rich.console import Console

from pcie_comm.bench.contenders import EMPTY, NO_PROTOCOL, OURS, UNFUSED
from pcie_comm.bench.options import HEADS
from pcie_comm.bench.report import COLD, EVICTION
from pcie_comm.bench.table import tables


def shown(rows):
    text = io.StringIO()
    console = Console(file=text, width=160)
    found = tables(rows)
    for table in found:
        console.print(table)
    return len(found), text.getvalue()


def test_a_line_per_case_and_protocol_a_column_per_contender():
    count, text = shown(
        [
            row(OURS, 4.0),
            row(EMPTY, 1.0, protocol=NO_PROTOCOL),
            row(UNFUSED, 6.0),
            row(OURS, 5.0, protocol="push"),
        ]
    )
    assert count == 1
    assert "all_gather_pair_kimi_topk, warm caches: us per operation" in text
    (head,) = (line for line in text.splitlines() if "ranks" in line)
    assert [cell.strip() for cell in head.split("┃")[5:8]] == [OURS, UNFUSED, EMPTY]
    lines = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line[1:-1]] for line in lines]
    assert cells == [
        ["VRAM", "8", "1", "tagged", "4.00", "6.00 (1.50)", "1.00 (0.25)"],
        ["VRAM", "8", "1", "push", "5.00", "", "1.00 (0.20)"],
    ]


def test_operations_and_cache_states_have_tables_of_their_own():
    rows = [row(), row(op=HEADS), row(cache=COLD), row(EVICTION, cache=COLD, protocol="-")]
    count, text = shown(rows)
    assert count == 3
    assert "all_gather_heads, warm caches" in text
    assert "all_gather_pair_kimi_topk, cold caches" in text
    assert EVICTION not in text


def test_wrong_outputs_stand_out():
    _, text = shown([row(OURS, 4.0, faults_after=("rank 0: wrong",)), row(UNFUSED, 6.0)])
    assert "4.00 WRONG" in text
    assert text.count("WRONG") == 1

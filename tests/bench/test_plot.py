"""The picture: which points are in it; that it is written, where matplotlib is installed."""

from __future__ import annotations

import pytest
from made import row

from pcie_comm import InvalidArgumentError
from pcie_comm.bench.contenders import EMPTY, NO_PROTOCOL, OURS, UNFUSED
from pcie_comm.bench.options import FUSED, HEADS, PINNED, ROUTER, VRAM
from pcie_comm.bench.plot import draw, lines, pictured
from pcie_comm.bench.report import COLD, EVICTION

ROWS = [
    row(contender, us * ranks + rows, ranks=ranks, rows=rows, memory=memory, protocol=protocol)
    for memory in (VRAM, PINNED)
    for ranks in (8, 2)
    for rows in (8, 1)
    for contender, us, protocols in (
        (OURS, 2, ("push", "tagged")),
        (UNFUSED, 3, ("tagged",)),
        (EMPTY, 1, (NO_PROTOCOL,)),
    )
    for protocol in protocols
]


def test_a_line_has_a_point_for_each_value_of_its_axis():
    assert lines(ROWS, "ranks", VRAM, 1) == {
        OURS: [(2, 5.0), (8, 17.0)],
        UNFUSED: [(2, 7.0), (8, 25.0)],
        EMPTY: [(2, 3.0), (8, 9.0)],
    }
    assert lines(ROWS, "rows", PINNED, 2)[OURS] == [(1, 5.0), (8, 12.0)]


def test_a_point_is_that_of_the_fastest_protocol():
    slower = [row(OURS, 9.0, protocol="push"), row(OURS, 4.0), row(OURS, 6.0, protocol="pull")]
    assert lines(slower, "ranks", VRAM, 1) == {OURS: [(8, 4.0)]}


def test_the_picture_is_of_one_operation_the_fused_one_if_there_is_one():
    router = row(op=ROUTER)
    heads, fused = row(op=HEADS), row(op=FUSED)
    assert pictured([router, heads, fused]) == [fused]
    assert pictured([router, heads]) == [heads]
    assert pictured([router]) == [router]
    assert pictured([row(cache=COLD), row(EVICTION), fused]) == [fused]


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")


def test_it_is_written(matplotlib, tmp_path):
    path = tmp_path / "picture.png"
    draw(ROWS, path, "no device")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_name_of_no_format_is_refused(matplotlib, tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"picture\.nonsense cannot be written"):
        draw(ROWS, tmp_path / "picture.nonsense", "no device")

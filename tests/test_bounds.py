"""tools/bounds: how its samples become ratios."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

from bounds.compare import OFF, ON, OVERLAPPING, comparisons, line
from pcie_comm.bench.report import Row


def row(contender: str, samples_us: tuple[float, ...], faults: tuple[str, ...] = ()) -> Row:
    samples = tuple(round(1000 * sample) for sample in samples_us)
    sizes = (100, 2, samples)
    return Row("op", 2, 1, "VRAM", "tagged", contender, "warm", *sizes, faults_after=faults)


def test_each_side_is_compared_with_its_own_other():
    rows = [
        row(ON, (2.0, 2.2, 2.1)),
        row(OFF, (2.0, 2.0, 2.1)),
        row(ON + OVERLAPPING, (1.5, 1.5, 1.5)),
        row(OFF + OVERLAPPING, (1.0, 3.0, 2.0)),
    ]
    plain, overlapping = comparisons(rows)
    assert (plain["overlapping"], overlapping["overlapping"]) == (False, True)
    assert plain["on_us"] == {"median": 2.1, "min": 2.0, "max": 2.2}
    assert plain["ratio_of_medians"] == 1.05
    assert plain["ratio_per_sample"] == {"median": 1.0, "min": 1.0, "max": 1.1}
    assert overlapping["ratio_per_sample"] == {"median": 0.75, "min": 0.5, "max": 1.5}
    assert "ranks=2, overlapping: on 1.500 us (1.500 to 1.500)" in line(overlapping)


def test_a_wrong_output_on_either_side_shows():
    found = comparisons([row(ON, (1.0,)), row(OFF, (1.0,), faults=("rank 0: wrong",))])
    assert found[0]["correct"] is False
    assert "WRONG" in line(found[0])


def test_a_side_without_its_other_is_an_error():
    with pytest.raises(KeyError):
        comparisons([row(ON, (1.0,))])

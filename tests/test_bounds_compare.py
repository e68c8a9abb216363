"""tools/bounds, as far as it needs no GPU: which settings the sides have, and what is compared."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cutlass", reason="tools/bounds knows kernels")

from pcie_comm import CommError, Config

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from bounds import __main__ as program
from bounds import compare


def setting(subject: str, kernels: Path | None) -> compare.Setting:
    return compare.Setting(subject, 2, ("all_gather_pair",), 1, "tagged", 3, 4, kernels)


def test_sides_differ_in_the_subject_alone():
    config, folder = Config(), Path("some/kernels")
    bounds = compare._sides(setting("bounds", folder), config)
    assert [one.kernels_dir for one in bounds.values()] == [None, folder]
    stats = compare._sides(setting("stats", folder), config)
    assert {one.kernels_dir for one in stats.values()} == {folder}
    assert {side: one.stats for side, one in stats.items()} == {" on": True, " off": False}


def world_with(*kernels: str) -> SimpleNamespace:
    sources = dict.fromkeys(kernels, "compiled")
    return SimpleNamespace(groups=[SimpleNamespace(describe=lambda: {"kernels": sources})])


def test_kernels_of_the_wrong_side_are_refused():
    right = {"stats on": world_with("a-stats"), "stats off": world_with("a")}
    compare._check_kernels(setting("stats", None), right)
    for name, kernels in (("stats on", ["a"]), ("stats off, overlapping", ["a", "a-stats"])):
        with pytest.raises(CommError, match=name):
            compare._check_kernels(setting("stats", None), {name: world_with(*kernels)})


def row(contender: str, *samples: int) -> SimpleNamespace:
    middle = sorted(samples)[len(samples) // 2] / 1000
    facts = {"case": "c", "op": "op", "ranks": 2, "rows": 1, "memory": "vram", "protocol": "tagged"}
    times = {"samples_ns": list(samples), "median_us": middle, "correct": True}
    return SimpleNamespace(contender=contender, **facts, **times)


@pytest.mark.parametrize("subject", ["bounds", "stats"])
def test_each_side_is_compared_with_its_own_other(subject):
    rows = [
        row(f"{subject} on", 3030, 3060, 3000),
        row(f"{subject} off", 3000, 3000, 3000),
        row(f"{subject} on, overlapping", 2000, 2000, 2000),
        row(f"{subject} off, overlapping", 1000, 1000, 1000),
    ]
    plain, overlapping = compare.comparisons(rows)
    assert plain["ratio_of_medians"] == 1.01
    assert plain["on_us"] == {"median": 3.03, "min": 3.0, "max": 3.06}
    assert overlapping["ratio_of_medians"] == 2.0
    assert "ratio 1.010, right" in compare.line(plain)


def test_options():
    options = program.parse(["stats"])
    assert (options.ranks, options.kernels) == ([2, 4, 8, 16], None)
    assert program.parse(["measure"]).ranks == [2, 16]

"""The report: which way ratios go, what JSON holds, and what its figures say of protocols."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import row

from pcie_comm import InvalidArgumentError
from pcie_comm.bench.contenders import EMPTY, HANDSHAKE, NO_PROTOCOL, OURS, PLAIN, UNFUSED
from pcie_comm.bench.options import HEADS, PINNED, SHARED, VRAM
from pcie_comm.bench.report import COLD, DIRECTION, EVICTION, Report, Row, crossovers, ratios
from pcie_comm.crossovers import REPORT_FORMAT, Limits
from pcie_comm.policy_file import load_crossovers


def made() -> Report:
    rows = [
        row(OURS, 4.0),
        row(UNFUSED, 6.0),
        row(PLAIN, 2.0),
        row(EMPTY, 1.0, protocol=NO_PROTOCOL),
        row(OURS, 5.0, protocol="push", faults_after=("rank 0: wrong",)),
        row(OURS, 8.0, cache=COLD),
        row(EVICTION, 90.0, cache=COLD, protocol=NO_PROTOCOL),
    ]
    report = Report({"device": "none", "command": "x"}, {"unit": "one operation"}, rows)
    report.leave_out("floors", "everywhere", "no compiler")
    return report


# --- ratios --------------------------------------------------------------------------------------


def test_a_contender_that_takes_longer_has_a_ratio_above_one():
    found = {(one["of"], one["protocol"]): one["ratio"] for one in ratios(made().rows)}
    assert found == {
        (UNFUSED, "tagged"): 1.5,
        (PLAIN, "tagged"): 0.5,
        (EMPTY, "tagged"): 0.25,
        (EMPTY, "push"): 0.2,
    }
    assert "median time of `of` / median time of `to`; above 1, `to` is faster" in DIRECTION


def test_only_rows_of_one_case_are_compared():
    others = [
        row(UNFUSED, 9.0, rows=8),
        row(UNFUSED, 9.0, ranks=4),
        row(UNFUSED, 9.0, memory=PINNED),
        row(UNFUSED, 9.0, op=HEADS),
        row(UNFUSED, 9.0, cache=COLD),
        row(UNFUSED, 9.0, protocol="push"),
    ]
    assert list(ratios([row(OURS, 4.0), *others])) == []


def test_a_ratio_names_its_case():
    (one,) = ratios([row(OURS, 4.0), row(HANDSHAKE, 2.0, protocol=NO_PROTOCOL)])
    assert one == {
        "op": "all_gather_pair_kimi_topk",
        "ranks": 8,
        "rows": 1,
        "memory": VRAM,
        "cache": "warm",
        "protocol": "tagged",
        "of": HANDSHAKE,
        "to": OURS,
        "ratio": 0.5,
        "floor": True,
    }


@given(st.floats(0.5, 500.0), st.floats(0.5, 500.0))
def test_the_direction_holds_for_any_times(ours, other):
    (one,) = ratios([row(OURS, ours), row(UNFUSED, other)])
    assert one["ratio"] == pytest.approx(other / ours, rel=0.01, abs=0.001)


# --- JSON ----------------------------------------------------------------------------------------


def test_json_holds_all_of_a_run(tmp_path):
    path = tmp_path / "report.json"
    made().write(path)
    found = json.loads(path.read_text())
    assert set(found) == {
        "format",
        "complete",
        "correct",
        "provenance",
        "method",
        "crossovers",
        "left_out",
        "ratio_direction",
        "ratios",
        "rows",
    }
    assert found["format"] == REPORT_FORMAT
    assert found["correct"] is False
    assert found["ratio_direction"] == DIRECTION
    assert found["left_out"] == [{"what": "floors", "where": "everywhere", "why": "no compiler"}]
    assert len(found["rows"]) == 7
    assert found["rows"][0] == {
        "op": "all_gather_pair_kimi_topk",
        "ranks": 8,
        "rows": 1,
        "memory": VRAM,
        "protocol": "tagged",
        "contender": OURS,
        "cache": "warm",
        "received_nbytes": 1000,
        "sharers": 8,
        "samples_ns": [3600, 4000, 4800],
        "faults_before": [],
        "faults_after": [],
        "median_us": 4.0,
        "min_us": 3.6,
        "max_us": 4.8,
        "gigabytes_per_s": 0.219,
        "correct": True,
    }
    assert found["rows"][4]["correct"] is False


def test_a_row_is_a_line(tmp_path):
    path = tmp_path / "report.json"
    made().write(path)
    assert sum('"samples_ns"' in line for line in path.read_text().splitlines()) == 7


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "report.json"
    report = made()
    report.write(path)
    assert Report.read(path) == report
    assert all(isinstance(one, Row) for one in Report.read(path).rows)


def test_an_empty_report_is_json(tmp_path):
    path = tmp_path / "report.json"
    Report().write(path)
    assert Report.read(path) == Report()


def test_writing_replaces_and_leaves_no_scraps(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    made().write(path)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        made().write(tmp_path / "missing" / "report.json")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "other"}', f'{{"format": "{REPORT_FORMAT}"}}']
)
def test_what_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"report\.json is no report"):
        Report.read(path)


def test_what_is_left_out_is_noted_once():
    report = made()
    report.leave_out("floors", "everywhere", "no compiler")
    assert len(report.left_out) == 1


# --- crossovers ----------------------------------------------------------------------------------


def sizes(memory, tagged_us, push_us, **facts):
    """Cases of growing size; both protocols of each."""
    for index, times in enumerate(zip(tagged_us, push_us, strict=True)):
        size = {"rows": 1 << index, "received_nbytes": 1000 << index, "memory": memory, **facts}
        for protocol, us in zip(("tagged", "push"), times, strict=True):
            yield row(OURS, us, protocol=protocol, **size)


def test_the_figures_speak_for_limits_by_memory():
    rows = [*sizes(VRAM, (1, 2, 3), (2, 3, 4)), *sizes(PINNED, (1, 2, 5), (2, 3, 4))]
    assert crossovers(rows) == {
        "vram": {"tagged_nbytes": 4000, "push_nbytes": None},
        "pinned": {"tagged_nbytes": 16_000, "push_nbytes": None},  # eight ranks share the link
    }


def test_only_warm_single_launches_count():
    rows = list(sizes(VRAM, (1, 2), (2, 3)))
    noise = [*sizes(VRAM, (9, 9), (1, 1), cache=COLD), *sizes(SHARED, (9, 9), (1, 1))]
    noise += [row(UNFUSED, 0.1, protocol="push"), row(EMPTY, 0.1, protocol=NO_PROTOCOL)]
    assert crossovers([*rows, *noise]) == crossovers(rows)
    assert crossovers(noise[2:]) == {}
    assert crossovers([]) == {}


def test_a_group_can_go_by_what_was_written(tmp_path):
    path = tmp_path / "host.json"
    Report(rows=[*sizes(PINNED, (1, 2, 5), (2, 3, 4))]).write(path)
    found = load_crossovers(path)
    assert found.pinned == Limits(16_000, patience_nbytes=65_536, wave_nbytes=262_144)
    assert found.limits("host_pinned", 8) == Limits(2000, patience_nbytes=8192, wave_nbytes=32_768)
    assert not math.isnan(found.vram.tagged_nbytes)


def test_a_report_of_wrong_outputs_is_no_policy(tmp_path):
    path = tmp_path / "host.json"
    rows = [*sizes(VRAM, (1, 2), (2, 3)), row(faults_before=("rank 0: wrong",))]
    Report(rows=rows).write(path)
    with pytest.raises(InvalidArgumentError, match="wrong outputs"):
        load_crossovers(path)

"""The ladder on a CPU: sizes, figures, table and picture; what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from pcie_comm import InvalidArgumentError
from pcie_comm.bench import ladder
from pcie_comm.bench.contenders import OURS
from pcie_comm.bench.options import LADDER_SIZES, Options, parse
from pcie_comm.bench.plot import draw_ladder, ladder_lines
from pcie_comm.bench.program import main
from pcie_comm.bench.report import COPY, Report

TINY = ["--ladder", "--device", "cpu", "--ranks", "2", "--sizes", "64,192,32K", "--samples", "3"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    path = tmp_path_factory.mktemp("ladder") / "ladder.json"
    assert main([*TINY, "--ops", "1", "--out", str(path)]) == 0
    return path


def test_every_size_has_ours_and_the_copy(out, capsys):
    report = json.loads(out.read_text())
    assert (report["complete"], report["correct"], report["crossovers"]) == (True, True, {})
    found = [(row["op"], row["received_nbytes"], row["contender"]) for row in report["rows"]]
    assert found == [
        (op, 2 * size, side)
        for op in ("all_gather", "all_reduce")
        for size in (64, 192, 32 << 10)
        for side in (OURS, COPY)
    ]
    for row in report["rows"]:
        rate = row["received_nbytes"] / 2 / row["median_us"] / 1e3
        assert row["gigabytes_per_s"] == pytest.approx(rate, rel=0.01, abs=0.001)
    assert main(["--read", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "bytes per rank" in shown
    assert "every output was right" in shown


def test_control_a_wrong_output_is_found(monkeypatch, capsys):
    def copying(work):
        side = honest(work)
        return type(side)(side.name, side.protocol, lambda rank: None, side.outputs)

    honest = ladder.copying
    monkeypatch.setattr(ladder, "copying", copying)
    assert main([*TINY, "--op", "all_gather", "--ops", "1"]) == 1
    assert "WRONG: copy, " in capsys.readouterr().out


def test_a_picture_has_a_line_for_each_side(out, tmp_path):
    rows = [row for row in Report.read(out).rows if row.op == "all_gather"]
    lines = ladder_lines(rows)
    assert list(lines) == ["ours, 2 ranks, shared memory", "copy, 2 ranks, shared memory"]
    assert [x for x, _ in lines["copy, 2 ranks, shared memory"]] == [64, 192, 32 << 10]
    pytest.importorskip("matplotlib", reason="draws")
    draw_ladder(rows, tmp_path / "ladder.png", "a caption")
    assert (tmp_path / "ladder.png").stat().st_size > 1000


def test_sums_are_those_of_the_stated_order():
    work = ladder.make("all_reduce", 256, [torch.device("cpu")] * 3)
    total = work.inputs[0][0].float() + work.inputs[1][0].float() + work.inputs[2][0].float()
    assert torch.equal(work.expected[0], total.to(torch.bfloat16))


def test_sizes_have_units_and_limits():
    assert parse(["--ladder", "--sizes", "128,64K,1m"]).sizes == (128, 64 << 10, 1 << 20)
    assert ladder.settle(Options(ladder=True)).operations == ("all_gather", "all_reduce")
    assert (LADDER_SIZES[0], LADDER_SIZES[-1]) == (1 << 10, 256 << 20)
    for arguments in (
        ["--sizes", "64"],
        ["--ladder", "--sizes", "66"],
        ["--ladder", "--sizes", "0"],
        ["--ladder", "--sizes", "5000M"],
        ["--ladder", "--op", "kimi_topk16"],
    ):
        with pytest.raises(InvalidArgumentError):
            parse(arguments)

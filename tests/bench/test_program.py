"""The program on a CPU: figures, files, and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pcie_comm import cli
from pcie_comm.bench import contenders, torch_group, worlds
from pcie_comm.bench.options import FUSED, PAIR, ROUTER
from pcie_comm.bench.program import main
from pcie_comm.errors import UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--device", "cpu", "--ranks", "2", "--rows", "1", "--samples", "3", "--ops", "1"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "report.json"


def tiny(out, *arguments):
    return main([*TINY, "--out", str(out), *arguments])


def test_a_run_measures_checks_and_says_what_it_left_out(out, capsys):
    assert tiny(out) == 0
    shown = capsys.readouterr().out
    assert "[4/4]" in shown
    assert "every output was right" in shown
    assert "floors and cold samples (everywhere): no GPU takes part" in shown
    report = json.loads(out.read_text())
    assert report["correct"] is True
    assert report["complete"] is True
    assert report["crossovers"] == {}
    assert report["provenance"]["command"].startswith("pcie-comm bench --device cpu --ranks 2")
    assert report["method"]["options"]["ranks"] == [2]
    fused = [row for row in report["rows"] if row["op"] == FUSED]
    assert [(row["contender"], row["protocol"]) for row in fused] == [
        ("ours", "push"),
        ("ours, unfused", "push"),
        ("gather + torch", "push"),
        ("ours", "pull"),
        ("ours, unfused", "pull"),
        ("gather + torch", "pull"),
        ("torch.distributed", "-"),
    ]
    for row in report["rows"]:
        assert len(row["samples_ns"]) == 3
        assert 0 < row["min_us"] <= row["median_us"] <= row["max_us"]
        assert row["memory"] == "shared memory"


def test_alone_measures_nothing_beside_ours(out):
    assert tiny(out, "--alone", "--op", FUSED) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["contender"], row["protocol"]) for row in rows] == [
        ("ours", "push"),
        ("ours", "pull"),
    ]


def test_wrong_outputs_make_exit_code_1_and_no_policy(out, capsys, monkeypatch):
    def careless(logits, bias, result):
        result[0].fill_(0.5)
        result[1].fill_(7)

    monkeypatch.setattr(contenders, "torch_router", careless)
    assert tiny(out, "--op", ROUTER) == 1
    shown = capsys.readouterr().out
    assert "OUTPUTS WERE WRONG" in shown
    assert "WRONG: torch," in shown
    report = json.loads(out.read_text())
    assert report["correct"] is False
    verdicts = {row["contender"]: row["correct"] for row in report["rows"]}
    assert verdicts == {"ours": True, "torch": False}
    assert main(["--read", str(out)]) == 1


def test_an_earlier_report_is_shown_again(out, capsys):
    assert tiny(out, "--op", PAIR) == 0
    first = capsys.readouterr().out
    assert main(["--read", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == first.splitlines()[1:]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ranks", "17"],
        ["--op", "gossip"],
        ["--out", "/nowhere/report.json"],
        ["--device", "tpu"],
        ["--device", "cpu", "--cold"],
        ["--device", "cpu", "--memory", "vram"],
        ["--nonsense"],
        ["--read", "/nowhere/report.json"],
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(arguments, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("pcie-comm: InvalidArgumentError: ")


def test_ranks_that_an_operation_does_not_serve_are_left_out(out, capsys):
    assert tiny(out, "--ranks", "3", "--op", FUSED, "--op", PAIR) == 0
    assert "left out: all_gather_pair_kimi_topk (ranks=3): 896 experts" in capsys.readouterr().out
    assert {row["op"] for row in json.loads(out.read_text())["rows"]} == {PAIR}


def test_nothing_left_to_measure_is_an_error(out, capsys):
    assert tiny(out, "--ranks", "3", "--op", FUSED) == 2
    assert "nothing could be measured: ranks=3: 896 experts" in capsys.readouterr().err


def test_worlds_that_cannot_be_built_are_left_out(out, capsys, monkeypatch):
    build = worlds.local_world

    def refuse(ranks, *rest):
        if ranks == 3:
            raise UnsupportedError("no room", reason="no room")
        return build(ranks, *rest)

    monkeypatch.setattr(worlds, "local_world", refuse)
    assert tiny(out, "--ranks", "2,3", "--op", PAIR) == 0
    shown = capsys.readouterr().out
    assert "left out: all (ranks=3, shared memory): no room" in shown
    assert "[2/2]" in shown


def test_torch_without_a_backend_is_left_out(out, capsys, monkeypatch):
    monkeypatch.setattr(torch_group.dist, "is_gloo_available", lambda: False)
    assert tiny(out, "--op", PAIR) == 0
    assert "left out: torch.distributed (ranks=2): " in capsys.readouterr().out


def test_pcie_comm_bench_is_the_same_program(out):
    result = CliRunner().invoke(cli.app, ["bench", *TINY, "--op", PAIR, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "every output was right" in result.output
    assert CliRunner().invoke(cli.app, ["bench", "--ranks", "17"]).exit_code == 2


def test_it_runs_without_typer(out):
    blocked = "import sys; sys.modules['typer'] = None\n"
    code = f"{blocked}from pcie_comm.bench.program import main\nsys.exit(main({[*TINY]!r} + "
    code += f"['--op', 'kimi_topk16', '--out', {str(out)!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    module = [sys.executable, "-m", "pcie_comm.bench", "--ranks", "17"]
    done = subprocess.run(module, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")


def test_without_a_gpu_the_ranks_are_on_the_cpu(out, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # which the bench would set for good
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*TINY[2:], "--op", ROUTER, "--out", str(out)]) == 0
    assert json.loads(out.read_text())["provenance"]["device"] == "cpu"


def test_a_run_that_is_cut_short_keeps_what_it_has(out, capsys, monkeypatch):
    build = worlds.local_world

    def interrupted(ranks, *rest):
        if ranks == 3:
            raise KeyboardInterrupt
        return build(ranks, *rest)

    monkeypatch.setattr(worlds, "local_world", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny(out, "--ranks", "2,3", "--op", PAIR)
    capsys.readouterr()
    assert main(["--read", str(out)]) == 0
    assert "3 rows, every output was right; the run did not come to its end" in (
        capsys.readouterr().out
    )

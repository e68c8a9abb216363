"""The command line: the demo judges rightly, errors are one line, --help is quick."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from router_oracle import route, sigmoid
from typer.testing import CliRunner, Result

import pcie_comm
from pcie_comm import cli
from pcie_comm.demo import calls
from pcie_comm.group import PcieDcpGroup

ROOT = Path(__file__).resolve().parent.parent


def invoke(*arguments: str) -> Result:
    """Run the program in this process."""
    return CliRunner().invoke(cli.app, list(arguments))


def demo(*arguments: str) -> Result:
    return invoke("demo", "--device", "cpu", "--rounds", "3", *arguments)


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    env = os.environ | environ
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=100)


def one_line_error(result: Result, kind: str) -> str:
    """Return the error that a run ended with, after checking its form."""
    assert result.exit_code == 2, result.output
    lines = result.output.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"pcie-comm: {kind}: ")
    return lines[0]


def in_every_child(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Let every Python that this process starts run `code` first."""
    (folder / "sitecustomize.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")


def orphaned_slabs() -> set[str]:
    """Return the files in shared memory that a process left behind, ours or anybody's."""
    names = {path.name for path in Path("/dev/shm").glob("pcie_comm.*")}
    return {name for name in names if not Path("/proc", name.split(".")[1]).exists()}


# --- the program -------------------------------------------------------------------------------


def test_version_is_that_of_the_package():
    assert invoke("--version").output.strip() == f"pcie-comm {pcie_comm.__version__}"


def test_python_m_is_the_same_program():
    done = python("-m", "pcie_comm", "--version")
    assert (done.returncode, done.stdout) == (0, f"pcie-comm {pcie_comm.__version__}\n")
    assert python("-m", "pcie_comm", "nonsense").returncode == 2


@pytest.mark.parametrize(
    "arguments", [["--help"], *([name, "--help"] for name in ("demo", "compile", "bench"))]
)
def test_help_needs_neither_torch_nor_the_rest_of_the_package(arguments):
    # The package's own __init__ is left out: this is about what cli.py imports.
    code = f"""
        import sys, types
        package = types.ModuleType("pcie_comm")
        package.__path__ = [{str(ROOT / "pcie_comm")!r}]
        sys.modules["pcie_comm"] = package
        sys.argv = ["pcie-comm", *{arguments!r}]
        from pcie_comm import cli
        try:
            cli.main()
        finally:
            print(sorted({{"torch", "numpy", "cutlass", "cuda"}} & set(sys.modules)))
    """
    started = time.monotonic()
    done = python("-c", textwrap.dedent(code))
    assert time.monotonic() - started < 10  # takes 0.2 s
    assert done.returncode == 0, done.stderr
    assert "usage: pcie-comm" in done.stdout.lower()
    assert done.stdout.splitlines()[-1] == "[]"


# --- the demo is right -------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_threads_run_the_fused_operation(ranks):
    result = demo("--ranks", str(ranks))
    assert result.exit_code == 0, result.output
    assert result.output.count("right") == ranks + 1
    summary = result.output.strip().splitlines()[-1]
    assert summary.startswith("right: bytes, ids and weights (all_gather_pair_kimi_topk;")
    assert f"ranks={ranks}, rows=8, rounds=3" in summary
    assert "host_shm" in result.output


def test_ranks_that_do_not_divide_the_experts_run_the_gathers_and_say_so():
    result = demo("--ranks", "3")
    assert result.exit_code == 0, result.output
    assert "896 experts do not divide by 3 ranks" in result.output
    assert "right: every byte (all_gather_pair and all_gather_heads;" in result.output


def test_more_rounds_than_a_batch_and_no_rows():
    assert demo("--ranks", "2", "--rounds", "70", "--rows", "1").exit_code == 0
    assert demo("--ranks", "2", "--rows", "0").exit_code == 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_agree_and_leave_nothing_behind(ranks):
    before = orphaned_slabs()
    result = demo("--ranks", str(ranks), "--processes")
    assert result.exit_code == 0, result.output
    assert "one process per rank" in result.output
    assert orphaned_slabs() <= before


def test_rows_have_ties_and_an_invalid_expert():
    call = calls.FusedCall(0, 1, 64, torch.device("cpu"), seed=1)
    logits = call.logits.numpy()
    assert np.isnan(logits).sum(1).tolist() == [1] * 64
    choice = np.sort(route(logits, call.bias.numpy()).choice, axis=1)[:, -calls.TOP_K :]
    assert (choice[:, 1:] == choice[:, :-1]).any(1).sum() > 16


def test_statement_of_the_contract_agrees_with_the_oracle():
    rng = np.random.default_rng(7)
    logits = (rng.normal(size=(200, 896)) * 4).round(1).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = np.nan
    logits[:20, 10:] = -np.inf  # fewer valid experts than are selected
    bias = (rng.normal(size=896) * 0.1).round(2).astype(np.float32)
    wanted = route(logits, bias)
    for row in range(len(logits)):
        ids = calls.expected_ids(logits[row], sigmoid(logits[row]), bias)
        assert ids.tolist() == wanted.ids[row].tolist()
        weights = calls.expected_weights(logits[row], ids)
        np.testing.assert_allclose(weights, wanted.weights[row], rtol=1e-6, atol=0)


# --- the demo finds what is wrong --------------------------------------------------------------


def flip_a_byte(outputs: tuple[torch.Tensor, ...]) -> None:
    outputs[0].view(torch.uint8)[-1, -1] ^= 1


def swap_two_ids(outputs: tuple[torch.Tensor, ...]) -> None:
    outputs[2][0, :2] = outputs[2][0, :2].flip(0)


def spoil_a_weight(outputs: tuple[torch.Tensor, ...]) -> None:
    outputs[1][0, 0] *= 1.00001


def nudge_a_weight(outputs: tuple[torch.Tensor, ...]) -> None:
    outputs[1].view(torch.int32)[0, 0] += 1  # one ulp: right, but not what the others have


def do_nothing_at_all(outputs: tuple[torch.Tensor, ...]) -> None:
    for output in outputs:
        output.view(torch.uint8).fill_(calls.POISON)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (flip_a_byte, "down: 1 of 57344 bytes differ, first in row 7"),
        (swap_two_ids, "ids of row 0 are"),
        (spoil_a_weight, "weights of row 0 are"),
        (nudge_a_weight, "the weights are not byte-equal to those of rank 0"),
        (do_nothing_at_all, "bytes differ, first in row 0"),
    ],
)
def test_planted_difference_is_found(monkeypatch, spoil, message):
    original = PcieDcpGroup.all_gather_pair_kimi_topk

    def wrong_on_rank_1(self, *tensors, out):
        original(self, *tensors, out=out)
        if self.rank == 1:
            spoil(out)

    monkeypatch.setattr(PcieDcpGroup, "all_gather_pair_kimi_topk", wrong_on_rank_1)
    result = demo("--ranks", "2", "--rounds", "1")
    assert result.exit_code == 1, result.output
    assert message in result.output
    assert result.output.strip().splitlines()[-1].startswith("DIFFERENT: ")
    rows = [line for line in result.output.splitlines() if "host_shm" in line]
    assert ["DIFFERENCES" in row for row in rows] == [False, True]
    assert "rank 1: " in result.output
    assert "rank 0: " not in result.output


def test_planted_difference_of_a_gather_is_found(monkeypatch):
    original = PcieDcpGroup.all_gather_heads

    def wrong(self, heads, out):
        original(self, heads, out=out)
        out[2, 5, 100] = 1.0

    monkeypatch.setattr(PcieDcpGroup, "all_gather_heads", wrong)
    result = demo("--ranks", "3")
    assert result.exit_code == 1, result.output
    assert "all_gather_heads: heads: " in result.output


def test_planted_difference_in_a_process_is_found(monkeypatch, tmp_path):
    code = """
        import sys
        if "--multiprocessing-fork" in sys.orig_argv:
            from pcie_comm.group import PcieDcpGroup
            original = PcieDcpGroup.all_gather_pair_kimi_topk
            def wrong(self, *tensors, out):
                original(self, *tensors, out=out)
                out[2][3, 15] += self.rank
            PcieDcpGroup.all_gather_pair_kimi_topk = wrong
    """
    in_every_child(monkeypatch, tmp_path, code)
    result = demo("--ranks", "2", "--processes")
    assert result.exit_code == 1, result.output
    assert "rank 1: all_gather_pair_kimi_topk: ids of row 3 are" in result.output


# --- what goes wrong is one line ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "fact"),
    [
        (["--ranks", "0"], "InvalidArgumentError", "ranks=0 is out of range; give 1 to 16"),
        (["--ranks", "17"], "InvalidArgumentError", "ranks=17 is out of range; give 1 to 16"),
        (["--transport", "pigeon"], "InvalidArgumentError", "transport='pigeon' is unknown"),
        (["--transport", "cuda_local"], "UnsupportedError", "does not serve device=cpu"),
        (["--device", "abacus"], "InvalidArgumentError", "device='abacus' is no torch device"),
        (["--device", "meta"], "InvalidArgumentError", "neither a CPU nor a CUDA device"),
    ],
)
def test_errors_of_the_library_are_one_line(arguments, kind, fact):
    assert fact in one_line_error(demo("--ranks", "2", *arguments), kind)


def test_a_bad_world_size_starts_no_process():
    started = time.monotonic()
    one_line_error(demo("--ranks", "17", "--processes"), "InvalidArgumentError")
    assert time.monotonic() - started < 2


def test_bad_environment_is_one_line(monkeypatch):
    monkeypatch.setenv("PCIE_COMM_PROTOCOL", "gossip")
    assert "protocol='gossip'" in one_line_error(demo(), "InvalidArgumentError")


def test_error_of_a_rank_process_is_reported_with_its_rank():
    line = one_line_error(
        demo("--ranks", "2", "--processes", "--transport", "pigeon"), "PeerAbortedError"
    )
    assert "rank 0 failed: InvalidArgumentError: transport='pigeon' is unknown" in line


def test_rank_process_that_dies_is_reported(monkeypatch, tmp_path):
    code = "import os, sys\nif '--multiprocessing-fork' in sys.orig_argv: os._exit(7)"
    in_every_child(monkeypatch, tmp_path, code)
    line = one_line_error(demo("--ranks", "2", "--processes"), "PeerDiedError")
    assert "rank 0 ended without a report (exitcode=7)" in line


def test_rank_process_that_hangs_is_ended(monkeypatch, tmp_path):
    code = """
        import os, sys, time
        if "--multiprocessing-fork" in sys.orig_argv:
            open(f"{os.path.dirname(__file__)}/{os.getpid()}.pid", "x").close()
            time.sleep(600)
    """
    in_every_child(monkeypatch, tmp_path, code)
    line = one_line_error(
        demo("--ranks", "2", "--processes", "--deadline", "1.5"), "PeerTimeoutError"
    )
    assert "ranks 0, 1 did not finish within deadline_s=1.5" in line
    pids = [path.stem for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_a_bug_is_no_one_line_error(monkeypatch):
    def broken(self, *tensors, out):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(PcieDcpGroup, "all_gather_pair_kimi_topk", broken)
    result = demo("--ranks", "2")
    assert isinstance(result.exception, ZeroDivisionError)


# --- progress ----------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, terminal):
    from pcie_comm.build import Built, Job
    from pcie_comm.kernels.collective import KernelKey

    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100)
    monkeypatch.setattr("pcie_comm.console.console", lambda: console)
    built = Built(Job(KernelKey("gather", ("push", 16)), "sm_90a"), 1234, 768, 32, 0.5)
    with cli.progress(2) as advance:
        advance(built)
        advance(built)
    shown = text.getvalue()
    assert "2/2" in shown
    assert ("gather-push-16 sm_90a 1234 bytes, 768 of SASS, 0.50 s" in shown) == (not terminal)
    assert ("\x1b[" in shown) == terminal

"""tools/faults.py: a short run, and what its judge must not let pass."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))

import fault_judge  # noqa: E402
from fault_judge import Outcome, judge, limit_of, summary, table  # noqa: E402
from fault_rank import Report, Round  # noqa: E402

CLEAN = {"mappings": 0, "kept": 0, "watches": 0, "threads": 0, "descriptors": 9}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_twenty_random_faults(seed, tmp_path):
    """The long run, and the times it took, are in docs/failure.md."""
    out = tmp_path / "faults.json"
    command = [sys.executable, "tools/faults.py", "--count", "10", "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--setup-timeout", "3", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    told = json.loads(out.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (told["good"], told["hung"], told["files_left"]) == (10, 0, [])
    assert "| kill |" in done.stdout


@pytest.fixture
def plan(tmp_path) -> Round:
    clock = tmp_path / "clock"
    clock.write_text("1000000000\n")
    return Round(
        number=0,
        kind="kill",
        stage="call",
        members=(3, 1, 2),
        victims=(1,),
        survivors=(3, 2),
        timeout_s=1.0,
        setup_timeout_s=5.0,
        device="cpu",
        transport="auto",
        exit_code=3,
        clock=str(clock),
    )


def good(rank: int = 3) -> Report:
    """Return what a survivor of `plan` must report: 50 ms after the fault."""
    return Report(rank, "PeerDiedError", 1, -9, "", 1_050_000_000, left=dict(CLEAN))


def judged(plan: Round, *reports: Report, hung: tuple[int, ...] = ()) -> Outcome:
    outcome = Outcome(plan, list(reports), hung=list(hung))
    judge(outcome)
    return outcome


def test_a_round_that_went_as_it_must(plan):
    outcome = judged(plan, good(3), good(2))
    assert (outcome.faults, outcome.late, outcome.delays_s) == ([], 0, [0.05, 0.05])


WRONG = {
    "wrong class": ({"error": "PeerTimeoutError"}, "wanted PeerDiedError about [1]"),
    "no error": ({"error": ""}, "reports nothing"),
    "wrong rank": ({"peer": 2}, "about 2, wanted"),
    "wrong exit": ({"exit_code": 1}, "exit_code=1"),
    "next group": ({"next_group": "it hung"}, "next group: it hung"),
    "mapping": ({"left": {**CLEAN, "mappings": 2}}, "leaves 2 mappings"),
    "memory": ({"left": {**CLEAN, "kept": 1}}, "leaves 1 kept"),
    "thread": ({"left": {**CLEAN, "threads": 1}}, "leaves 1 threads"),
    "context": ({"lost": "CUDA error: unspecified"}, "lost its context: CUDA error: unspecified"),
}


@pytest.mark.parametrize(("change", "text"), WRONG.values(), ids=WRONG)
def test_a_deviation_is_noticed(plan, change, text):
    outcome = judged(plan, good(3), dataclasses.replace(good(2), **change))
    assert len(outcome.faults) == 1
    assert text in outcome.faults[0]


def test_who_hangs_is_noticed(plan):
    assert judged(plan, good(3), hung=(2,)).faults == ["rank 2 hung"]


def test_a_fault_that_did_not_happen_is_noticed(plan):
    Path(plan.clock).write_text("")
    assert judged(plan, good(3)).faults == ["faults that happened: 0 of 1"]


def test_an_error_that_comes_late_is_counted(plan):
    late = dataclasses.replace(good(), at_ns=1_150_000_000)
    assert judged(plan, late).late == 1
    stopped = dataclasses.replace(plan, kind="stop")
    assert limit_of(stopped) == 1.5
    assert limit_of(dataclasses.replace(plan, stage="setup", step=1)) == 5.5
    closing = dataclasses.replace(plan, stage="close", device="cuda", transport="cuda_ipc")
    assert limit_of(closing) == 5.5
    assert limit_of(dataclasses.replace(closing, transport="host_pinned")) == 0.1


KEPT = {"left": {**CLEAN, "kept": 1, "mappings": 1}}


@pytest.mark.parametrize(
    ("change", "ends_known", "faults"),
    [
        ({"kind": "stop"}, True, 0),
        ({"kind": "stop", "transport": "host_pinned"}, True, 2),
        ({"kind": "kill"}, True, 2),
        ({"kind": "kill"}, False, 0),
        ({"kind": "abort"}, False, 2),
        ({"kind": "abort", "stage": "replay"}, True, 0),
    ],
    ids=str,
)
def test_what_device_memory_may_be_kept(plan, change, ends_known, faults, monkeypatch):
    """A peer may address it that is stopped, or of which nobody knows whether it is gone."""
    monkeypatch.setattr(fault_judge, "ends_are_known", lambda: ends_known)
    error = fault_judge.ERRORS[change["kind"]]
    code = -9 if change["kind"] == "kill" else None
    report = dataclasses.replace(good(), error=error, exit_code=code, **KEPT)
    on_gpu = dataclasses.replace(plan, **{"device": "cuda", "transport": "cuda_ipc", **change})
    assert len(judged(on_gpu, report).faults) == faults


def test_memory_that_an_earlier_round_left_may_go(plan):
    assert judged(plan, dataclasses.replace(good(), left={**CLEAN, "kept": -1})).faults == []


def test_an_exit_code_that_no_kernel_tells_is_no_fault(plan, monkeypatch):
    silent = dataclasses.replace(good(), exit_code=None)
    assert judged(plan, silent).faults == ["rank 3 reports exit_code=None"]
    monkeypatch.setattr(fault_judge, "ends_are_known", lambda: False)
    assert judged(plan, silent).faults == []


def test_the_table_and_the_summary_count_everything(plan):
    late = dataclasses.replace(good(2), at_ns=1_150_000_000)
    outcomes = [judged(plan, good(3), late), judged(plan, good(3), hung=(2,))]
    assert "| kill | call | 2 | 1 | 1 | 1 | 50.0 | 150.0 |" in table(outcomes)
    facts = summary(outcomes)
    assert (facts["rounds"], facts["good"], facts["hung"], facts["late"]) == (2, 1, 1, 1)
    assert facts["kill_to_error_ms"] == {"count": 3, "median": 50.0, "max": 150.0}

"""The protocol's models hold, and each fault that is planted in them is found.

Skipped, visibly, where SPIN or a C compiler is missing. `make model` runs larger sizes.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pcie_comm import layout

MODEL = Path(__file__).resolve().parents[1] / "tools" / "model"

spec = importlib.util.spec_from_file_location("model_check", MODEL / "check.py")
check = sys.modules["model_check"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)

needs_spin = pytest.mark.skipif(bool(check.missing_tools()), reason=check.missing_tools() or "-")

HOLDS = "State-vector 8 byte, depth reached 5, errors: 0\n   12 states, stored\n"
FAILS = "pan:1: assertion violated (value==n) (at depth 4)\n" + HOLDS.replace("s: 0", "s: 1")


def bad_ends(cases):
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(check.run, cases))
    assert len(results) >= 4
    return [check.line(result) for result in results if not result.good]


@needs_spin
@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", ["pull", "push", "tagged"])
def test_the_models_hold(protocol):
    assert bad_ends([c for c in check.models(small=True) if c.protocol == protocol]) == []


@needs_spin
@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", ["pull", "push", "tagged"])
def test_every_planted_fault_is_found(protocol):
    assert bad_ends([c for c in check.controls() if c.protocol == protocol]) == []


@needs_spin
def test_a_broken_model_and_a_harmless_control_are_bad():
    broken = check.run(check.Case("push", 2, 4, ("FAULTY", "NO_RELEASE")))
    assert (broken.good, broken.verdict) == (False, "VIOLATED: wrong value")
    harmless = check.run(check.Case("push", 2, 2, ("FIRST=1",), "none"))
    assert (harmless.good, harmless.verdict) == (False, "NOT FOUND")


@needs_spin
def test_a_store_that_overtakes_its_predecessor_is_noticed():
    result = check.run(check.Case("tagged", 2, 4, ("SLOTS=1",)))
    assert result.verdict == "VIOLATED: store overtakes store"


@pytest.mark.parametrize(
    ("output", "control", "good", "verdict"),
    [
        (HOLDS, "", True, "holds"),
        (HOLDS, "fault", False, "NOT FOUND"),
        (FAILS, "", False, "VIOLATED: wrong value"),
        (FAILS, "fault", True, "found: wrong value"),
        ("error: max search depth too small\n" + HOLDS, "", False, "INCOMPLETE: a bound"),
        ("Warning: Search not completed\n" + HOLDS, "fault", False, "INCOMPLETE: a bound"),
        ("pan: out of memory\n", "fault", False, "INCOMPLETE: pan: out of memory"),
        ("", "", False, "INCOMPLETE: no output"),
    ],
)
def test_what_counts_as_good(output, control, good, verdict):
    result = check.judge(check.Case("push", 2, 4, (), control), output, 0.0)
    assert result.good is good
    assert result.verdict.startswith(verdict)


def test_the_exit_status_follows_the_results(monkeypatch, capsys):
    monkeypatch.setattr(check, "missing_tools", lambda: "")
    monkeypatch.setattr(check, "run", lambda case: check.judge(case, HOLDS, 0.0))
    assert check.main(["--small"]) == 1
    assert "NOT FOUND" in capsys.readouterr().out
    monkeypatch.setattr(
        check, "run", lambda case: check.judge(case, FAILS if case.control else HOLDS, 0.0)
    )
    assert check.main(["--small"]) == 0


def test_missing_tools_are_named(tmp_path):
    done = subprocess.run(
        [sys.executable, str(MODEL / "check.py"), "--small"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == check.MISSING
    assert "apt-get install -y spin gcc" in done.stderr


def test_the_model_has_the_slots_and_the_wrap_of_the_layout():
    text = (MODEL / "channel.pml").read_text()
    facts = dict(re.findall(r"#define (SLOTS|WRAP_TO|MOD) (\d+)", text))
    assert int(facts["SLOTS"]) == layout.NUM_SLOTS
    assert int(facts["WRAP_TO"]) == layout.next_epoch(layout.EPOCH_MASK)
    assert int(facts["MOD"]) % layout.NUM_SLOTS == (layout.EPOCH_MASK + 1) % layout.NUM_SLOTS

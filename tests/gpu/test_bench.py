"""The benchmark on a GPU, in small: every contender is there and right; wrong ones are caught."""

from __future__ import annotations

import harness
import pytest

from pcie_comm.bench import contenders
from pcie_comm.bench.contenders import (
    DISTRIBUTED,
    EMPTY,
    HANDSHAKE,
    OURS,
    OVERLAPPING,
    PLAIN,
    TORCH,
    UNFUSED,
)
from pcie_comm.bench.options import FUSED, PAIR, PINNED, ROUTER, VRAM, Options
from pcie_comm.bench.report import COLD, WARM
from pcie_comm.bench.runner import Bench

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


def run(**options):
    usual = {"rows": (1, 3), "ranks": (2, 4), "samples": 5, "ops": 8, "device": harness.DEVICE}
    return Bench(Options(**{**usual, **options}), "a test").run(lambda name, details: None)


def test_every_contender_runs_and_is_right(figures):
    report = run(operations=(FUSED, PAIR, ROUTER), memories=(VRAM, PINNED), cold=True)
    assert report.correct, [row.faults_after for row in report.rows if not row.correct][:3]
    found = {row.contender for row in report.rows}
    left_out = {entry.what: entry.why for entry in report.left_out}
    assert {OURS, UNFUSED, PLAIN, TORCH} <= found
    assert "a GPU for each rank" in left_out[DISTRIBUTED]
    assert ({EMPTY, HANDSHAKE} <= found) != ("floors" in left_out)
    caches = {row.cache for row in report.rows}
    assert (COLD in caches) != ("cold samples" in left_out)
    assert all(min(row.samples_ns) > 0 for row in report.rows if row.cache == WARM)
    medians = {
        f"{row.contender}, {row.cache}": round(row.median_us, 2)
        for row in report.rows
        if (row.op, row.ranks, row.rows, row.memory) == (FUSED, 4, 1, VRAM)
        and row.protocol in ("tagged", contenders.NO_PROTOCOL)
    }
    figures(medians_us=medians, left_out=left_out, clocks=report.provenance["clocks_before"])
    assert medians[f"{OURS}, {WARM}"] < medians[f"{PLAIN}, {WARM}"]
    if f"{OVERLAPPING}, {WARM}" in medians:
        assert medians[f"{OVERLAPPING}, {WARM}"] < 3 * medians[f"{OURS}, {WARM}"]
    assert set(report.as_json()["crossovers"]) == {"vram", "pinned"}
    assert report.provenance["kernels"]


def test_control_a_wrong_contender_is_caught(monkeypatch):
    def careless(logits, bias, out):
        out[0].fill_(0.5)
        out[1].fill_(7)

    monkeypatch.setattr(contenders, "torch_router", careless)
    report = run(operations=(FUSED,), ranks=(2,), rows=(1,), memories=(VRAM,), cold=False)
    wrong = {row.contender for row in report.rows if not row.correct}
    assert wrong == {PLAIN}

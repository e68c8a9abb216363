"""Each check gives each of its verdicts on a way that has the fault, and OK on one that has not."""

from __future__ import annotations

import pytest
from fake_gpu import HOST, FakeDriver

from pcie_comm.errors import CompileError, CudaError
from pcie_comm.probe import checks, plan, works
from pcie_comm.probe.plan import Scale
from pcie_comm.probe.task import Task, blank_check
from pcie_comm.topology.probed import Check

SMALL = Scale(16, 16, 16, 0.001, 1 << 16)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(checks, "STORE_NBYTES", 4096)
    monkeypatch.setattr(checks, "ALL_NBYTES", 4096)
    monkeypatch.setitem(plan.COPY_NBYTES, "copy 64 MiB", 1 << 16)


def verdicts(lab, names) -> dict[tuple[str, str, str], Check]:
    """Run every check that needs no second process and no torch."""
    found = {}
    for task in plan.verify(names, SMALL):
        if task.work in ("visit", "collective"):
            continue
        for check in works.perform(lab, task).records:
            found[check.source, check.target, check.name] = check
    return found


def run(lab_of, faults, gpus=2):
    lab = lab_of(FakeDriver(gpus, faults))
    return verdicts(lab, {f"GPU{at}": at for at in range(gpus)})


NAMES = {
    "store",
    "load",
    "copy 8 B",
    "copy 64 MiB",
    "litmus pull",
    "litmus push",
    "litmus tagged",
    "all at once",
}


@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_everything_is_checked_and_right_on_good_ways(lab_of, gpus):
    found = run(lab_of, {}, gpus)
    assert {check.verdict for check in found.values()} == {"OK"}, found
    names = [f"GPU{at}" for at in range(gpus)]
    for one in names:
        for other in (*names, HOST):
            got = {name for source, target, name in found if (source, target) == (one, other)}
            alone = gpus > 1 and one == other
            assert got == (NAMES - {"all at once"} if alone else NAMES)


def test_good_ways_leave_nothing_allocated(lab_of):
    fake = FakeDriver(2)
    verdicts(lab_of(fake), {"GPU0": 0, "GPU1": 1})
    counts = {owner for owner, data in fake.memory.values() if len(data) == 65536}
    assert len(fake.memory) == 2 and counts == {0, 1}  # where each GPU's checks count
    assert not fake.registered


FAULTS = {
    ("drop", "store"): "DROPPED",
    ("drop", "copy 8 B"): "DROPPED",
    ("drop", "copy 64 MiB"): "DROPPED",
    ("drop", "litmus push"): "HANG",
    ("drop", "litmus tagged"): "HANG",
    ("drop", "litmus pull"): "HANG",
    ("drop", "all at once"): "DROPPED",
    ("mirror", "store"): "MIRRORED",
    ("mirror", "all at once"): "MIRRORED",
    ("spoil", "store"): "CORRUPT",
    ("spoil", "copy 64 MiB"): "CORRUPT",
    ("spoil", "litmus push"): "HANG",
    ("spoil", "all at once"): "CORRUPT",
    ("stale", "load"): "CORRUPT",
    ("stale", "litmus pull"): "CORRUPT",
    ("hang", "litmus pull"): "HANG",
    ("hang", "litmus push"): "HANG",
    ("hang", "litmus tagged"): "HANG",
    ("deny", "store"): "NO-ACCESS",
    ("deny", "load"): "NO-ACCESS",
    ("deny", "litmus pull"): "NO-ACCESS",
    ("break", "store"): "NO-ACCESS",
    ("break", "copy 8 B"): "NO-ACCESS",
}


@pytest.mark.parametrize(("fault", "name"), FAULTS)
def test_a_bad_way_gets_its_verdict(lab_of, fault, name):
    lab = lab_of(FakeDriver(2, {(0, 1): fault}))
    (task,) = [
        task
        for task in plan.verify({"GPU0": 0, "GPU1": 1}, SMALL)
        if any((b.source, b.target, b.name) == ("GPU0", "GPU1", name) for b in task.blanks)
        and task.work != "visit"
    ]
    answer = works.perform(lab, task)
    found = {(c.source, c.target): c for c in answer.records if c.name == name}
    check = found["GPU0", "GPU1"]
    assert check.verdict == FAULTS[fault, name], check
    assert check.detail
    assert answer.broken == (fault == "break")


def test_only_the_bad_direction_is_bad(lab_of):
    found = run(lab_of, {(0, 1): "drop"})
    bad = {key for key, check in found.items() if check.verdict != "OK"}
    there = {key for key in bad if key[:2] == ("GPU0", "GPU1")}
    assert len(there) == 7  # all but `load`
    # A flag that does not arrive keeps both ranks from going on.
    assert bad - there == {("GPU1", "GPU0", f"litmus {p}") for p in ("pull", "push", "tagged")}


def test_a_mirror_is_told_from_a_drop_by_what_the_writer_sees(lab_of):
    found = run(lab_of, {(0, 1): "mirror", (1, 0): "drop"})
    assert found["GPU0", "GPU1", "store"].verdict == "MIRRORED"
    assert found["GPU1", "GPU0", "store"].verdict == "DROPPED"
    assert "reads back" in found["GPU0", "GPU1", "store"].detail


def test_host_memory_is_checked_too(lab_of):
    found = run(lab_of, {(0, HOST): "drop"}, gpus=1)
    bad = {name for (_, target, name), check in found.items() if check.verdict == "DROPPED"}
    assert bad == {"store", "copy 8 B", "copy 64 MiB", "all at once"}
    assert {check.verdict for (_, target, _), check in found.items() if target == "GPU0"} == {"OK"}


def test_evidence_counts_words(lab_of):
    found = run(lab_of, {(0, 1): "spoil"})
    assert found["GPU0", "GPU1", "store"].detail.startswith("1 of 1024 words are wrong")


def test_errors_become_verdicts(lab_of):
    lab = lab_of(FakeDriver(1))
    task = Task("store", {"GPU0": 0}, (blank_check("GPU0", "GPU0", "store"),))

    def failing(error):
        def work(lab, task):
            raise error

        answer = works.perform(lab, task, work)
        return answer.records[0].verdict, answer.broken

    lost = CudaError("x", name="CUDA_ERROR_ILLEGAL_ADDRESS", call="y")
    full = CudaError("x", name=works.OUT_OF_MEMORY, call="y")
    assert failing(lost) == ("NO-ACCESS", True)
    assert failing(full) == ("SKIPPED", True)
    assert failing(CompileError("no compiler")) == ("SKIPPED", False)
    assert failing(ZeroDivisionError("ours")) == ("SKIPPED", True)


def test_kernels_that_could_not_run_side_by_side_are_not_launched(lab_of):
    fake = FakeDriver(1)
    lab = lab_of(fake)
    lab._queues = 1
    found = verdicts(lab, {"GPU0": 0})
    litmus = [check for check in found.values() if "litmus" in check.name]
    assert {check.verdict for check in litmus} == {"SKIPPED"}
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in litmus[0].detail
    assert not [name for name in fake.launches if "exchange" in name]

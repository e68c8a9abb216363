"""Two processes and their slabs: here they are threads, and each says that it is another."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
from fake_gpu import HOST, FakeDriver

from pcie_comm.probe import visit, works
from pcie_comm.probe.task import Task, blank_check
from pcie_comm.transport import cuda_ipc, identity

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture
def meeting(lab_of, monkeypatch):
    """Return a function that plays a visit and returns its checks."""
    monkeypatch.setattr(visit, "PART_NBYTES", 4096)
    monkeypatch.setattr(visit, "SLAB_NBYTES", visit.FIRST + 2 * 4096)
    monkeypatch.setattr(visit, "PATIENCE_S", 5.0)
    token = lambda: threading.current_thread().name  # noqa: E731
    monkeypatch.setattr(cuda_ipc, "process_token", token)
    monkeypatch.setattr(identity, "process_token", token)

    def meet(ends, faults=None, visitor=visit.visit):
        fake = FakeDriver(2, faults)
        labs = [lab_of(fake) for _ in range(2)]
        blanks = [blank_check(*pair, "ipc") for pair in ends]
        task = Task("visit", {"GPU0": 0, "GPU1": 1}, tuple(blanks), visitor=True)
        pipes = multiprocessing.Pipe()
        thread = threading.Thread(target=visitor, args=(labs[1], task, pipes[1]))
        thread.start()
        answer = works.perform(labs[0], task, lambda lab, task: visit.meet(lab, task, pipes[0]))
        thread.join(20)
        assert not thread.is_alive()
        assert not fake.registered
        for pipe in pipes:
            pipe.close()
        return answer

    return meet


BOTH = [("GPU0", "GPU1"), ("GPU1", "GPU0")]


@pytest.mark.parametrize("ends", [BOTH, [("GPU0", "GPU0")], [("GPU0", HOST)]])
def test_good_ways(meeting, ends):
    answer = meeting(ends)
    assert [check.verdict for check in answer.records] == ["OK"] * len(ends), answer
    assert not answer.broken


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [("drop", "DROPPED"), ("mirror", "MIRRORED"), ("spoil", "CORRUPT"), ("closed", "NO-ACCESS")],
)
def test_a_bad_direction(meeting, fault, verdict):
    first, second = meeting(BOTH, {(0, 1): fault}).records
    assert first.verdict == verdict and first.detail
    assert second.verdict == ("NO-ACCESS" if fault == "closed" else "OK")


def test_the_other_direction(meeting):
    first, second = meeting(BOTH, {(1, 0): "drop"}).records
    assert (first.verdict, second.verdict) == ("OK", "DROPPED")


def test_the_visitor_says_why_it_failed(meeting):
    answer = meeting(BOTH, {(1, 0): "closed"})
    assert "in the other process: CudaError" in answer.records[0].detail
    assert answer.broken


def test_a_visitor_that_dies(meeting):
    answer = meeting(BOTH, visitor=lambda lab, task, pipe: pipe.close())
    assert [check.verdict for check in answer.records] == ["NO-ACCESS"] * 2
    assert "ended" in answer.records[0].detail


def test_a_visitor_that_hangs(meeting, monkeypatch):
    monkeypatch.setattr(visit, "PATIENCE_S", 0.2)
    answer = meeting(BOTH, visitor=lambda lab, task, pipe: None)
    assert [check.verdict for check in answer.records] == ["HANG"] * 2

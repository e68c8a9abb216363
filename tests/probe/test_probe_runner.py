"""Child processes: they answer, hang or die, and the program goes on."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace

import fake_child
import pytest

from pcie_comm import console
from pcie_comm.errors import UnsupportedError
from pcie_comm.probe import program, runner
from pcie_comm.probe.program import Options, Probe, probe
from pcie_comm.probe.runner import Runner
from pcie_comm.probe.task import Task, blank_check
from pcie_comm.topology.doctor import Case, examine
from pcie_comm.topology.model import ANY, Gpu, Host, unknown_system

CHECK = (blank_check("GPU0", "GPU0", "store"),)


def task(work: str, **facts) -> Task:
    return Task(work, {"GPU0": 0}, CHECK, deadline_s=20.0, **facts)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(runner, "child", fake_child)
    with Runner({"GPU0": 0}) as one:
        yield one
        processes = [child.process for child in one._children.values()]
    assert not any(process.is_alive() for process in processes)
    assert multiprocessing.active_children() == []


def verdict(answer) -> tuple[str, str]:
    (check,) = answer.records
    return check.verdict, check.detail


def test_tasks_of_a_group_share_a_process(run):
    first, second = run.perform(task("store")), run.perform(task("store"))
    assert verdict(first) == ("OK", "")
    assert first.data == second.data != os.getpid()
    assert run.perform(task("store", group="other")).data != first.data


@pytest.mark.parametrize("work", ["die", "exit"])
def test_a_process_that_dies_costs_its_task_only(run, work):
    before = run.perform(task("store"))
    name, detail = verdict(run.perform(task(work)))
    assert name == "NO-ACCESS"
    assert f"exit code {-11 if work == 'die' else 3}" in detail
    after = run.perform(task("store"))
    assert verdict(after) == ("OK", "") and after.data != before.data


def test_a_process_that_hangs_is_ended(run):
    run.perform(task("store"))
    started = time.monotonic()
    name, detail = verdict(run.perform(replace(task("hang"), deadline_s=0.3)))
    assert time.monotonic() - started < 5
    assert name == "HANG" and "0.3 s" in detail
    assert verdict(run.perform(task("store"))) == ("OK", "")


def test_after_some_hangs_nothing_more_is_tried(run):
    for _ in range(runner.MOST_HANGS):
        run.perform(replace(task("hang"), deadline_s=0.1))
    name, detail = verdict(run.perform(task("store")))
    assert name == "SKIPPED" and "did not answer" in detail


def test_a_fault_of_the_probe_is_said_and_survived(run):
    name, detail = verdict(run.perform(task("fault")))
    assert name == "SKIPPED" and "ZeroDivisionError" in detail
    assert verdict(run.perform(task("store"))) == ("OK", "")


def test_a_visitor_takes_part(run):
    assert verdict(run.perform(task("store", visitor=True))) == ("OK", "")
    hangs = replace(task("store", visitor=True), options={"visitor hangs": True})
    assert verdict(run.perform(hangs)) == ("OK", "")
    name, _ = verdict(run.perform(task("die", visitor=True)))
    assert name == "NO-ACCESS"


def host() -> Host:
    gpu = Gpu("GPU0", address="0000:40:00.0", unknown={ANY: "a test"})
    return Host(("a test",), unknown_system("a test"), gpus=(gpu,), unknown={ANY: "a test"})


def everything(monkeypatch, **options) -> Host:
    monkeypatch.setattr(runner, "child", fake_child)
    quiet = lambda seconds: console.timed_progress(seconds, "probing")  # noqa: E731
    return probe(host(), Options(**options), quiet)


def test_all_levels_give_one_record(monkeypatch, capsys):
    found = everything(monkeypatch, verify=True, measure=True, quick=True)
    assert found.gpus[0].ordinal == 0
    assert {check.verdict for check in found.checks} == {"OK"}
    assert len(found.checks) == 22
    assert found.measurements[0].cells == ((1.0,),)
    assert found.sources == ("a test", "CUDA", "verify: quick", "measure: quick")
    written = capsys.readouterr()
    assert written.out == ""
    assert "[100 %] links under load" in written.err
    examine(Case(found))


def test_capability_alone_starts_no_work(monkeypatch):
    found = everything(monkeypatch)
    assert found.checks == () and found.sources == ("a test", "CUDA")


def test_what_verify_refused_is_not_measured(run):
    one = Probe(host(), Options(verify=True, measure=True), run)
    tasks = [replace(task, work="die") if task.work == "store" else task for task in one.tasks()]
    done = []
    found = one.run(tasks, lambda title, told, seconds: done.append((title, told)))
    refused = {(check.source, check.target) for check in found.checks if check.verdict != "OK"}
    assert refused == {("GPU0", "GPU0"), ("GPU0", "host")}
    reasons = {gap.reason for matrix in found.measurements for gap in matrix.gaps}
    assert "not measured: GPU0 -> GPU0, store: NO-ACCESS" in reasons
    assert len(done) == len(tasks)


def test_without_cuda_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(runner, "child", fake_child)
    with Runner({}) as one:
        monkeypatch.setattr(one, "perform", lambda task: program.Answer(task.blanks))
        with pytest.raises(UnsupportedError, match="CUDA cannot be asked: it was not run"):
            Probe(host(), Options(), one)

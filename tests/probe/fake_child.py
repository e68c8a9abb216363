"""In the place of probe/child.py: processes that answer, hang, or die, as the task's work says."""

from __future__ import annotations

import os
import signal
import time

from pcie_comm.probe import works
from pcie_comm.probe.capability import CudaGpu, CudaHost
from pcie_comm.probe.task import Answer, Figure
from pcie_comm.topology.probed import Check


def act(lab, task):
    """Do what the task's work says."""
    if task.work == "hang":
        time.sleep(60)
    if task.work == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if task.work == "exit":
        os._exit(3)
    if task.work == "fault":
        raise ZeroDivisionError("of the probe")
    if task.work == "ask":
        gpu = CudaGpu(0, "GPU-00000000-1111-2222-3333-000000000000", "0000:40:00.0", "Fake")
        return Answer((), data=CudaHost((gpu,), ()), broken=True)
    return Answer(tuple(filled(blank) for blank in task.blanks), data=os.getpid())


def filled(blank):
    if isinstance(blank, Check):
        return Check(blank.source, blank.target, blank.name, "OK")
    if isinstance(blank, Figure):
        return Figure(blank.kind, blank.row, blank.column, 1.0)
    return blank


def serve(pipe, ordinals):
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        answer = works.perform(None, task, act)
        pipe.send(answer)
        if answer.broken:
            return


def serve_with_visitor(pipe, ordinals, other):
    task = pipe.recv()
    if other.poll(10) and other.recv() == "here":
        pipe.send(works.perform(None, task, act))


def serve_as_visitor(other, ordinals, task):
    other.send("here")
    if task.options.get("visitor hangs"):
        time.sleep(60)

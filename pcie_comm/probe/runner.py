"""Starts the processes that touch GPUs, gives them tasks, and ends those that do not answer."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..topology.probed import HANG, NO_ACCESS, SKIPPED
from . import child
from .task import Answer, Task, failed

GRACE_S = 2.0
MOST_HANGS = 3
"""Processes that do not answer before nothing more is tried."""

PATH = "PYTHONPATH"
PRELOAD = ["torch", "pcie_comm.probe.child"]
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Child:
    """A process and this end of its pipe."""

    process: BaseProcess
    pipe: Connection

    def end(self) -> int | None:
        """End it, and return its exit code; None if it cannot be ended."""
        self.pipe.close()
        self.process.join(0.1)
        self.process.kill()
        self.process.join(GRACE_S)
        return self.process.exitcode


class Runner:
    """A context manager: on leaving, no process is left.

    Args:
        ordinals: CUDA ordinals of the GPUs, by name.
        context: How processes start; by default they are forked from a server that has imported
            what they need and has never touched CUDA.
    """

    def __init__(self, ordinals: Mapping[str, int], context: BaseContext | None = None) -> None:
        self.ordinals = dict(ordinals)
        self._context: Any = context or _server()
        self._children: dict[str, Child] = {}
        self._hangs = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        for group in list(self._children):
            self._children.pop(group).end()

    def perform(self, task: Task) -> Answer:
        """Have a task done; every blank comes back, filled or with the reason why not."""
        if self._hangs >= MOST_HANGS:
            reason = f"{MOST_HANGS} processes did not answer before"
            return Answer(failed(task.blanks, SKIPPED, reason))
        if task.visitor:
            return self._with_visitor(task)
        if task.group not in self._children:
            self._children[task.group] = self._start(child.serve, self.ordinals)
        answer = self._ask(self._children[task.group], task)
        if answer.broken:
            self._children.pop(task.group).end()
        return answer

    def _with_visitor(self, task: Task) -> Answer:
        ends = self._context.Pipe()
        first = self._start(child.serve_with_visitor, self.ordinals, ends[0])
        visitor = self._context.Process(
            target=child.serve_as_visitor, args=(ends[1], self.ordinals, task)
        )
        visitor.start()
        for end in ends:
            end.close()
        try:
            return self._ask(first, task)
        finally:
            first.end()
            visitor.join(GRACE_S)
            visitor.kill()
            visitor.join(GRACE_S)

    def _start(self, target: Callable[..., None], *arguments: object) -> Child:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *arguments))
        process.start()
        theirs.close()
        return Child(process, ours)

    def _ask(self, one: Child, task: Task) -> Answer:
        try:
            one.pipe.send(task)
            if not one.pipe.poll(task.deadline_s):
                self._hangs += 1
                one.process.kill()
                reason = f"it did not end within {task.deadline_s:g} s, and was ended"
                return Answer(failed(task.blanks, HANG, reason), broken=True)
            answer: Answer = one.pipe.recv()
            return answer
        except (EOFError, OSError):
            one.process.join(GRACE_S)
            reason = f"the process ended during it, exit code {one.process.exitcode}"
            return Answer(failed(task.blanks, NO_ACCESS, reason), broken=True)


def _server() -> BaseContext:
    """Return the context of a fork server that can import this package."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with _importable():
        forkserver.ensure_running()
    return context


@contextmanager
def _importable() -> Iterator[None]:
    """Let processes that start meanwhile find this package, also where it is not installed."""
    before = os.environ.get(PATH)
    os.environ[PATH] = os.pathsep.join(filter(None, [str(ROOT), before]))
    try:
        yield
    finally:
        if before is None:
            with suppress(KeyError):
                del os.environ[PATH]
        else:
            os.environ[PATH] = before

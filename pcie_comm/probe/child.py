"""The processes that touch GPUs. What happens to them does not happen to the program."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection

from ..config import Config, request_hardware_queues
from ..kernels.store import KernelStore
from ..local import HARDWARE_QUEUES
from .lab import Lab
from .task import Task
from .visit import meet, visit
from .works import perform


def _open(ordinals: Mapping[str, int]) -> Lab:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program ends its children itself
    os.dup2(2, 1)  # what libraries print is not part of a report
    queues = request_hardware_queues(HARDWARE_QUEUES)
    config = Config()
    return Lab(ordinals, KernelStore(config.kernels_dir, config.cache_dir), queues)


def serve(pipe: Connection, ordinals: Mapping[str, int]) -> None:
    """Do tasks as they come, until the pipe is closed or the process is of no further use."""
    lab = _open(ordinals)
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            return
        answer = perform(lab, task)
        pipe.send(answer)
        if answer.broken:
            return


def serve_with_visitor(pipe: Connection, ordinals: Mapping[str, int], other: Connection) -> None:
    """Do one task together with the process at the other end of `other`."""
    lab = _open(ordinals)
    task: Task = pipe.recv()
    pipe.send(perform(lab, task, lambda lab, task: meet(lab, task, other)))


def serve_as_visitor(other: Connection, ordinals: Mapping[str, int], task: Task) -> None:
    """Be the visitor of one task."""
    visit(_open(ordinals), task, other)

"""Requests to a torch store, each of which ends.

A TCPStore waits for an answer without a limit: where its host stands still, or a child of a dead
host holds the connection open, no deadline of torch's and no signal ends that wait. So requests run
on a thread of their own, which is left behind with the store if no answer comes.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Answer = TypeVar("Answer")

FAREWELL_S = 1.0
"""Longest wait for a store by what needs no answer: notes, and the end of a group."""

_LOOK_S = 0.02

_IDLE_S = 0.2
"""How long a thread waits for a further request before it ends."""


class SilenceError(RuntimeError):
    """A store does not answer."""


class _Worker(threading.Thread):
    """Runs requests one after another. Idle ones are in `_idle`, until they have been for long."""

    def __init__(self) -> None:
        super().__init__(name="pcie_comm.store", daemon=True)
        self._requests = queue.SimpleQueue[Any]()
        self.start()

    def run(self) -> None:
        """Serve until nothing has come for a while, or until `dismiss`."""
        while True:
            try:
                one = self._requests.get(timeout=_IDLE_S)
            except queue.Empty:
                with _changing:
                    if self in _idle:
                        _idle.remove(self)
                        return
                continue
            if one is None:
                return
            request, answers = one
            try:
                answers.put((request(), None))
            except BaseException as error:  # raised where the answer is awaited
                answers.put((None, error))
            del one, request, answers  # an idle thread keeps no store

    def submit(self, request: Callable[[], Any]) -> queue.SimpleQueue[Any]:
        """Have the thread do something; return where its answer comes."""
        answers = queue.SimpleQueue[Any]()
        self._requests.put((request, answers))
        return answers

    def dismiss(self) -> None:
        """End, once what was submitted is done."""
        self._requests.put(None)


_changing = threading.Lock()
_idle: list[_Worker] = []


def _forget() -> None:
    """Start anew in a forked child: threads are the parent's, and so may the lock be."""
    global _changing
    _changing = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)


class Requests:
    """One store, asked with limits.

    Args:
        store: Any torch store.

    Attributes:
        silent: A request got no answer in time; later ones fail at once.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.silent = False

    def ask(
        self,
        request: Callable[[Store], Answer],
        limit_s: float = FAREWELL_S,
        look: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Return the answer to a request.

        Args:
            request: Is given the store.
            limit_s: Longest wait.
            look: Called again and again meanwhile; may raise.

        Raises:
            SilenceError: No answer came in time, or to an earlier request.
            RuntimeError: The store failed.
        """
        if self.silent:
            raise SilenceError("the store did not answer before")
        worker: _Worker | None = None
        try:
            with _changing:
                worker = _idle.pop() if _idle else None
            worker = worker or _Worker()
            answers = worker.submit(lambda: request(self.store))
            answer, error = self._awaited(answers, limit_s, look)
        except BaseException:
            if worker is not None:
                worker.dismiss()
            raise
        with _changing:
            _idle.append(worker)
        if error is not None:
            raise error
        found: Answer = answer
        return found

    def _awaited(
        self, answers: queue.SimpleQueue[Any], limit_s: float, look: Callable[[], None]
    ) -> tuple[Any, BaseException | None]:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                found: tuple[Any, BaseException | None] = answers.get(timeout=_LOOK_S)
                return found
            except queue.Empty:
                if time.monotonic() >= deadline:
                    self.silent = True
                    raise SilenceError(f"the store did not answer within {limit_s:g} s") from None
            look()

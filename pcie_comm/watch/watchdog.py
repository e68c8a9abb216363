"""The watchdog: one thread per process that looks at the peers of all its groups.

It runs only while there is a group with ranks in other processes. Ranks that share a process need
none: they look at each other when one of them aborts.
"""

from __future__ import annotations

import atexit
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .watch import Watch

TICK_S = 0.02
"""Pause between two looks. A death or an abort is noticed within it; 50 looks a second cost about
1 % of a core on the machine of docs/failure.md."""

PATIENCE_S = 1.0
"""Pause between two looks whether the watchdog's own thread lives; longest wait for its end."""


class _Thread(threading.Thread):
    """The watchdog's thread. It holds the life locks: a lock belongs to the thread that took it."""

    def __init__(self) -> None:
        super().__init__(name="pcie_comm.watchdog", daemon=True)
        self._jobs: deque[tuple[Callable[[], None], threading.Event]] = deque()
        # poll() on a descriptor takes half the time of Event.wait() with a timeout
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False

    def run(self) -> None:
        """Look and sleep, until told to stop."""
        sleep = select.poll()
        sleep.register(self._wake, select.POLLIN)
        try:
            while not self._stopping:
                if sleep.poll(1000 * TICK_S):
                    os.eventfd_read(self._wake)
                self._do_jobs()
                look_now()
        finally:  # a lock that is not given back would tell the peers that this process died
            for watch in [w for w in _state.watches if not w.one_process]:
                watch.release_life_lock()

    def _do_jobs(self) -> None:
        while self._jobs:
            job, done = self._jobs.popleft()
            job()
            done.set()

    def do(self, job: Callable[[], None]) -> None:
        """Have the thread do something, and wait until it is done, or the thread is.

        A signal does not end the wait, but is raised after it: the job is done all the same, and
        the memory that it works on must not go before.
        """
        done, interruption = threading.Event(), None
        self._jobs.append((job, done))
        while not done.is_set() and self.is_alive():
            try:
                os.eventfd_write(self._wake, 1)
                done.wait(PATIENCE_S)
            except BaseException as error:  # such as KeyboardInterrupt
                interruption = error
        if interruption is not None:
            raise interruption

    def stop(self) -> None:
        """End the thread; wait for it, but not for ever."""
        self._stopping = True
        if not self.is_alive():
            return
        os.eventfd_write(self._wake, 1)
        self.join(PATIENCE_S)
        if not self.is_alive():
            os.close(self._wake)


class _Watchdog:
    """The watches of this process, and the thread while it is needed."""

    def __init__(self) -> None:
        self.changing = threading.RLock()  # a signal's handler may close a group within a change
        self.watches: list[Watch] = []
        self.thread: _Thread | None = None


_state = _Watchdog()


def add(watch: Watch) -> None:
    """Look at a watch's peers from now on."""
    with _state.changing:
        _state.watches = [*_state.watches, watch]  # first: what is held is found and given back
        if not watch.one_process:
            if _state.thread is None or not _state.thread.is_alive():
                _state.thread = None
                thread = _Thread()
                thread.start()
                _state.thread = thread
            _state.thread.do(watch.hold_life_lock)


def remove(watch: Watch) -> None:
    """Look at a watch's peers no longer. Idempotent."""
    with _state.changing:
        if watch not in _state.watches:
            return
        thread = _state.thread
        try:
            if thread is not None and not watch.one_process:
                thread.do(watch.release_life_lock)
        finally:
            _state.watches = [other for other in _state.watches if other is not watch]
            if thread is not None and all(other.one_process for other in _state.watches):
                _state.thread = None
                thread.stop()


def look_now() -> None:
    """Let every watch of this process look at its peers."""
    for watch in _state.watches:
        watch.look()


def watched() -> int:
    """Return how many watches there are; for tests of what is left behind."""
    return len(_state.watches)


@atexit.register
def _exit() -> None:
    """Tell the peers at once, rather than when the interpreter is gone; then end the thread."""
    for watch in _state.watches:
        watch.exit()
    thread, _state.thread = _state.thread, None
    if thread is not None:
        with suppress(RuntimeError):
            thread.stop()


def _forget() -> None:
    """Start anew in a forked child: groups, their lines and their thread are the parent's."""
    global _state
    _state = _Watchdog()


os.register_at_fork(after_in_child=_forget)

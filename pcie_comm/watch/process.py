"""A process as others name and watch it: pid, start time, PID namespace, pidfd, exit code."""

from __future__ import annotations

import fcntl
import os
import select
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..transport.identity import process_facts

_STATE, _START_TIME, _EXIT_CODE = 0, 19, 49
"""Places in /proc/PID/stat, counted from the field after the program's name."""

_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO, for a struct of 64 bytes; Linux 6.13
_INFO_EXIT = 1 << 3  # PIDFD_INFO_EXIT, Linux 6.15: only once the process was waited for


@dataclass(frozen=True)
class Process:
    """What a process tells the others of itself, so that they can watch it.

    Attributes:
        boot: Name of the host since it was started.
        token: Random name of the process. Unlike a pid it is never used twice.
        pid: In its PID namespace.
        started: Start time in clock ticks since boot; 0 if not known.
        namespaces: Name of the namespaces in which `pid` and `started` count.
    """

    boot: str
    token: str
    pid: int
    started: int
    namespaces: str

    @classmethod
    def here(cls) -> Process:
        """Return this process."""
        facts = process_facts()
        pid, token = os.getpid(), str(facts["process"])
        stat = _stat(pid)
        started = int(stat[_START_TIME]) if stat else 0
        return cls(str(facts["boot"]), token, pid, started, _namespaces() or token)


class PeerProcess:
    """Another process, watched through a pidfd where it has a pid in this PID namespace.

    Attributes:
        process: Whom it is about.
        descriptor: The pidfd, or -1: another PID namespace, or a kernel that has none.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.descriptor = -1
        self._missing = False
        if process.namespaces != Process.here().namespaces:
            return
        try:
            self.descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._missing = True
        except OSError:  # Linux before 5.3, or a seccomp filter
            return
        # From here on the pid cannot be given away; but it may have been before.
        if self.descriptor >= 0 and not self._is_the_one():
            self.close()
            self._missing = True

    def _is_the_one(self) -> bool:
        """Tell whether the pid is still that of the process that named it."""
        stat = _stat(self.process.pid)
        return not (stat and self.process.started) or int(stat[_START_TIME]) == self.process.started

    def ended(self) -> bool:
        """Tell whether the process is known to have ended, with all that it had open."""
        if self._missing or self.descriptor < 0:
            return self._missing
        look = select.poll()  # a new one: two threads may look at once
        look.register(self.descriptor, select.POLLIN)
        return bool(look.poll(0))

    def exit_code(self) -> int | None:
        """Return the exit code, minus the signal that ended the process, or None if not known.

        Requires: the process is ending or has ended.
        """
        status = None
        if self.descriptor >= 0:
            status = _status_after_wait(self.descriptor)
        if status is None and self.descriptor >= 0:
            stat = _stat(self.process.pid)
            # A process that is still being taken down has no state of its own, but its end is
            # decided. Until it is, 0 may also mean that this is not known yet.
            if stat and self._is_the_one() and (stat[_STATE] in "ZX" or int(stat[_EXIT_CODE])):
                status = int(stat[_EXIT_CODE])
        return None if status is None else os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """Give the pidfd back. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _status_after_wait(pidfd: int) -> int | None:
    """Return the wait status of a process whose parent has already waited for it."""
    info = bytearray(struct.pack("<Q56x", _INFO_EXIT))
    with suppress(OSError):
        fcntl.ioctl(pidfd, _GET_INFO, info)
        mask, exit_code = struct.unpack("<Q52xi", info)
        if mask & _INFO_EXIT:
            return int(exit_code)
    return None


def _stat(pid: int) -> list[str] | None:
    """Return /proc/PID/stat from the field after the program's name on, which may hold spaces."""
    if not _proc_is_ours(os.getpid()):
        return None
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


@cache
def _proc_is_ours(pid: int) -> bool:
    """Tell whether /proc counts as this PID namespace does; a container may see its host's."""
    with suppress(OSError):
        return os.readlink("/proc/self") == str(pid)
    return False


def _namespaces() -> str:
    """Return a name of this process's PID and time namespaces, or nothing."""
    try:
        names = [os.readlink("/proc/self/ns/pid")]
    except OSError:
        return ""
    with suppress(OSError):  # Linux before 5.6 has no time namespaces
        names.append(os.readlink("/proc/self/ns/time"))
    return " ".join(names)

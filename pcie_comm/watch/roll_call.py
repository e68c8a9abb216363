"""The roll call of a group: a page of shared memory with one line per rank.

A rank writes its own line and reads all others. So nothing is ever sent, nobody waits for anybody,
and what a rank said stays readable after its end. Ranks that share a process share a page of plain
memory; else it is a file in /dev/shm, whose name goes when all have mapped it.
"""

from __future__ import annotations

import ctypes
import enum
import secrets
from weakref import WeakValueDictionary

from ..errors import UnsupportedError
from ..layout import MAX_WORLD
from ..transport.shared_memory import SharedMemoryFile
from .cause import Cause
from .life_lock import NBYTES as LOCK_NBYTES
from .life_lock import LifeLock


class State(enum.IntEnum):
    """What a rank says of itself."""

    ABSENT = 0
    PRESENT = 1
    ABORTED = 2
    """It called `abort`, failed, or closed a group that had failed; it comes to no call."""
    EXITED = 3
    """Its interpreter ends, and the group was not closed."""
    LEFT = 4
    """It closed the group together with the others."""


class Line(ctypes.Structure):
    """One rank's line. The rank itself writes it; `lock` also changes by those who look.

    `state` comes last in every change, so that who sees it sees the rest.

    Attributes:
        state: A State.
        beat: Grows while the rank's watchdog runs; stands still if its process is stopped.
        released: Not 0 once the rank addresses no peer's slab any more.
        blamed: 1 + the rank that is why this one gave up; 0 if none.
        blamed_kind: What became of that rank, a Kind.
        exit_known, exit_code: Its exit code, if it died.
        lock: A LifeLock, held as long as the process lives.
        reason: Text for people.
    """

    _fields_ = (
        ("state", ctypes.c_uint32),
        ("beat", ctypes.c_uint32),
        ("released", ctypes.c_uint32),
        ("blamed", ctypes.c_uint32),
        ("blamed_kind", ctypes.c_uint32),
        ("exit_known", ctypes.c_uint32),
        ("exit_code", ctypes.c_int32),
        ("unused", ctypes.c_uint32),
        ("lock", ctypes.c_uint8 * LOCK_NBYTES),
        ("reason", ctypes.c_char * 160),
    )

    state: int
    beat: int
    released: int
    blamed: int
    blamed_kind: int
    exit_known: int
    exit_code: int
    reason: bytes

    def say(self, state: State, reason: str = "") -> None:
        """Change the own state, and say why."""
        self.reason = reason.encode(errors="replace")[:159]
        self.state = state

    def heard(self) -> str:
        """Return what the rank said last."""
        return self.reason.decode(errors="replace")

    def blame(self, cause: Cause) -> None:
        """Note which rank the own one gives up for."""
        self.exit_code = cause.exit_code or 0
        self.exit_known = cause.exit_code is not None
        self.blamed_kind = cause.kind
        self.blamed = 1 + cause.peer

    def life_lock(self) -> LifeLock:
        """Return the lock; its memory is this line's."""
        return LifeLock(ctypes.addressof(self) + Line.lock.offset)


LINE_NBYTES = ctypes.sizeof(Line)
NBYTES = MAX_WORLD * LINE_NBYTES
assert LINE_NBYTES == 256
assert Line.lock.offset % 16 == 0


class _ProcessPage:
    """A page for ranks of one process."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(NBYTES))

    def unlink(self) -> None:
        """It has no name outside of this process."""

    def close(self) -> None:
        """The ranks that still look at it keep it."""


_pages: WeakValueDictionary[str, _ProcessPage] = WeakValueDictionary()


class RollCall:
    """One rank's mapping of the page. Use `create` or `attach`.

    Attributes:
        name: What `attach` needs; for ranks of one process it means nothing to others.
    """

    def __init__(self, name: str, page: SharedMemoryFile | _ProcessPage) -> None:
        self.name = name
        self._page = page
        self._lines = [Line.from_buffer(page.view, rank * LINE_NBYTES) for rank in range(MAX_WORLD)]

    @classmethod
    def create(cls, *, one_process: bool) -> RollCall:
        """Make a page with an empty line for every rank.

        Raises:
            UnsupportedError: /dev/shm is missing or full, or the C library lacks something.
        """
        if one_process:
            name, page = secrets.token_hex(16), _ProcessPage()
            _pages[name] = page
            return cls(name, page)
        file = SharedMemoryFile.create(NBYTES)
        roll_call = cls(file.name, file)
        try:
            for line in roll_call._lines:
                line.life_lock().initialise()
        except OSError as error:
            roll_call.unlink()
            roll_call.close()
            raise UnsupportedError(
                f"{error}; the C library must have robust mutexes, as glibc and musl do",
                reason="no robust mutexes",
            ) from error
        return roll_call

    @classmethod
    def attach(cls, name: str, peer: int) -> RollCall:
        """Map the page that rank `peer` made.

        Raises:
            InvalidArgumentError: There is none of that name; the ranks do not share /dev/shm.
        """
        return cls(name, _pages.get(name) or SharedMemoryFile.attach(name, NBYTES, peer))

    def line(self, rank: int) -> Line:
        """Return a rank's line. Nobody keeps it beyond `close`."""
        return self._lines[rank]

    def unlink(self) -> None:
        """Remove the page's name, whoever made it. Idempotent."""
        self._page.unlink()

    def close(self) -> None:
        """Give up the mapping. Idempotent."""
        self._lines = []
        self._page.close()

"""A lock that a process holds as long as it lives, and whose loss everybody can see.

It is a robust mutex in shared memory. When the thread that holds one ends without giving it back,
the kernel marks it as abandoned: the first thing that it does for a thread that was killed, before
the process's memory and files go. So the mark shows while a pidfd is still silent, in every PID
namespace, and a process that is merely stopped keeps its lock.
"""

from __future__ import annotations

import ctypes
import enum
import errno
from functools import cache

NBYTES = 64
"""Room for a pthread_mutex_t, 40 bytes on x86-64 with glibc and 48 on arm64, and for the mark."""

_MARK_OFFSET = 60

_PROCESS_SHARED = 1  # PTHREAD_PROCESS_SHARED
_ROBUST = 1  # PTHREAD_MUTEX_ROBUST


class Life(enum.Enum):
    """How a life lock stands."""

    HELD = enum.auto()
    FREE = enum.auto()
    ABANDONED = enum.auto()
    """The thread that held it is gone."""


@cache
def _threads() -> ctypes.PyDLL:
    """Return the C library. No call of it blocks here, so none gives up the interpreter lock."""
    library = ctypes.PyDLL(None)
    for name in ("lock", "trylock", "unlock", "consistent"):
        getattr(library, f"pthread_mutex_{name}").argtypes = [ctypes.c_void_p]
    library.pthread_mutex_init.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


class LifeLock:
    """One rank's lock. Its own watchdog thread holds it, other processes look at it.

    Args:
        address: 64 bytes of shared memory, aligned to 16, that stay mapped while it is held.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self._mark = ctypes.c_uint32.from_address(address + _MARK_OFFSET)

    def initialise(self) -> None:
        """Make fresh memory a lock. Once, before any other process sees it."""
        threads, attributes = _threads(), ctypes.create_string_buffer(64)
        for status in (
            threads.pthread_mutexattr_init(attributes),
            threads.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED),
            threads.pthread_mutexattr_setrobust(attributes, _ROBUST),
            threads.pthread_mutex_init(self._address, attributes),
        ):
            if status:
                raise OSError(status, "cannot make a robust mutex")

    def hold(self) -> None:
        """Take the lock for this thread. Others hold it for no longer than a look takes."""
        if _threads().pthread_mutex_lock(self._address) == errno.EOWNERDEAD:
            _threads().pthread_mutex_consistent(self._address)  # one who looked was killed

    def release(self) -> None:
        """Give the lock back. Requires: this thread holds it."""
        _threads().pthread_mutex_unlock(self._address)

    def look(self) -> Life:
        """Tell how the lock stands. From any process or thread but that which holds it."""
        if self._mark.value:
            return Life.ABANDONED
        status = _threads().pthread_mutex_trylock(self._address)
        if status == errno.EBUSY:
            return Life.HELD
        if status == errno.EOWNERDEAD:
            # The first one who looks is told, and tells the others. POSIX has a state for this,
            # ENOTRECOVERABLE, but glibc's trylock leaves such a mutex locked (seen with 2.36).
            self._mark.value = 1
            _threads().pthread_mutex_consistent(self._address)
        _threads().pthread_mutex_unlock(self._address)
        return Life.ABANDONED if self._mark.value else Life.FREE

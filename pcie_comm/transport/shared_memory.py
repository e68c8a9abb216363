"""A slab in POSIX shared memory: a file in /dev/shm that several processes map.

The name serves the mapping only. Once all ranks have mapped the file its owner removes the name
(`unlink`), and from then on nothing is left behind, however the processes end. A name whose owner
was killed before that is removed when a slab is next allocated on this host: the owner holds a lock
on its file, which the kernel drops with the process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

from ..errors import InvalidArgumentError, UnsupportedError
from ..layout import align_up

SHM_DIR = Path("/dev/shm")
_LOCKED_WITHIN_S = 60.0
"""Longest time between a file's creation and its lock, for a process that is not stopped."""

_NAME = re.compile(r"pcie_comm\.(\d+)\.[0-9a-f]{32}")


class SharedMemoryFile:
    """One mapping of one file. Use `create` or `attach`.

    Attributes:
        name: Name of the file in /dev/shm.
        view: Writable bytes of the slab.
        address: Where the mapping starts; page-aligned.
        mapped_nbytes: Length of the slab in whole pages.
    """

    def __init__(self, name: str, descriptor: int, nbytes: int, *, owner: bool) -> None:
        self.name = name
        self.mapped_nbytes = _file_nbytes(nbytes)
        try:
            self._memory = mmap.mmap(descriptor, self.mapped_nbytes)
        except OSError as error:
            raise UnsupportedError(
                f"cannot map nbytes={self.mapped_nbytes} of {SHM_DIR / name} ({error.strerror}); "
                f"{_remedy(error, 'raise ulimit -v, or lower Config.slot_nbytes')}",
                reason="a slab cannot be mapped",
            ) from error
        self._lock = descriptor if owner else -1
        self.view = memoryview(self._memory)[:nbytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @classmethod
    def create(cls, nbytes: int) -> SharedMemoryFile:
        """Create a zeroed file that only this user may open, and map it.

        Raises:
            UnsupportedError: /dev/shm is missing or has not enough room.
        """
        remove_stale_files()
        _check_room(_file_nbytes(nbytes))
        name = f"pcie_comm.{os.getpid()}.{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(SHM_DIR / name, flags, 0o600)
        except OSError as error:
            raise UnsupportedError(
                f"cannot create {SHM_DIR / name} ({error.strerror}); "
                f"{_remedy(error, 'make /dev/shm a tmpfs that this user may write to')}",
                reason="/dev/shm is not writable",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Reserves the pages: a full /dev/shm is an error here and not a SIGBUS later.
            os.posix_fallocate(descriptor, 0, _file_nbytes(nbytes))
            return cls(name, descriptor, nbytes, owner=True)
        except BaseException as error:
            os.close(descriptor)
            with suppress(FileNotFoundError):
                os.unlink(SHM_DIR / name)
            if isinstance(error, OSError):
                raise _no_room(_file_nbytes(nbytes), error) from error
            raise

    @classmethod
    def attach(cls, name: str, nbytes: int, peer: int) -> SharedMemoryFile:
        """Map the file of rank `peer`.

        Raises:
            InvalidArgumentError: There is no such file, or it is not what the record says.
        """
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(
                f"rank {peer} published name={name!r}, which is none of a slab", peer=peer
            )
        try:
            descriptor = os.open(SHM_DIR / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidArgumentError(
                f"cannot open the slab of rank {peer}, {SHM_DIR / name} ({error.strerror}): its "
                "owner freed it, or the ranks do not share /dev/shm (containers: --ipc=host)",
                peer=peer,
            ) from error
        try:
            _check_file(os.fstat(descriptor), _file_nbytes(nbytes), peer)
            return cls(name, descriptor, nbytes, owner=False)
        finally:
            os.close(descriptor)  # the mapping keeps the memory

    def unlink(self) -> None:
        """Remove the name, if it is still there. Mappings stay."""
        with suppress(FileNotFoundError):
            os.unlink(SHM_DIR / self.name)

    def close(self) -> None:
        """Give up the mapping. Idempotent.

        An array that still looks at the slab keeps the mapping alive until it is dropped; memory
        that somebody can reach is never unmapped.
        """
        with suppress(BufferError):
            self.view.release()
            self._memory.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _check_file(status: os.stat_result, nbytes: int, peer: int) -> None:
    """Refuse a file that no rank of this user can have made for this group.

    Raises:
        InvalidArgumentError: Owner, mode, kind or size is wrong.
    """
    own = os.geteuid()
    if status.st_uid != own or status.st_mode != stat.S_IFREG | 0o600:
        raise InvalidArgumentError(
            f"the slab of rank {peer} has owner={status.st_uid} and mode={status.st_mode:o}, "
            f"expected {own} and {stat.S_IFREG | 0o600:o}; all ranks must run as the same user",
            peer=peer,
        )
    if status.st_size != nbytes:
        raise InvalidArgumentError(
            f"the slab of rank {peer} has file_nbytes={status.st_size}, expected {nbytes}; "
            "its record is stale, exchange the records again",
            peer=peer,
        )


def remove_stale_files() -> list[str]:
    """Remove names whose owner is gone; return them."""
    removed = []
    with suppress(OSError):
        for name in os.listdir(SHM_DIR):
            match = _NAME.fullmatch(name)
            if not match:
                continue
            # An owner locks its file at once. So what is old and not locked is nobody's, though its
            # owner's number may be another process's by now (in containers they begin at 1).
            gone = not _process_exists(int(match[1])) or _age_s(name) > _LOCKED_WITHIN_S
            if gone and _remove_if_unlocked(name):
                removed.append(name)
    return removed


def _age_s(name: str) -> float:
    """Return how long ago a file was last written to, by the clock; 0 if it is gone."""
    try:
        return time.time() - (SHM_DIR / name).stat().st_mtime
    except OSError:
        return 0.0


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state not in "ZX"  # a process that ended, and that its parent has not waited for


def _remove_if_unlocked(name: str) -> bool:
    """Remove a file unless its owner, whose pid may count in another namespace, holds its lock."""
    try:
        descriptor = os.open(SHM_DIR / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone, or another user's
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(SHM_DIR / name)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _file_nbytes(nbytes: int) -> int:
    return align_up(nbytes, mmap.PAGESIZE)


def _check_room(nbytes: int) -> None:
    try:
        free = _free_nbytes()
    except OSError as error:
        raise UnsupportedError(
            f"there is no {SHM_DIR} ({error.strerror}); mount a tmpfs there",
            reason="/dev/shm is missing",
        ) from error
    if nbytes > free:
        raise _no_room(nbytes, OSError(errno.ENOSPC, "too little room"))


def _free_nbytes() -> int:
    status = os.statvfs(SHM_DIR)
    return status.f_bavail * status.f_frsize


def _no_room(nbytes: int, why: OSError) -> UnsupportedError:
    enlarge = "lower Config.slot_nbytes, or enlarge it (docker run --shm-size=...)"
    return UnsupportedError(
        f"cannot reserve nbytes={nbytes} in {SHM_DIR} ({why.strerror}): "
        f"free_nbytes={_free_nbytes()}; {_remedy(why, enlarge)}",
        reason="/dev/shm is full",
    )


def _remedy(error: OSError, usual: str) -> str:
    """Return what to do about a limit of this process, or what usually helps."""
    limits = {
        errno.EMFILE: "raise the number of files that a process may open (ulimit -n)",
        errno.ENFILE: "the host has too many open files",
        errno.EFBIG: "raise the size that a file may have (ulimit -f)",
    }
    return limits.get(error.errno or 0, usual)

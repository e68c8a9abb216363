"""The shared memory file: who may open it, when its name goes, what a full /dev/shm looks like."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launcher import RanksFailedError, run_ranks
from leaks import own_files
from sides import NBYTES, Side, edited

from pcie_comm.bootstrap import ThreadBootstrap
from pcie_comm.errors import InvalidArgumentError, UnsupportedError
from pcie_comm.transport import shared_memory
from pcie_comm.transport.base import TransportInfo
from pcie_comm.transport.host_shm import HostShmTransport
from pcie_comm.transport.shared_memory import SHM_DIR, SharedMemoryFile, remove_stale_files


@pytest.fixture
def transport() -> Iterator[HostShmTransport]:
    made = HostShmTransport(TransportInfo(0, 1))
    yield made
    made.free()
    assert own_files() == []


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def file_of(pid: int) -> Path:
    path = SHM_DIR / f"pcie_comm.{pid}.{secrets.token_hex(16)}"
    path.write_bytes(b"left over")
    path.chmod(0o600)
    return path


def test_file_is_private_and_its_name_cannot_be_guessed(transport: HostShmTransport) -> None:
    transport.allocate(NBYTES)
    (name,) = own_files()
    assert re.fullmatch(rf"pcie_comm\.{os.getpid()}\.[0-9a-f]{{32}}", name)
    status = (SHM_DIR / name).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= NBYTES, "pages must be reserved, not only promised"


def test_the_umask_does_not_matter(transport: HostShmTransport) -> None:
    previous = os.umask(0)
    try:
        transport.allocate(NBYTES)
    finally:
        os.umask(previous)
    (name,) = own_files()
    assert stat.S_IMODE((SHM_DIR / name).stat().st_mode) == 0o600


def test_seal_removes_the_name_and_keeps_the_memory(transport: HostShmTransport) -> None:
    peers = transport.map([transport.allocate(NBYTES)])
    transport.seal()
    assert own_files() == []
    peers.views[0][NBYTES - 1] = 7
    assert peers.views[0][NBYTES - 1] == 7


def test_name_of_a_dead_process_is_reclaimed(transport: HostShmTransport) -> None:
    stale = file_of(dead_pid())
    transport.allocate(NBYTES)
    assert not stale.exists()


def test_name_of_a_process_that_nobody_has_waited_for_is_reclaimed() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    stale = file_of(process.pid)
    assert stale.name in remove_stale_files()
    assert process.wait() == 0


def test_an_old_name_that_nobody_has_locked_is_reclaimed() -> None:
    """Its pid belongs to another process by now: in a container, numbers begin anew."""
    old, young = file_of(os.getpid()), file_of(1)
    try:
        hour_ago = time.time() - 3600
        os.utime(old, (hour_ago, hour_ago))
        removed = remove_stale_files()
        assert old.name in removed
        assert young.name not in removed
    finally:
        for path in (old, young):
            path.unlink(missing_ok=True)


def test_names_of_the_living_stay() -> None:
    alive, locked = file_of(os.getpid()), file_of(dead_pid())
    other = SHM_DIR / f"pcie_comm.{dead_pid()}.not-a-slab"
    other.write_bytes(b"")
    try:
        with locked.open("rb") as holder:  # its owner's pid counts in another namespace
            fcntl.flock(holder, fcntl.LOCK_EX)
            removed = remove_stale_files()
        assert not {alive.name, locked.name, other.name} & set(removed)
        assert alive.exists()
        assert locked.exists()
        assert other.exists()
        assert locked.name in remove_stale_files()
    finally:
        for path in (alive, locked, other):
            path.unlink(missing_ok=True)


def test_owner_holds_the_lock_until_it_frees(transport: HostShmTransport) -> None:
    transport.allocate(NBYTES)
    (name,) = own_files()
    with (SHM_DIR / name).open("rb") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        transport.free()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("nbytes", [1 << 44, 1 << 60])
def test_absurd_size_names_size_and_room(transport: HostShmTransport, nbytes: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"nbytes={nbytes} .*free_nbytes=\d+") as caught:
        transport.allocate(nbytes)
    assert caught.value.reason == "/dev/shm is full"
    assert own_files() == []
    transport.allocate(NBYTES)


def test_room_that_vanishes_after_the_check(
    transport: HostShmTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_free_nbytes", lambda: 1 << 62)
    with pytest.raises(UnsupportedError, match="cannot reserve nbytes="):
        transport.allocate(1 << 46)
    assert own_files() == []


def test_missing_dev_shm(transport: HostShmTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SHM_DIR", Path("/nowhere"))
    with pytest.raises(UnsupportedError, match="there is no /nowhere"):
        transport.allocate(NBYTES)


@pytest.mark.parametrize("name", ["/etc/passwd", "../../etc/passwd", "pcie_comm.1.x", ""])
def test_a_record_names_no_file_elsewhere(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="none of a slab"):
        SharedMemoryFile.attach(name, NBYTES, peer=1)


def test_a_peers_file_must_have_the_right_size_and_be_no_link(tmp_path: Path) -> None:
    short = file_of(os.getpid())
    link = SHM_DIR / f"pcie_comm.{os.getpid()}.{secrets.token_hex(16)}"
    target = tmp_path / "target"
    target.write_bytes(bytes(NBYTES))
    link.symlink_to(target)
    try:
        with pytest.raises(InvalidArgumentError, match="file_nbytes=9"):
            SharedMemoryFile.attach(short.name, NBYTES, peer=1)
        with pytest.raises(InvalidArgumentError, match="cannot open"):
            SharedMemoryFile.attach(link.name, NBYTES, peer=1)
    finally:
        short.unlink()
        link.unlink()


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o700, 0o4600])
def test_a_peers_file_that_others_may_open_is_refused(mode: int) -> None:
    path = file_of(os.getpid())
    path.write_bytes(bytes(4096))
    path.chmod(mode)
    try:
        with pytest.raises(InvalidArgumentError, match=rf"mode=10{mode:04o}, expected .*100600"):
            SharedMemoryFile.attach(path.name, 4096, peer=1)
        path.chmod(0o600)
        SharedMemoryFile.attach(path.name, 4096, peer=1).close()
    finally:
        path.unlink()


def test_a_file_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by root, who could open it."""
    path = file_of(os.getpid())
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    try:
        with pytest.raises(InvalidArgumentError, match=f"owner={own} .*run as the same user"):
            SharedMemoryFile.attach(path.name, 9, peer=1)
    finally:
        path.unlink()


def test_what_is_no_file_is_refused() -> None:
    name = f"pcie_comm.{os.getpid()}.{secrets.token_hex(16)}"
    os.mkfifo(SHM_DIR / name, 0o600)
    try:
        with pytest.raises(InvalidArgumentError, match="mode=10600"):
            SharedMemoryFile.attach(name, NBYTES, peer=1)
    finally:
        (SHM_DIR / name).unlink()


def test_an_existing_name_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever guessed the name first, with a file or a link, gains nothing."""
    taken = file_of(os.getpid())
    monkeypatch.setattr(secrets, "token_hex", lambda nbytes: taken.name.rpartition(".")[2])
    try:
        with pytest.raises(UnsupportedError, match="File exists"):
            SharedMemoryFile.create(NBYTES)
        assert taken.read_bytes() == b"left over"
    finally:
        taken.unlink()


def test_a_peer_on_another_host_is_refused() -> None:
    ends = [HostShmTransport(TransportInfo(rank, 2)) for rank in range(2)]
    records = [end.allocate(NBYTES) for end in ends]
    with pytest.raises(UnsupportedError, match="runs on another host"):
        ends[0].map([records[0], edited(records[1], boot="elsewhere")])
    for end in ends:
        end.free()
    assert own_files() == []


def test_an_array_over_a_view_outlives_the_slab(transport: HostShmTransport) -> None:
    peers = transport.map([transport.allocate(NBYTES)])
    array = np.frombuffer(peers.views[0], dtype=np.uint8)
    array[-1] = 9
    transport.unmap()
    transport.free()
    assert array[-1] == 9
    assert own_files() == []


def test_dropping_a_transport_is_quiet() -> None:
    """Without `free` the name stays until the next allocation of another process removes it."""
    side = Side("host_shm", ThreadBootstrap.create(1)[0], None)
    transport = side.make()
    transport.allocate(NBYTES)
    (name,) = own_files()
    del transport
    (SHM_DIR / name).unlink()


def leave_without_closing(rank: int, world_size: int, folder: str, killed: bool) -> None:
    shared_memory.SHM_DIR = Path(folder)
    transport = HostShmTransport(TransportInfo(0, 1))
    transport.allocate(NBYTES)
    if killed:
        os.kill(os.getpid(), 9)


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_process_left_behind_is_reclaimed(
    killed: bool,
    transport: HostShmTransport,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(shared_memory, "SHM_DIR", tmp_path)  # other tests reclaim in the real one
    if killed:
        with pytest.raises(RanksFailedError, match="exit code -9"):
            run_ranks(leave_without_closing, 1, args=(str(tmp_path), killed))
    else:
        run_ranks(leave_without_closing, 1, args=(str(tmp_path), killed))
    assert "resource_tracker" not in capfd.readouterr().err
    (left,) = os.listdir(tmp_path)
    transport.allocate(NBYTES)
    assert left not in os.listdir(tmp_path)
    transport.free()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("call", "code", "remedy"),
    [
        ("open", errno.EMFILE, "ulimit -n"),
        ("open", errno.EROFS, "make /dev/shm a tmpfs"),
        ("posix_fallocate", errno.EFBIG, "ulimit -f"),
        ("posix_fallocate", errno.ENOSPC, "--shm-size"),
        ("mmap", errno.ENOMEM, "ulimit -v"),
        ("mmap", errno.EMFILE, "ulimit -n"),
    ],
)
def test_a_limit_of_the_process_is_named(
    call: str, code: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(shared_memory.mmap if call == "mmap" else os, call, fail)
    with pytest.raises(UnsupportedError, match=re.escape(remedy)) as caught:
        SharedMemoryFile.create(NBYTES)
    monkeypatch.undo()
    assert os.strerror(code) in str(caught.value)
    assert own_files() == []

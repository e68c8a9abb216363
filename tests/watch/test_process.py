"""Processes as others see them: alive, ended, how; never another one that got the same pid."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pcie_comm.transport import identity
from pcie_comm.watch import process as module
from pcie_comm.watch.cause import fate
from pcie_comm.watch.process import PeerProcess, Process

EXITS = {
    "import os; os.kill(os.getpid(), 9)": -9,
    "import os; os.abort()": -6,
    "raise SystemExit(3)": 3,
    "": 0,
}


@pytest.fixture
def start() -> Iterator:
    """Start programs that run once their input ends."""
    running = []

    def popen(program: str) -> subprocess.Popen[bytes]:
        code = f"import sys; sys.stdin.read()\n{program}"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        running.append(process)
        return process

    yield popen
    for process in running:
        process.stdin.close()
        process.kill()
        process.wait()


def name_of(pid: int) -> Process:
    """Return what a process of this PID namespace would tell of itself."""
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return dataclasses.replace(Process.here(), pid=pid, token=f"of {pid}", started=started)


def awaited_end(peer: PeerProcess) -> None:
    deadline = time.monotonic() + 10.0
    while not peer.ended():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_this_process_names_itself():
    here = Process.here()
    assert here == Process.here()
    assert here.pid == os.getpid()
    assert here.started == name_of(os.getpid()).started > 0
    assert here.namespaces.startswith("pid:[")


def test_processes_are_told_apart_by_more_than_their_pid(monkeypatch):
    """Two containers of one host: same boot id, and the same pid in their own namespaces."""
    here = Process.here()
    monkeypatch.setattr(identity, "_token", None)
    there = Process.here()
    assert there.token != here.token
    assert (there.boot, there.pid) == (here.boot, here.pid)


@pytest.mark.parametrize(("program", "exit_code"), EXITS.items(), ids=map(str, EXITS.values()))
def test_an_end_is_seen_with_its_exit_code(start, program, exit_code):
    """By a process that is not the parent; before and, on Linux 6.15, after the parent waits."""
    process = start(program)
    peer = PeerProcess(name_of(process.pid))
    assert peer.descriptor >= 0
    assert not peer.ended()
    process.stdin.close()
    awaited_end(peer)
    assert peer.exit_code() == exit_code
    process.wait()
    assert peer.ended()
    release = tuple(map(int, os.uname().release.split(".")[:2]))
    assert peer.exit_code() in ({exit_code} if release >= (6, 15) else {exit_code, None})
    peer.close()
    peer.close()


def test_a_process_that_is_stopped_has_not_ended(start):
    process = start("")
    peer = PeerProcess(name_of(process.pid))
    process.send_signal(19)
    time.sleep(0.1)
    assert not peer.ended()
    peer.close()


def test_a_process_that_was_gone_before_has_ended(start):
    process = start("")
    name = name_of(process.pid)
    process.stdin.close()
    process.wait()
    peer = PeerProcess(name)
    assert peer.ended()
    assert peer.exit_code() is None
    assert peer.descriptor == -1


def test_another_process_with_the_same_pid_is_not_the_one(start):
    process = start("")
    name = name_of(process.pid)
    peer = PeerProcess(dataclasses.replace(name, started=name.started - 1))
    assert peer.ended()
    assert peer.descriptor == -1
    assert not PeerProcess(dataclasses.replace(name, started=0)).ended(), "not known, not checked"


@pytest.mark.parametrize("why", ["namespace", "kernel"])
def test_where_there_is_no_pidfd_nothing_is_claimed(start, why, monkeypatch):
    process = start("")
    name = name_of(process.pid)
    if why == "namespace":
        name = dataclasses.replace(name, namespaces="pid:[1]")
    else:

        def refuse(pid: int) -> int:
            raise PermissionError(1, "seccomp")

        monkeypatch.setattr(os, "pidfd_open", refuse)
    peer = PeerProcess(name)
    assert peer.descriptor == -1
    process.kill()
    process.wait()
    assert not peer.ended()
    assert peer.exit_code() is None


def test_a_foreign_proc_is_not_trusted(monkeypatch):
    """In a PID namespace with its host's /proc, /proc/PID is another process."""
    monkeypatch.setattr(module, "_proc_is_ours", lambda pid: False)
    assert Process.here().started == 0
    peer = PeerProcess(Process.here())
    assert not peer.ended()
    peer.close()


def test_ends_in_words():
    assert fate(-9) == "killed by SIGKILL"
    assert fate(-99) == "killed by signal 99"
    assert fate(3) == "its process ended with exit code 3"
    assert fate(None) == "its process is gone, how it ended cannot be told"
    assert fate(None, "it left") == "it left"
    assert fate(0, "it left") == "its process ended with exit code 0 (it left)"

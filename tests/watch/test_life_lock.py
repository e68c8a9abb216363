"""The life lock: held by a process that lives or is stopped, abandoned by one that died."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from pcie_comm.watch import life_lock
from pcie_comm.watch.life_lock import NBYTES, Life, LifeLock

HOLDER = """
import ctypes, importlib.util, mmap, os, sys, threading, time
spec = importlib.util.spec_from_file_location("life_lock", sys.argv[1])
sys.modules["life_lock"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
memory = mmap.mmap(os.open(sys.argv[2], os.O_RDWR), 4096)
lock = module.LifeLock(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
ballast = bytearray(b"x") * (int(sys.argv[3]) << 20)
def hold():
    lock.hold()
    print("held", flush=True)
    time.sleep(60)
threading.Thread(target=hold, daemon=True).start()
if sys.stdin.readline() == "exec\\n":
    os.execvp("sleep", ["sleep", "60"])
"""
"""Holds the lock on a thread of its own, as the watchdog does, until its input ends."""


@pytest.fixture
def page(tmp_path) -> Iterator[tuple[str, LifeLock]]:
    """A new lock in a file that two processes map."""
    path = tmp_path / "page"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    lock = LifeLock(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    lock.initialise()
    yield str(path), lock
    del memory


@pytest.fixture
def hold(page) -> Iterator:
    """Start holders of the page's lock; wait until they hold it."""
    started = []

    def start(ballast_mb: int = 1) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, life_lock.__file__, page[0], str(ballast_mb)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            pipe.close()


def awaited(lock: LifeLock, life: Life) -> float:
    """Wait until the lock stands so; return how long that took."""
    started = time.monotonic()
    while lock.look() is not life:
        assert time.monotonic() - started < 10.0, lock.look()
    return time.monotonic() - started


def test_a_process_that_is_killed_abandons_its_lock_for_all_to_see(page, hold):
    lock = page[1]
    assert lock.look() is Life.FREE
    process = hold()
    assert [lock.look() for _ in range(3)] == [Life.HELD] * 3
    process.kill()
    awaited(lock, Life.ABANDONED)
    assert [lock.look() for _ in range(3)] == [Life.ABANDONED] * 3
    process.wait()
    assert lock.look() is Life.ABANDONED


def test_a_process_that_is_stopped_keeps_its_lock(page, hold):
    lock, process = page[1], hold()
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    assert lock.look() is Life.HELD
    process.send_signal(signal.SIGCONT)
    time.sleep(0.1)
    assert lock.look() is Life.HELD


@pytest.mark.parametrize("end", ["", "exec\n"])
def test_a_process_that_ends_or_becomes_another_program_abandons_its_lock(page, hold, end):
    process = hold()
    process.stdin.write(end)
    process.stdin.close()
    awaited(page[1], Life.ABANDONED)


def test_the_lock_shows_a_death_long_before_a_large_process_is_gone(page, hold):
    """What a pidfd alone would miss: its process is still being taken down."""
    process = hold(int(os.environ.get("PCIE_COMM_TEST_BALLAST_MB", "500")))
    descriptor = os.pidfd_open(process.pid)
    started = time.monotonic()
    process.kill()
    awaited(page[1], Life.ABANDONED)
    lock_s = time.monotonic() - started
    process.wait()
    gone_s = time.monotonic() - started
    os.close(descriptor)
    print(f"lock_s={lock_s:.4f} gone_s={gone_s:.4f}")
    assert lock_s <= gone_s


def test_a_thread_that_gives_the_lock_back_leaves_it_free(page):
    lock = page[1]
    held, release = threading.Event(), threading.Event()

    def on_thread() -> None:
        lock.hold()
        held.set()
        release.wait(10)
        lock.release()

    thread = threading.Thread(target=on_thread)
    thread.start()
    held.wait(10)
    assert lock.look() is Life.HELD
    release.set()
    thread.join()
    assert lock.look() is Life.FREE


def test_a_thread_that_ends_with_the_lock_abandons_it(page):
    thread = threading.Thread(target=page[1].hold)
    thread.start()
    thread.join()
    assert awaited(page[1], Life.ABANDONED) < 1.0


def test_who_holds_takes_over_from_one_who_died_while_looking(page):
    """Somebody looked at a free lock and was killed before giving it back."""
    lock = page[1]
    looker = threading.Thread(target=lock.hold)
    looker.start()
    looker.join()
    lock.hold()
    seen = []
    other = threading.Thread(target=lambda: seen.append(lock.look()))
    other.start()
    other.join()
    assert seen == [Life.HELD]
    lock.release()
    assert lock.look() is Life.FREE


def test_the_room_for_a_lock_is_large_enough():
    """initialise() writes no byte beyond it."""
    buffer = ctypes.create_string_buffer(b"\xee" * 2 * NBYTES, 2 * NBYTES)
    LifeLock(ctypes.addressof(buffer)).initialise()
    assert buffer.raw[NBYTES - 4 :] == b"\xee" * (NBYTES + 4), "also the mark is left alone"
    assert buffer.raw[:NBYTES] != b"\xee" * NBYTES

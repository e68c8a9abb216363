"""A watch tells its rank of its peers and the peers of its rank; the thread behind it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher import run_threads

from pcie_comm import PeerAbortedError, PeerTimeoutError
from pcie_comm.bootstrap import ThreadBootstrap
from pcie_comm.watch import watchdog
from pcie_comm.watch.cause import Cause, Kind
from pcie_comm.watch.life_lock import Life
from pcie_comm.watch.peer import Peer
from pcie_comm.watch.process import Process
from pcie_comm.watch.roll_call import RollCall, State
from pcie_comm.watch.watch import Watch, open_watch

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

ROOT = Path(__file__).resolve().parents[2]


def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pcie_comm.watchdog"]


class Pair:
    """Two watches of this process that take each other for processes of other containers."""

    def __init__(self, world_size: int = 2) -> None:
        here = Process.here()
        names = [
            dataclasses.replace(here, token=f"rank {r}", namespaces=f"pid:[{r}]")
            for r in range(world_size)
        ]
        first = RollCall.create(one_process=False)
        pages = [first, *(RollCall.attach(first.name, 0) for _ in range(world_size - 1))]
        first.unlink()
        self.causes: list[list[Cause]] = [[] for _ in range(world_size)]
        self.watches = [
            Watch(rank, names, page, self.causes[rank].append) for rank, page in enumerate(pages)
        ]
        for watch in self.watches:
            watch.attend()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for watch in made.watches:
        watch.leave()
    assert watchdogs() == []
    assert watchdog.watched() == 0


def awaited(found: list[Cause]) -> Cause:
    deadline = time.monotonic() + 5.0
    while not found:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found[0]


def test_one_thread_serves_all_watches_and_ends_with_the_last(pair):
    assert len(watchdogs()) == 1
    pair.watches[0].leave()
    assert len(watchdogs()) == 1
    pair.watches[1].leave()
    assert watchdogs() == []
    again = Pair()
    assert len(watchdogs()) == 1
    for watch in again.watches:
        watch.leave()


def test_an_abort_reaches_the_peer_and_the_own_rank_once(pair):
    first, second = pair.watches
    first.abort("why")
    first.abort("again")
    assert pair.causes[0] == [Cause(0, Kind.ABORTED, "why")]
    assert awaited(pair.causes[1]) == Cause(0, Kind.ABORTED, "why")
    time.sleep(3 * watchdog.TICK_S)
    assert len(pair.causes[1]) == 1
    error = second.error()
    assert isinstance(error, PeerAbortedError)
    assert (error.rank, error.peer) == (1, 0)


def test_who_leaves_is_not_missed(pair):
    pair.watches[0].leave()
    time.sleep(3 * watchdog.TICK_S)
    assert pair.watches[1].cause is None
    pair.watches[0].abort("too late")
    pair.watches[0].exit()
    assert pair.watches[1].cause is None
    assert pair.causes[0] == []


def test_the_life_lock_is_held_from_attending_to_leaving(pair):
    watch = pair.watches[0]
    lock = watch._own.life_lock()
    assert lock.look() is Life.HELD
    watch.retire()
    assert lock.look() is Life.FREE
    del lock


def test_who_gives_up_for_a_late_peer_names_it():
    """Rank 2 learns from rank 1, which waited for rank 0, before its own wait ends."""
    trio = Pair(3)
    trio.watches[1].give_up(PeerTimeoutError("rank 0 did not arrive", peer=0))
    late = awaited(trio.causes[2])
    assert (late.peer, late.kind, late.reason) == (0, Kind.LATE, "as rank 1 saw")
    own = awaited(trio.causes[0])
    assert (own.peer, own.kind) == (1, Kind.ABORTED)
    assert "gave up after PeerTimeoutError: rank 0 did not arrive" in own.reason
    for watch in trio.watches:
        watch.leave()


def test_an_exit_code_that_comes_late_is_filled_in(pair, monkeypatch):
    monkeypatch.setattr(Peer, "exit_code", lambda peer: None)
    pair.watches[1]._own.say(State.EXITED, "it ended")
    cause = awaited(pair.causes[0])
    assert (cause.kind, cause.exit_code) == (Kind.DIED, None)
    monkeypatch.setattr(Peer, "exit_code", lambda peer: 3)
    pair.watches[0].look()
    assert cause.exit_code == 3


def test_a_watchdog_that_breaks_gives_the_locks_back(pair, monkeypatch):
    """Else it would tell the peers that this process died."""
    lock = pair.watches[0]._own.life_lock()
    noted = []
    monkeypatch.setattr(threading, "excepthook", noted.append)

    def fail(watch: Watch) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(Watch, "look", fail)
        watchdogs()[0].join(5)
    assert [note.exc_type for note in noted] == [ZeroDivisionError]
    assert lock.look() is Life.FREE
    del lock


# --- opening -------------------------------------------------------------------------------------


def test_ranks_of_one_process_need_no_thread_and_hear_an_abort_at_once():
    ends = ThreadBootstrap.create(3)
    causes: list[list[Cause]] = [[], [], []]
    watches = run_threads(lambda r: open_watch(ends[r], causes[r].append, 10.0), 3)
    assert watchdogs() == []
    assert all(watch.one_process for watch in watches)
    watches[1].abort("why")
    assert causes == [[Cause(1, Kind.ABORTED, "why")]] * 3
    assert isinstance(ends[2].trouble(), PeerAbortedError)
    for watch in watches:
        watch.leave()


def test_a_wait_of_the_bootstrap_ends_with_an_abort():
    ends = ThreadBootstrap.create(2)
    watches = run_threads(lambda r: open_watch(ends[r], lambda cause: None, 10.0), 2)
    threading.Timer(0.1, watches[1].abort, ["why"]).start()
    started = time.monotonic()
    with pytest.raises(PeerAbortedError, match=r"rank 1 \(why\)"):
        ends[0].all_gather(b"", 30.0)
    assert time.monotonic() - started < 5.0
    for watch in watches:
        watch.leave()


def test_ranks_that_do_not_share_shared_memory_are_told_so(monkeypatch):
    """B40: two containers without --ipc=host; the first rank's page is not to be found."""
    ends = ThreadBootstrap.create(2)
    for end in ends:
        end.same_process = False
    attach = RollCall.attach
    monkeypatch.setattr(RollCall, "attach", lambda name, peer: attach(name[:-1] + "z", peer))
    errors = run_threads(lambda r: open_watch(ends[r], lambda cause: None, 10.0), 2)
    assert "published name" in str(errors[1])
    assert isinstance(errors[0], PeerAbortedError)
    assert watchdogs() == []


# --- the end of the process, and forks -----------------------------------------------------------

ENDING = """
import os, sys, time
sys.path[:0] = ["tests"]
from watch.test_watch import Pair, State
from pcie_comm.watch import watchdog
pair = Pair()
pages = [watch._roll_call for watch in pair.watches]
def look():
    print([State(pages[0].line(rank).state).name for rank in (0, 1)], flush=True)
{rest}
"""


def run_ending(rest: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(rest=rest)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_an_interpreter_that_ends_says_so_and_does_not_hang():
    rest = "pair.watches[1].abort('why'); watchdog._exit(); look()"
    assert run_ending(rest) == ["['EXITED', 'ABORTED']"]


def test_a_forked_child_says_nothing_for_its_parent():
    """It exits as an interpreter does; the lines and the thread are its parent's."""
    rest = """
import warnings
warnings.simplefilter("ignore")
if os.fork() == 0:
    sys.exit(0 if watchdog.watched() == 0 else 1)
_, status = os.wait()
time.sleep(0.1)
look()
print(status, pair.watches[0].cause, watchdog.watched())
"""
    assert run_ending(rest) == ["['PRESENT', 'PRESENT']", "0 None 2"]

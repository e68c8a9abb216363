"""What must end although nobody answers: stores that stand still, Ctrl-C, forks, late ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from launcher import RanksFailedError, run_ranks
from leaks import own_files, own_mappings
from worlds import small

from pcie_comm import (
    ClosedError,
    CommError,
    Config,
    PcieDcpGroup,
    PeerAbortedError,
    PeerTimeoutError,
    local_world,
)
from pcie_comm.store_requests import Requests, SilenceError
from pcie_comm.watch import watchdog

ROWS = torch.ones(1, 4)


def call(group: PcieDcpGroup) -> torch.Tensor:
    return group.all_gather_pair(ROWS, ROWS)[0]


def seconds_of(fn, *kinds: type[BaseException]) -> float:
    """Return how long something takes, which must raise one of these errors, if there are any."""
    started = time.monotonic()
    if kinds:
        with pytest.raises(kinds):
            fn()
    else:
        fn()
    return time.monotonic() - started


# --- stores --------------------------------------------------------------------------------------


class Still:
    """A store whose host stands still."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def get(self, key: str) -> bytes:
        assert self.go_on.wait(30)
        return key.encode()


def test_a_request_ends_and_the_next_fails_at_once():
    requests = Requests(Still())
    assert 0.2 < seconds_of(lambda: requests.ask(lambda s: s.get("x"), 0.2), SilenceError) < 2
    assert seconds_of(lambda: requests.ask(lambda s: s.get("x"), 20), SilenceError) < 0.1
    requests.store.go_on.set()
    answering = Requests(requests.store)
    assert answering.ask(lambda store: store.get("x")) == b"x"
    with pytest.raises(ZeroDivisionError):
        answering.ask(lambda store: 1 / 0)
    deadline = time.monotonic() + 5
    while any(one.name == "pcie_comm.store" for one in threading.enumerate()):
        assert time.monotonic() < deadline, "threads that nobody needs end"
        time.sleep(0.01)


def test_a_wait_for_a_store_ends_when_it_makes_no_sense_any_more():
    def look() -> None:
        raise PeerAbortedError("a rank aborted")

    requests = Requests(Still())
    assert seconds_of(lambda: requests.ask(lambda s: s.get("x"), 20, look), PeerAbortedError) < 2
    requests.store.go_on.set()


def the_store_stands_still(rank: int, world_size: int, how: str) -> None:
    transport = "torch_dist" if how == "torch_dist" else "auto"
    group = PcieDcpGroup(world_size, "cpu", None, transport, Config(timeout_s=1, setup_timeout_s=2))
    pids = group.run("all_gather", torch.tensor([[os.getpid()]]))
    if rank == 0:
        wake(os.getpid(), 20.0)  # if the peer does not
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    time.sleep(0.5)
    try:
        if how == "close":
            assert seconds_of(group.close, PeerTimeoutError) < 6
            return
        assert seconds_of(lambda: call(group), PeerTimeoutError) < 4
        assert seconds_of(group.close) < 3
    finally:
        wake(int(pids[0, 0]), 1.5)


def wake(pid: int, seconds: float) -> None:
    """Have a stopped process go on, when this one has ended."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"], start_new_session=True)


@pytest.mark.parametrize("how", ["call", "close", "torch_dist"])
def test_a_store_whose_host_is_stopped_holds_up_nobody(how):
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(the_store_stands_still, 2, args=(how,))
    assert caught.value.reports == {0: "died with exit code 0"}


def a_live_peer_aborts(rank: int, world_size: int, how: str) -> None:
    dist.init_process_group("gloo")
    config = Config(timeout_s=2, setup_timeout_s=20)
    group = PcieDcpGroup(world_size, "cpu", dist.group.WORLD, config=config)
    call(group)
    if rank == 0:
        time.sleep(0.5)
        group.abort()
        group.close()
        time.sleep(1)
    elif how == "close":
        assert seconds_of(group.close) < 5
    else:
        assert seconds_of(lambda: group.channel("draft"), PeerAbortedError) < 5
        group.close()


@pytest.mark.parametrize("how", ["close", "channel"])
def test_an_abort_is_seen_in_an_exchange_of_a_process_group(how):
    run_ranks(a_live_peer_aborts, 2, args=(how,))


def a_rank_comes_late(rank: int, world_size: int) -> None:
    group = PcieDcpGroup(world_size, "cpu", config=Config(timeout_s=5, setup_timeout_s=2))
    call(group)
    if rank == 0:
        seconds_of(lambda: group.channel("draft"), PeerTimeoutError)
    else:
        time.sleep(2.5)
    group.check()
    call(group)  # the lane that was there still works
    if rank == 1:
        assert seconds_of(lambda: group.channel("draft"), CommError) < 1.5
    group.close()
    assert own_files() == []


def test_a_rank_that_comes_late_to_a_channel_is_told_at_once():
    run_ranks(a_rank_comes_late, 2)


# --- signals and forks ---------------------------------------------------------------------------


def interrupted(rank: int, world_size: int) -> None:
    group = PcieDcpGroup(world_size, "cpu", config=Config(timeout_s=2, setup_timeout_s=20))
    call(group)
    if rank == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        assert seconds_of(group.close, KeyboardInterrupt) < 5
        group.close()
        assert own_mappings() == []
        assert watchdog.watched() == 0
    else:
        time.sleep(1.5)
        assert seconds_of(group.close) < 5


def test_ctrl_c_in_close_gives_back_everything_and_tells_the_peers():
    run_ranks(interrupted, 2)


def torn(rank: int, world_size: int) -> int:
    """Make and close groups while signals rain; what is left must be whole."""
    until = time.monotonic() + 5
    if rank == 1:
        while time.monotonic() < until:
            try:
                with PcieDcpGroup(2, "cpu", config=Config(timeout_s=1, setup_timeout_s=1)) as group:
                    call(group)
            except CommError:
                pass
        return 0
    rain, count = threading.Event(), 0

    def drop() -> None:
        while not rain.wait(0.013):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=drop, daemon=True).start()
    while time.monotonic() < until:
        try:
            group = PcieDcpGroup(2, "cpu", config=Config(timeout_s=1, setup_timeout_s=1))
            call(group)
            group.close()
        except (KeyboardInterrupt, CommError):
            count += 1
    rain.set()
    return count


def test_signals_at_any_time_crash_nobody():
    assert run_ranks(torn, 2, timeout_s=150)[0] > 10


def test_a_forked_child_leaves_a_world_as_one_that_is_closed():
    with local_world(2, "cpu", config=small()) as world:
        world.run(call)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                world.close()
                world.run(call)
            except ClosedError:
                code = 0
            finally:
                os._exit(code)
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        world.run(call)


def test_a_thread_that_cannot_start_is_missed_by_nobody_later(monkeypatch):
    monkeypatch.setattr(watchdog, "_state", watchdog._Watchdog())
    watch = type("Watch", (), {"one_process": False, "look": lambda self: None})()
    watch.hold_life_lock = watch.release_life_lock = lambda: held.append(threading.get_ident())
    held: list[int] = []

    def refuse(self) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            watchdog.add(watch)
    watchdog.remove(watch)
    assert held == []
    watchdog.add(watch)
    assert len(held) == 1
    assert held[0] != threading.get_ident()
    watchdog.remove(watch)
    assert len(held) == 2
    assert watchdog._state.thread is None


def test_a_call_that_comes_with_close_is_refused():
    """It has passed the first look whether the channel is open."""
    with local_world(1, "cpu", config=small()) as world:
        channel = world.groups[0]._channels["default"]
        channel.engine.synchronize()
        with pytest.raises(ClosedError, match="was closed"):
            call(channel)


def test_a_user_without_a_home_builds_groups():
    program = (
        "import os; os.environ.pop('HOME', None); os.environ.pop('XDG_CACHE_HOME', None)\n"
        "import pathlib; pathlib.Path.home = classmethod(lambda cls: (_ for _ in ()).throw("
        "RuntimeError('Could not determine home directory.')))\n"
        "import torch, pcie_comm\n"
        "with pcie_comm.local_world(1, 'cpu') as world:\n"
        "    print(world.groups[0].run('all_reduce', torch.ones(1, 4)).sum().item())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == "4.0\n", ended.stderr

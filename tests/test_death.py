"""Ranks that are processes and come to their end: seen, named, survived.

tools/faults.py draws such ends at random; here are those that need more than chance. A torch import
costs seconds, so each test does several checks in one set of processes.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from launcher import RanksFailedError, free_port, run_ranks
from leaks import own_files, own_mappings
from worlds import pair_of, small

from pcie_comm import (
    ClosedError,
    PcieDcpGroup,
    PeerAbortedError,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
)
from pcie_comm.bootstrap import Bootstrap, open_bootstrap
from pcie_comm.watch import watchdog
from pcie_comm.watch.process import Process

ROOT = Path(__file__).resolve().parent.parent
HEAD_START_S = 0.5
SOON_S = 1.0
"""What takes less than 0.1 s as a rule may take so long here, on a machine with other work."""


def raised_by(fn) -> tuple[PeerError, float]:
    """Return the error about a peer that `fn` raises, and after how many seconds."""
    started = time.monotonic()
    with pytest.raises(PeerError) as caught:
        fn()
    elapsed_s = time.monotonic() - started
    return caught.value.with_traceback(None), elapsed_s  # frames hold views of the slabs


def wait_for_trouble(group: PcieDcpGroup) -> None:
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        group.check()
        time.sleep(0.001)


def call(group: PcieDcpGroup) -> list[float]:
    return group.all_gather_pair(*pair_of(float(group.rank)))[0][0, ::4].tolist()


def assert_clean() -> None:
    gc.collect()
    assert own_files() == own_mappings() == []
    assert watchdog.watched() == 0


# --- containers ----------------------------------------------------------------------------------


def in_other_namespaces(rank: int, world_size: int) -> None:
    """B40: no pid of a peer means anything here; stopped is not dead, dead is seen at once."""
    here = Process.here()
    Process.here = lambda: dataclasses.replace(here, namespaces=f"pid:[{rank}]")
    group = PcieDcpGroup(world_size, device="cpu", config=small(timeout_s=1.5))
    assert call(group) == [0.0, 1.0, 2.0]
    if rank == 1:
        time.sleep(HEAD_START_S)
        os.kill(os.getpid(), signal.SIGKILL)
    error, elapsed_s = raised_by(lambda: call(group))
    assert isinstance(error, PeerDiedError), error
    assert (error.peer, error.exit_code) == (1, None)
    assert elapsed_s < HEAD_START_S + SOON_S
    assert "killed" not in group.describe()["peers"]["rank 1"]
    group.close()
    two = PcieDcpGroup([0, 2], device="cpu", config=small(timeout_s=1.5))
    assert call(two) == [0.0, 1.0]
    if rank == 2:
        time.sleep(0.1)
        subprocess.Popen([sys.executable, "-c", RESUME, str(os.getpid())])
        os.kill(os.getpid(), signal.SIGSTOP)
        assert isinstance(raised_by(lambda: wait_for_trouble(two))[0], PeerAbortedError)
    else:
        error, elapsed_s = raised_by(lambda: call(two))
        assert isinstance(error, PeerTimeoutError), error
        assert (error.peer, elapsed_s >= 1.5) == (1, True)
        assert "its process has not run for 1." in str(error)
    two.close()
    assert_clean()


RESUME = "import os, signal, sys, time; time.sleep(4); os.kill(int(sys.argv[1]), signal.SIGCONT)"


def test_b40_ranks_in_different_pid_namespaces():
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(in_other_namespaces, 3)
    assert caught.value.reports == {1: "died with exit code -9"}


CONTAINED = """
import os, signal, sys, time
sys.path[:0] = ["tests"]
from test_death import *
group = PcieDcpGroup(2, device="cpu", config=small())
call(group)
if group.rank == 1:
    time.sleep(HEAD_START_S)
    os.kill(os.getpid(), signal.SIGKILL)
error, elapsed_s = raised_by(lambda: call(group))
print(os.getpid(), type(error).__name__, error.peer, elapsed_s < HEAD_START_S + SOON_S, flush=True)
group.close()
"""


def test_b40_a_rank_in_a_container_of_its_own():
    """Rank 1 in a real PID namespace, below a process that plays init there."""
    wrap = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", '"$@" & wait', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*wrap, "true"], check=False).returncode:
        pytest.skip("no right to make a PID namespace")
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    shared["MASTER_PORT"] = str(free_port())
    program = [sys.executable, "-c", CONTAINED]
    ranks = [
        subprocess.Popen(
            [*(wrap if rank else []), *program],
            env={**shared, "RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=60)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert said == [f"{ranks[0].pid} PeerDiedError 1 True\n", ""]


# --- rendezvous ----------------------------------------------------------------------------------


def the_store_goes_too(rank: int, world_size: int) -> None:
    """Rank 0 hosts the store; without a launcher that does, no further rendezvous is to be had."""
    group = PcieDcpGroup(world_size, device="cpu", config=small())
    if rank == 0:
        time.sleep(HEAD_START_S)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        error, elapsed_s = raised_by(lambda: group.channel("draft"))
    else:
        error, elapsed_s = raised_by(lambda: call(group))
    assert isinstance(error, PeerDiedError), error
    assert (error.peer, error.exit_code) == (0, -9)
    assert elapsed_s < HEAD_START_S + SOON_S
    started = time.monotonic()
    group.close()
    with PcieDcpGroup([rank], device="cpu", config=small()) as alone:
        assert call(alone) == [0.0]
    assert time.monotonic() - started < SOON_S
    assert_clean()


def test_the_rank_that_hosts_the_store_dies():
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(the_store_goes_too, 3)
    assert caught.value.reports == {0: "died with exit code -9"}


def falling(bootstrap: Bootstrap, step: int) -> Bootstrap:
    """Let this process end at exchange `step`."""
    exchange, steps = bootstrap._exchange, iter(range(1, 100))

    def fall(payload: bytes, timeout_s: float) -> list[bytes]:
        if next(steps) == step:
            time.sleep(HEAD_START_S)
            os._exit(5)
        return exchange(payload, timeout_s)

    bootstrap._exchange = fall  # type: ignore[method-assign]
    return bootstrap


def through_gloo(rank: int, world_size: int) -> None:
    """A process group breaks when a member ends; the error still names the rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    bootstrap = open_bootstrap([2, 1, 0], dist.group.WORLD, small())
    if rank == 2:
        falling(bootstrap, 4)
    error, elapsed_s = raised_by(
        lambda: PcieDcpGroup.from_bootstrap(bootstrap, "cpu", config=small())
    )
    assert isinstance(error, PeerDiedError), error
    assert (error.peer, error.exit_code) == (0, 5)
    assert elapsed_s < HEAD_START_S + 2 * SOON_S
    del error
    assert_clean()


def test_a_member_of_a_process_group_ends_during_set_up():
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(through_gloo, 3)
    assert caught.value.reports == {2: "died with exit code 5"}


# --- ends of other kinds -------------------------------------------------------------------------


def ends_of_other_kinds(rank: int, world_size: int) -> None:
    """A fork of a rank is no rank; a program that ends without close() says so."""
    group = PcieDcpGroup(world_size, device="cpu", config=small())
    child = os.fork()
    if child == 0:
        try:
            group.close()
            group.check()
        except ClosedError:
            sys.exit(0)  # with exit handlers and finalisers
        sys.exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert call(group) == [0.0, 1.0]
    time.sleep(0.1)
    group.check()
    if rank == 0:
        print(f"status of a fork: {child > 0}")
        sys.exit(3)
    error, elapsed_s = raised_by(lambda: call(group))
    assert isinstance(error, PeerDiedError), error
    assert error.peer == 0
    assert error.exit_code in (3, None)
    assert "the interpreter ended without close()" in str(error)
    assert elapsed_s < 2 * SOON_S
    group.close()
    assert_clean()


PROGRAM = """
import os, sys
sys.path[:0] = ["tests"]
from test_death import ends_of_other_kinds
ends_of_other_kinds(int(os.environ["RANK"]), 2)
"""


def test_a_fork_is_no_rank_and_a_program_that_ends_without_close_says_so():
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    shared["MASTER_PORT"] = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM],
            env={**shared, "RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=60)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [3, 0], said

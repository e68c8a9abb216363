"""local_world: results in rank order, the root cause first, nobody left waiting."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
from worlds import pair_of, small

from pcie_comm import (
    BrokenError,
    ClosedError,
    InvalidArgumentError,
    LocalWorld,
    PeerAbortedError,
    PeerTimeoutError,
    UnsupportedError,
    local,
    local_world,
)

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def call(group):
    return group.all_gather_pair(*pair_of(float(group.rank)))[0][0, ::4].tolist()


def test_results_come_in_rank_order_from_threads_of_their_own():
    def on_rank(group):
        time.sleep(0.01 * (3 - group.rank))
        return group.rank, threading.get_ident()

    with local_world(4, "cpu", config=small()) as world:
        assert isinstance(world, LocalWorld)
        assert [group.rank for group in world.groups] == [0, 1, 2, 3]
        assert world.streams == []
        results = world.run(on_rank)
        assert [rank for rank, _ in results] == [0, 1, 2, 3]
        assert len({thread for _, thread in results}) == 4


def test_the_root_cause_is_raised_and_waiting_ranks_are_aborted(monkeypatch):
    """Ranks 0 and 2 wait for rank 1, which fails on its host: no timeout, and not their errors."""
    monkeypatch.setattr(local, "PATIENCE_S", 0.1)
    ends = {}

    def on_rank(group):
        if group.rank == 1:
            raise LookupError("the root cause")
        try:
            call(group)
        except PeerAbortedError as error:
            ends[group.rank] = error
            raise

    with local_world(3, "cpu", config=small(timeout_s=60.0)) as world:
        started = time.monotonic()
        with pytest.raises(LookupError, match="the root cause"):
            world.run(on_rank)
        assert 0.1 <= time.monotonic() - started < 2.0
        assert set(ends) == {0, 2}
        with pytest.raises(BrokenError):
            world.run(call)


def test_ranks_that_end_in_time_are_not_aborted():
    """An error on one rank that the others do not wait for leaves the world in use."""

    def on_rank(group):
        if group.rank == 1:
            raise LookupError
        time.sleep(0.05)

    with local_world(3, "cpu", config=small()) as world:
        with pytest.raises(LookupError):
            world.run(on_rank)
        assert world.run(call) == [[0.0, 1.0, 2.0]] * 3


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_any_exception_of_a_rank_is_raised(kind):
    def on_rank(group):
        if group.rank:
            raise kind("from rank 1")

    with local_world(2, "cpu", config=small()) as world, pytest.raises(kind, match="from rank 1"):
        world.run(on_rank)


def test_errors_about_peers_are_raised_if_there_is_nothing_else():
    with local_world(2, "cpu", config=small(timeout_s=0.2)) as world:
        with pytest.raises(PeerTimeoutError) as caught:
            world.run(lambda group: call(group) if group.rank == 0 else None)
        assert caught.value.rank == 0


@pytest.mark.parametrize("task", [None, 5, "call"])
def test_what_is_no_function_is_refused(task):
    with local_world(2, "cpu", config=small()) as world:
        with pytest.raises(InvalidArgumentError, match=r"fn=.* is no function"):
            world.run(task)
        assert world.run(call) == [[0.0, 1.0]] * 2


def test_a_world_may_be_closed_early_and_twice():
    with local_world(2, "cpu", config=small()) as world:
        world.close()
        world.close()
        with pytest.raises(ClosedError):
            world.run(call)
        with pytest.raises(ClosedError):
            world.groups[0].check()


def test_an_exception_in_the_block_passes_and_the_world_is_closed():
    with pytest.raises(LookupError, match="mine"), local_world(2, "cpu", config=small()) as world:
        raise LookupError("mine")
    with pytest.raises(ClosedError):
        world.run(call)


def test_the_same_opening_may_be_entered_again():
    opening = local_world(2, "cpu", config=small())
    for _ in range(2):
        with opening as world:
            assert world.run(call) == [[0.0, 1.0]] * 2


def test_building_fails_with_the_root_cause():
    """Each rank fails, and rank 0 would be first: a peer's failure is not the cause."""
    with pytest.raises(InvalidArgumentError, match="'toaster' is no torch device"):
        local_world(3, "toaster").__enter__()
    with pytest.raises(InvalidArgumentError, match="transport='pigeon' is unknown"):
        local_world(3, "cpu", transport="pigeon").__enter__()


def test_streams_of_one_process_need_hardware_queues(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    with pytest.raises(UnsupportedError, match="need 9 hardware queues") as caught:
        local_world(8, "cuda:0").__enter__()
    assert caught.value.reason == "too few hardware queues"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "many")
    with pytest.raises(InvalidArgumentError, match="CUDA_DEVICE_MAX_CONNECTIONS='many'"):
        local_world(2, "cuda:0").__enter__()


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_no_gpu_needs_no_hardware_queues(device, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with local_world(2, device, config=small()) as world:
        assert world.run(call) == [[0.0, 1.0]] * 2


@pytest.mark.parametrize("place", ["run", "close", "build"])
def test_ctrl_c_ends_waits(place):
    """Of the ranks too: nobody waits for `timeout_s`, or for `setup_timeout_s`."""
    program = f"""
import os, signal, sys, threading, time, torch
from pcie_comm import Config, PcieDcpGroup, local_world
def interrupt(): threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
def wait(group):
    if group.rank == 0:
        return group.run("all_reduce", torch.ones(1, 4))
build, late = PcieDcpGroup.from_bootstrap, "{place}"
def make(bootstrap, *rest):
    if bootstrap.rank or late != "build":
        return build(bootstrap, *rest)
    interrupt()
    return bootstrap.all_gather(b"", 25) and bootstrap.all_gather(b"", 25)
PcieDcpGroup.from_bootstrap = make
started = time.monotonic()
try:
    with local_world(2, "cpu", config=Config(timeout_s=25, setup_timeout_s=25)) as world:
        if late == "close":
            world.groups[1].close = lambda: time.sleep(2)
        interrupt()
        if late == "run":
            world.run(wait)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - started < 10)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == "interrupted True\n", ended.stderr


def test_a_world_that_was_not_entered_says_so():
    with pytest.raises(AttributeError, match="enter it first"):
        local_world(1, "cpu").run(call)

"""Rendezvous of processes: the launcher's store, torch process groups, and their ends.

A torch import costs seconds, so each test does several checks in one set of processes.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from launcher import RanksFailedError, free_port, run_ranks

from pcie_comm import bootstrap_torch
from pcie_comm.bootstrap import Bootstrap, agree, compare, open_bootstrap
from pcie_comm.bootstrap_store import StoreBootstrap
from pcie_comm.bootstrap_torch import ProcessGroupBootstrap
from pcie_comm.config import Config
from pcie_comm.errors import (
    InvalidArgumentError,
    MismatchError,
    PeerAbortedError,
    PeerTimeoutError,
)

TIMEOUT_S = 10.0


def round_trip(end: Bootstrap, word: str) -> None:
    """One exchange of unequal lengths, one agreement with a failing rank."""
    payloads = [f"{word} {rank}".encode() * rank for rank in range(end.world_size)]
    assert end.all_gather(payloads[end.rank], TIMEOUT_S) == payloads
    assert end.all_gather(b"", TIMEOUT_S) == [b""] * end.world_size
    binary = bytes(range(256)) * 100
    assert end.all_gather(binary, TIMEOUT_S) == [binary] * end.world_size

    def work() -> bytes:
        if end.rank == 1:
            raise RuntimeError(f"{word}: rank one is broken")
        return b""

    with pytest.raises(RuntimeError if end.rank == 1 else PeerAbortedError, match="one is broken"):
        agree(end, "a step", work, TIMEOUT_S)


def check_mismatch(end: Bootstrap) -> None:
    """B27: each rank raises the same, with every rank's value."""
    records = end.all_gather(json.dumps({"protocol": ["push", "pull"][end.rank]}).encode(), 5)
    with pytest.raises(MismatchError) as caught:
        compare(records, "settings")
    assert caught.value.values == {0: {"protocol": "push"}, 1: {"protocol": "pull"}}


def through_the_launchers_store(rank: int, world_size: int) -> list[int]:
    config = Config(setup_timeout_s=20)
    for attempt in range(3):  # groups of the same ranks, one after another
        end = open_bootstrap(world_size, None, config)
        assert isinstance(end, StoreBootstrap)
        assert end.rank == rank
        round_trip(end, f"attempt {attempt}")
        end.close()
    if rank in (3, 1):
        end = open_bootstrap([3, 1], None, config)
        assert end.rank == [3, 1].index(rank)
        assert end.all_gather(bytes([rank]), TIMEOUT_S) == [b"\3", b"\1"]
        check_mismatch(end)
        end.close()
    two = [open_bootstrap(world_size, None, config) for _ in range(2)]
    for end in reversed(two):  # both alive
        round_trip(end, "two at once")
        end.close()
    orders = [0, 1, 2, 3] if rank < 2 else [3, 2, 1, 0]
    with pytest.raises(MismatchError, match="order of the group") as caught:
        open_bootstrap(orders, None, config)
    assert len(caught.value.values) == world_size
    assert len(bootstrap_torch._launch_stores) == 1
    return [end.rank for end in two]


def test_processes_meet_in_the_launchers_store() -> None:
    results = run_ranks(through_the_launchers_store, 4)
    assert results == [[rank, rank] for rank in range(4)]


def through_gloo(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    config = Config(setup_timeout_s=20)
    whole, odd = dist.group.WORLD, dist.new_group([1, 3])
    # The default group's store: the whole world, subsets, and uneven memberships, again and again.
    for _ in range(2):
        for ranks in (world_size, [3, 1], [0, 1], [0, 2]):
            members = list(range(world_size)) if isinstance(ranks, int) else ranks
            if rank in members:
                end = open_bootstrap(ranks, None, config)
                assert (end.rank, end.world_size) == (members.index(rank), len(members))
                round_trip(end, f"{ranks}")
                end.close()
    # Process groups of the caller, in orders of our own.
    for group, ranks in ((whole, 4), (whole, [2, 0, 3, 1]), (odd, [3, 1]), (odd, 2)):
        members = ranks if isinstance(ranks, list) else dist.get_process_group_ranks(group)
        if rank in members:
            end = open_bootstrap(ranks, group, config)
            assert isinstance(end, ProcessGroupBootstrap)
            assert (end.rank, end.global_ranks) == (members.index(rank), tuple(members))
            assert end.all_gather(bytes([rank]), TIMEOUT_S) == [bytes([r]) for r in members]
            round_trip(end, f"group {ranks}")
            if len(members) == 2:
                check_mismatch(end)
            end.close()
    for ranks, group in ((3, whole), ([0, 1], whole), (4, odd), ([0, 2], odd)):
        with pytest.raises(InvalidArgumentError):
            open_bootstrap(ranks, group, config)
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(InvalidArgumentError, match="unusable"):
        open_bootstrap(4, whole, config)


def test_processes_meet_through_gloo() -> None:
    run_ranks(through_gloo, 4)


def one_rank_never_comes(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    quick = Config(setup_timeout_s=1.0)
    if rank == 0:
        for group, expected in ((None, "ranks 1 of"), (dist.group.WORLD, "at least one rank")):
            started = time.monotonic()
            with pytest.raises(PeerTimeoutError, match=expected):
                open_bootstrap(2, group, quick)
            assert 0.9 < time.monotonic() - started < 5
        started = time.monotonic()
        dist.destroy_process_group()  # gloo has nothing pending that would hold this up
        assert time.monotonic() - started < 5
    else:
        time.sleep(5)
        os._exit(0)  # not even a good-bye


def test_a_rank_that_never_comes_is_not_waited_for() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(one_rank_never_comes, 2)
    assert caught.value.reports == {1: "died with exit code 0"}


@pytest.mark.parametrize("listens", [True, False])
def test_a_store_that_is_none_is_not_waited_for_longer(listens: bool) -> None:
    """Something accepts and says nothing; or nobody is there."""
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        if listens:
            there.listen(8)
        environment = {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(there.getsockname()[1]),
        }
        program = (
            "import time; from pcie_comm import *; started = time.monotonic()\n"
            "try: PcieDcpGroup(2, 'cpu', config=Config(setup_timeout_s=2))\n"
            "except PeerTimeoutError as error: print(time.monotonic() - started, error)"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    seconds, _, text = ended.stdout.partition(" ")
    assert 1.5 < float(seconds) < 6, ended.stderr
    assert ("does not answer" if listens else "refused") in text


PROGRAM = """
import torch
from pcie_comm import Config, PcieDcpGroup
with PcieDcpGroup(2, "cpu", config=Config(setup_timeout_s=20)) as group:
    assert group.run("barrier", torch.zeros(1, 1).int()).shape == (1, 2)
"""


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_ranks_of_torchrun_meet(backend: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    where = [f"--rdzv-backend={backend}", "--nproc-per-node=2", "--nnodes=1"]
    if backend == "static":
        where += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "--node-rank=0"]
    else:
        where += [f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *where, str(program)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def meets(rank: int, world_size: int) -> bool:
    end = open_bootstrap(world_size, None, Config(setup_timeout_s=TIMEOUT_S))
    round_trip(end, "under torchrun")
    assert isinstance(end, StoreBootstrap)
    end.close()
    return end.hosts_store


def test_rank_0_hosts_the_store_where_torchruns_agent_does_not() -> None:
    env = {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert run_ranks(meets, 2, env=env) == [True, False]


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        there.listen(8)
        port = str(there.getsockname()[1])
        names = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in names.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InvalidArgumentError, match=f"MASTER_PORT={port} is in use"):
            open_bootstrap(2, None, Config(setup_timeout_s=5))


def process_group_goes_first(rank: int, world_size: int, ports: list[str]) -> None:
    """B32: no finaliser talks to peers, and the process ends."""
    config = Config(setup_timeout_s=20)

    def opened(port: str) -> list[Bootstrap]:
        os.environ["MASTER_PORT"] = port
        dist.init_process_group("gloo")
        ends = [open_bootstrap(world_size, group, config) for group in (None, dist.group.WORLD)]
        for end in ends:
            end.all_gather(b"x", TIMEOUT_S)
        return ends

    ends = opened(ports[0])
    dist.destroy_process_group()
    for end in ends:
        end.close()
    ends = opened(ports[1])
    with pytest.raises(InvalidArgumentError):
        open_bootstrap(world_size, ends, config)  # type: ignore[arg-type]
    dist.destroy_process_group()
    del ends, end
    gc.collect()


def test_a_destroyed_process_group_hangs_no_finaliser() -> None:
    ports = [str(free_port()), str(free_port())]
    run_ranks(process_group_goes_first, 2, args=(ports,), timeout_s=40)


def left_open(rank: int, world_size: int) -> None:
    """B32: leaves without close; with a process group torch itself may abort here, so none."""
    end = open_bootstrap(world_size, None, Config(setup_timeout_s=20))
    end.all_gather(b"x", TIMEOUT_S)
    dist.left_open = end  # type: ignore[attr-defined]  # alive until the interpreter is gone


def test_a_process_ends_without_close() -> None:
    run_ranks(left_open, 2, timeout_s=40)


def nobody_hosts(rank: int, world_size: int) -> None:
    if rank == 1:
        with pytest.raises(PeerTimeoutError, match="launcher or global rank 0 must host it"):
            open_bootstrap(2, None, Config(setup_timeout_s=1.0))


def test_a_store_that_nobody_hosts() -> None:
    run_ranks(nobody_hosts, 2)

"""Rendezvous of threads and over a store; arguments; how failure reaches every rank."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from launcher import free_port, run_threads, succeeded

from pcie_comm.bootstrap import Bootstrap, ThreadBootstrap, agree, compare, open_bootstrap
from pcie_comm.bootstrap_store import StoreBootstrap
from pcie_comm.bootstrap_torch import ProcessGroupBootstrap
from pcie_comm.config import Config
from pcie_comm.errors import (
    BrokenError,
    ClosedError,
    InvalidArgumentError,
    MismatchError,
    PeerAbortedError,
    PeerDiedError,
    PeerTimeoutError,
)

TIMEOUT_S = 10.0
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launch_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def from_threads(world_size: int) -> Callable[[int], Bootstrap]:
    return ThreadBootstrap.create(world_size).__getitem__


def from_store(world_size: int) -> Callable[[int], Bootstrap]:
    """Ranks that share an in-memory store; threads here, processes further down."""
    store, order = dist.HashStore(), tuple(range(world_size))
    return lambda rank: StoreBootstrap(store, order, rank, TIMEOUT_S)


@pytest.fixture(params=[from_threads, from_store])
def connect(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_payloads_of_any_length_in_rank_order(connect: Any) -> None:
    end_of = connect(4)

    def on_rank(rank: int) -> list[list[bytes]]:
        end = end_of(rank)
        assert (end.rank, end.world_size, end.global_ranks) == (rank, 4, (0, 1, 2, 3))
        rounds = [end.all_gather(bytes([rank]) * (rank * size), TIMEOUT_S) for size in range(50)]
        end.close()
        end.close()
        with pytest.raises(ClosedError):
            end.all_gather(b"", TIMEOUT_S)
        return rounds

    expected = [[bytes([rank]) * (rank * size) for rank in range(4)] for size in range(50)]
    assert succeeded(run_threads(on_rank, 4)) == [expected] * 4


def test_only_threads_are_one_process() -> None:
    assert ThreadBootstrap.same_process
    assert not StoreBootstrap.same_process
    assert not ProcessGroupBootstrap.same_process


def test_missing_ranks_are_named(connect: Any) -> None:
    end_of = connect(4)

    def on_rank(rank: int) -> None:
        end = end_of(rank)
        end.all_gather(b"", TIMEOUT_S)
        if rank in (1, 3):
            return
        started = time.monotonic()
        with pytest.raises(PeerTimeoutError, match="ranks 1, 3 of world_size=4") as caught:
            end.all_gather(b"", 1.0)
        assert 0.9 < time.monotonic() - started < 3
        assert (caught.value.rank, caught.value.peer) == (rank, 1)
        assert caught.value.elapsed_ns is not None
        with pytest.raises(BrokenError) as refused:
            end.all_gather(b"", TIMEOUT_S)
        assert refused.value.__cause__ is caught.value

    succeeded(run_threads(on_rank, 4))


def test_abort_wakes_the_others(connect: Any) -> None:
    end_of = connect(3)

    def on_rank(rank: int) -> str:
        end = end_of(rank)
        end.all_gather(b"", TIMEOUT_S)
        if rank == 1:
            time.sleep(0.2)
            end.abort("disk on fire")
            with pytest.raises(BrokenError, match="disk on fire"):
                end.all_gather(b"", TIMEOUT_S)
            return ""
        started = time.monotonic()
        with pytest.raises(PeerAbortedError, match="disk on fire") as caught:
            end.all_gather(b"", TIMEOUT_S)
        assert time.monotonic() - started < 2
        assert caught.value.peer == 1
        return str(caught.value)

    succeeded(run_threads(on_rank, 3))


def test_agree_gives_every_rank_the_first_ranks_reason(connect: Any) -> None:
    """B14: the failing rank keeps its own error, the others learn class and text of it."""
    end_of = connect(4)

    def on_rank(rank: int) -> list[bytes]:
        end = end_of(rank)

        def work() -> bytes:
            if rank in (1, 2):
                raise ValueError(f"capacity={rank} is too small")
            return bytes([rank])

        assert agree(end, "reading", lambda: bytes([rank]), TIMEOUT_S) == [
            b"\0",
            b"\1",
            b"\2",
            b"\3",
        ]
        expected = ValueError if rank in (1, 2) else PeerAbortedError
        with pytest.raises(expected) as caught:
            agree(end, "mapping slabs", work, TIMEOUT_S)
        if rank in (0, 3):
            text = "mapping slabs failed on rank 1: ValueError: capacity=1 is too small"
            assert text in str(caught.value)
            assert "ranks 2 failed as well" in str(caught.value)
            assert (caught.value.rank, caught.value.peer) == (rank, 1)  # type: ignore[attr-defined]
        return agree(end, "trying again", lambda: b"", TIMEOUT_S)

    assert succeeded(run_threads(on_rank, 4)) == [[b""] * 4] * 4


def test_agree_keeps_the_own_error_when_peers_are_gone() -> None:
    end = ThreadBootstrap.create(2)[0]

    def work() -> bytes:
        raise OSError("no device")

    with pytest.raises(OSError, match="no device") as caught:
        agree(end, "opening", work, 0.1)
    assert isinstance(caught.value.__context__, PeerTimeoutError)


def test_agree_lets_an_interrupt_pass_at_once(connect: Any) -> None:
    end_of = connect(2)

    def on_rank(rank: int) -> None:
        end = end_of(rank)

        def work() -> bytes:
            if rank == 0:
                raise KeyboardInterrupt
            return b""

        with pytest.raises(KeyboardInterrupt if rank == 0 else PeerAbortedError):
            agree(end, "opening", work, TIMEOUT_S)

    started = time.monotonic()
    succeeded(run_threads(on_rank, 2))
    assert time.monotonic() - started < 5


def test_agree_releases_the_failed_works_frames() -> None:
    """A traceback that holds its own frame would keep buffers until the collector runs."""

    class Buffer:
        alive = 0

        def __init__(self) -> None:
            Buffer.alive += 1

        def __del__(self) -> None:
            Buffer.alive -= 1

    def work() -> bytes:
        buffer = Buffer()
        raise ValueError(f"{buffer}")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="Buffer"):
            agree(ThreadBootstrap.create(1)[0], "work", work, TIMEOUT_S)
        assert Buffer.alive == 0
    finally:
        gc.enable()


def test_compare_lists_every_ranks_value() -> None:
    """B27: the same error on every rank, only about what differs."""
    contracts: list[dict[str, object]] = [
        {"protocol": "push", "max_rows": 8, "version": "1"},
        {"protocol": "pull", "max_rows": 8, "version": "1"},
        {"protocol": "push", "max_rows": 4, "version": "1", "extra": None},
    ]
    with pytest.raises(MismatchError) as caught:
        compare([json.dumps(contract).encode() for contract in contracts], "the settings")
    assert caught.value.values == {
        0: {"protocol": "push", "max_rows": 8, "extra": "<absent>"},
        1: {"protocol": "pull", "max_rows": 8, "extra": "<absent>"},
        2: {"protocol": "push", "max_rows": 4, "extra": None},
    }
    text = str(caught.value)
    assert "the ranks disagree on the settings" in text
    assert "protocol: rank 0='push', rank 1='pull', rank 2='push'" in text
    assert "max_rows: rank 0=8, rank 1=8, rank 2=4" in text
    assert "version" not in text
    compare([b'{"a": 1, "b": [2]}', b'{"b": [2], "a": 1}'], "order of keys")


@pytest.mark.parametrize("record", [b"", b"[1]", b"\x80\x04N.", b"{", b"null"])
def test_compare_refuses_what_is_no_contract(record: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="rank 1 is malformed"):
        compare([b"{}", record], "settings")


@pytest.mark.parametrize(
    "ranks",
    [
        *(0, 17, -1, True, 2.0, None, "2", b"\1", 1 << 70),
        *([], list(range(17)), [0, 0], [0, -1], [0, True], [0, 1.0], [[0]], {0, 1}),
    ],
    ids=repr,
)
def test_malformed_ranks_are_refused_by_value(ranks: Any) -> None:
    """B28: before anything is opened, with the value and what to give instead."""
    with pytest.raises(InvalidArgumentError) as caught:
        open_bootstrap(ranks, None, Config())
    assert repr(ranks) in str(caught.value) or "length 17" in str(caught.value)
    assert "1 to 16" in str(caught.value) or "global rank" in str(caught.value)


def test_group_of_one_needs_nothing() -> None:
    for ranks in (1, [0]):
        end = open_bootstrap(ranks, None, Config())
        assert (end.rank, end.world_size) == (0, 1)
        assert end.all_gather(b"alone", 0.1) == [b"alone"]
        end.close()


def test_several_ranks_need_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match=r"torchrun.*init_process_group.*local_world"):
        open_bootstrap(2, None, Config())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgumentError, match="MASTER_ADDR"):
        open_bootstrap(2, None, Config())


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (4, "WORLD_SIZE=3"),
        ([0, 1], "global rank 2"),
        ([2, 3], "WORLD_SIZE=3"),
        (2, "global rank 2"),
    ],
)
def test_ranks_must_fit_the_launch(
    ranks: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = ("2", "3", "0", "127.0.0.1", "1")
    for name, value in zip(LAUNCH_VARIABLES, values, strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match=message):
        open_bootstrap(ranks, None, Config())
    assert open_bootstrap([2], None, Config()).rank == 0


def test_process_group_must_be_one() -> None:
    for wrong in ("gloo", -100, object()):
        with pytest.raises(InvalidArgumentError, match="process_group="):
            open_bootstrap(2, wrong, Config())  # type: ignore[arg-type]


def test_a_late_or_failed_attempt_does_not_disturb_the_next() -> None:
    """Rank 0 gave up on a first attempt; rank 1 comes late, and both try again."""
    store = dist.HashStore()

    def on_rank(rank: int) -> list[bytes]:
        if rank == 0:
            with pytest.raises(PeerTimeoutError, match="ranks 1 of"):
                StoreBootstrap(store, (0, 1), 0, 0.3)
        else:
            time.sleep(0.5)
        for _ in range(3):
            end = StoreBootstrap(store, (0, 1), rank, TIMEOUT_S)
            gathered = end.all_gather(bytes([rank]), TIMEOUT_S)
            end.close()
        return gathered

    assert succeeded(run_threads(on_rank, 2)) == [[b"\0", b"\1"]] * 2


def test_store_does_not_grow() -> None:
    store = dist.HashStore()
    sizes = []
    for _ in range(4):

        def on_rank(rank: int) -> None:
            end = StoreBootstrap(store, (0, 1, 2), rank, TIMEOUT_S)
            for _ in range(10):
                end.all_gather(b"payload", TIMEOUT_S)
            end.close()

        succeeded(run_threads(on_rank, 3))
        sizes.append(store.num_keys())
    assert sizes == [sizes[0]] * 4
    assert sizes[0] <= 3


def test_a_store_that_fails_is_reported() -> None:
    class Broken(dist.Store):  # type: ignore[misc]
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Connection reset by peer\nC++ frames")

    with pytest.raises(PeerDiedError, match=r"store failed \(Connection reset by peer\)"):
        StoreBootstrap(Broken(), (0, 1), 0, 1.0)


def test_close_lets_go_of_the_store() -> None:
    """Else its server outlives torch's destroy_process_group, with keys of the past."""
    port = free_port()

    def host() -> dist.Store:
        return dist.TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=5))

    store = host()
    end = StoreBootstrap(store, (0,), 0, TIMEOUT_S)
    del store
    assert end.all_gather(b"x", TIMEOUT_S) == [b"x"]
    end.close()
    host()  # the port is free

"""The launcher reports every rank's failure and leaves no process behind."""

from __future__ import annotations

import os
import time

import pytest
from launcher import RanksFailedError, run_ranks


def echo(rank: int, world_size: int, word: str) -> tuple[object, ...]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "WORD")
    return (rank, world_size, word, *(os.environ[name] for name in names))


def fail_on_zero(rank: int, world_size: int) -> int:
    if rank == 0:
        raise ValueError("rank zero is unwell")
    return rank


def hang_on_one(rank: int, world_size: int) -> int:
    if rank == 1:
        time.sleep(60)
    return os.getpid()


def die_on_one(rank: int, world_size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), 9)
    return rank


def test_results_come_in_rank_order_with_the_launch_environment() -> None:
    results = run_ranks(echo, 2, args=("hello",), env=[{"WORD": "a"}, {"WORD": "b"}])
    assert results == [
        (0, 2, "hello", "0", "2", "0", "127.0.0.1", "a"),
        (1, 2, "hello", "1", "2", "1", "127.0.0.1", "b"),
    ]


def test_failure_text_of_rank_0_is_raised() -> None:
    with pytest.raises(RanksFailedError, match="rank zero is unwell") as caught:
        run_ranks(fail_on_zero, 2)
    assert list(caught.value.reports) == [0]


def test_a_hanging_rank_is_killed_at_the_deadline() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match="still running"):
        run_ranks(hang_on_one, 2, timeout_s=3)
    assert time.monotonic() - started < 15


def test_a_dead_rank_is_reported() -> None:
    with pytest.raises(RanksFailedError, match="died with exit code -9"):
        run_ranks(die_on_one, 2)

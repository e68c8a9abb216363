"""Notes between hosts: the first one counts, damaged ones and a store that is gone do no harm."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from pcie_comm.span import Span
from pcie_comm.watch.board import Board, FarSight
from pcie_comm.watch.cause import Cause, Kind


class Gone:
    """A store whose process has ended."""

    def __getattr__(self, name):
        def fail(*_):
            raise RuntimeError(f"{name}: connection reset")

        return fail


def boards(count: int) -> list[Board]:
    store = dist.HashStore()
    return [Board(store, rank) for rank in range(count)]


def watch_of(cause=None):
    seen = []
    return SimpleNamespace(cause=cause, learn=seen.append, seen=seen, span=Span((0, 1, 1)))


def looks(board: Board, watch) -> None:
    far = FarSight(board, watch)
    deadline = time.monotonic() + 5
    while far._thread.is_alive() and not watch.seen and time.monotonic() < deadline:
        time.sleep(0.01)
    far.stop()
    assert not far._thread.is_alive()


def test_notes_are_read_by_others_and_replaced_by_oneself():
    first, second = boards(2)
    assert second.read("waiting", 0) is None
    first.leave("waiting", 4)
    first.leave("waiting", 5)
    assert second.read("waiting", 0) == 5
    second.leave_first("failed", [1, "x"])
    first.leave_first("failed", [0, "y"])
    assert first.first("failed") == [1, "x"]


def test_a_cause_gets_to_the_other_host():
    here, there = boards(2)
    told = watch_of(Cause(2, Kind.DIED, "", -9))
    looks(here, told)
    learned = watch_of()
    looks(there, learned)
    assert learned.seen == [Cause(2, Kind.DIED, "as rank 0 saw", -9)]
    assert told.seen == []


DAMAGED = [
    "no json",
    "null",
    "[]",
    "{}",
    json.dumps([0, 99, 1, "", None]),
    json.dumps([0, -1, 1, "", None]),
    json.dumps([0, 1, 77, "", None]),
    json.dumps([0, 1, 1, 5, None]),
    json.dumps([0, 1, 1, "", "x"]),
    json.dumps([0, 1, 1, ""]),
]


@pytest.mark.parametrize("note", DAMAGED)
def test_a_damaged_note_is_none(note):
    (board,) = boards(1)
    board._requests.store.set("cause", note)
    watch = watch_of()
    far = FarSight(board, watch)
    time.sleep(0.12)
    assert far._thread.is_alive()  # it still looks
    far.stop()
    assert watch.seen == []


def test_a_store_that_is_gone_loses_notes_and_nothing_else():
    board = Board(Gone(), 0)
    board.leave("waiting", 1)
    board.leave_first("failed", 1)
    assert board.read("waiting", 0) is None
    assert board.first("failed") is None
    looks(board, watch_of(Cause(0, Kind.ABORTED)))

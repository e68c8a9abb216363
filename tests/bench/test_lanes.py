"""Streams of the ranks: none may wait for another's work, or ranks that wait for it never end."""

from __future__ import annotations

import contextlib

import pytest
import torch

from pcie_comm.bench.cold import ROUNDS, ColdStage
from pcie_comm.bench.measure import GraphStage, Lanes


class Stream:
    """Notes what is enqueued: by name, in one list for all streams."""

    def __init__(self, name, done):
        self.name, self.done = name, done

    def record_event(self):
        self.done.append((self.name, "record"))
        return f"event of {self.name}"

    def wait_event(self, event):
        self.done.append((self.name, "wait", event))

    def wait_stream(self, other):
        self.done.append((self.name, "join", other.name))


@pytest.fixture
def lanes(monkeypatch):
    """Three ranks; a graph is what its body enqueues, and takes 6 ms."""
    done = []
    made = Lanes.__new__(Lanes)
    made.root = Stream("root", done)
    made.streams = [Stream(f"rank {rank}", done) for rank in range(3)]
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(made, "capture", lambda body: body())
    monkeypatch.setattr(made, "time_ns", lambda graph: 6e6)
    made.done = done
    return made


def test_all_ranks_fork_before_the_first_enqueues_and_join_after_the_last(lanes):
    lanes.fork_join(lambda rank: lanes.done.append(("enqueue", rank)))
    assert lanes.done == [
        ("root", "record"),
        *((f"rank {rank}", "wait", "event of root") for rank in range(3)),
        *(("enqueue", rank) for rank in range(3)),
        *(("root", "join", f"rank {rank}") for rank in range(3)),
    ]


def test_a_warm_take_is_a_chain_of_operations_of_each_rank(lanes):
    take = GraphStage(lanes, 4).take_of(lambda rank: lanes.done.append(rank))
    assert [one for one in lanes.done if isinstance(one, int)] == [0] * 4 + [1] * 4 + [2] * 4
    assert take() == 6e6 / 4


def test_a_cold_take_evicts_before_every_operation(lanes):
    class Eviction:
        def enqueue(self):
            lanes.done.append("evict")

    stage = ColdStage(lanes, Eviction())
    take = stage.take_of(lambda rank: lanes.done.append(rank))
    order = [one for one in lanes.done if isinstance(one, (int, str))]
    assert order == ["evict", 0, 1, 2] * ROUNDS
    assert take() == 6e6 / ROUNDS
    lanes.done.clear()
    assert stage.take_of_eviction()() == 6e6 / ROUNDS
    assert lanes.done == ["evict"] * ROUNDS

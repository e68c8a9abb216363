"""Lanes: independent of each other, made and closed with their group; what a lane remembers."""

from __future__ import annotations

import threading

import pytest
import torch
from launcher import run_threads
from leaks import own_mappings
from worlds import Held, build_each, close_each, engine_of, hook_waits, on_each, pair_of, small

from pcie_comm import (
    BrokenError,
    BusyError,
    ClosedError,
    InvalidArgumentError,
    MismatchError,
    PeerTimeoutError,
    channel,
    local_world,
)

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def gathered(lane, value: float) -> list[float]:
    """Make a call on a lane; return one element of every rank's shard."""
    return lane.all_gather_pair(*pair_of(float(value)))[0][0, ::4].tolist()


def test_a_lane_has_the_same_methods_and_an_epoch_of_its_own():
    with local_world(2, "cpu", config=small()) as world:
        lanes = world.run(lambda group: group.channel("draft"))
        assert world.run(lambda group: group.channel("draft")) == lanes
        assert world.run(lambda group: group.channel("default").name) == ["default"] * 2
        for turn in range(3):
            values = run_threads(lambda rank, turn=turn: gathered(lanes[rank], turn + rank), 2)
            assert values == [[turn, turn + 1.0]] * 2
        world.run(lambda group: gathered(group, 1.0))
        assert [engine_of(lane).epoch for lane in lanes] == [3, 3]
        assert [engine_of(group).epoch for group in world.groups] == [1, 1]
        down, router = torch.zeros(1, 1792, dtype=torch.bfloat16), torch.zeros(1, 448)
        shapes = run_threads(
            lambda r: [
                tuple(t.shape)
                for t in lanes[r].all_gather_pair_kimi_topk(down, router, torch.zeros(896))
            ],
            2,
        )
        assert shapes == [[(1, 3584), (1, 16), (1, 16)]] * 2


def test_lanes_go_in_other_orders_on_other_ranks():
    """Threads 0, 1 are rank 0 and 1 on the group's lane, 2 and 3 on the other."""
    with local_world(2, "cpu", config=small()) as world:
        lanes = world.run(lambda group: group.channel("draft"))
        callers = [*world.groups, *lanes]

        def on_lane(index):
            rank = index % 2
            return [gathered(callers[index], 100.0 * index + rank) for _ in range(50)]

        results = run_threads(on_lane, 4)
        assert results[0] == results[1] == [[0.0, 101.0]] * 50
        assert results[2] == results[3] == [[200.0, 301.0]] * 50


def test_b07_a_second_thread_on_a_lane_is_refused_and_harms_nobody(monkeypatch):
    """One call at a time: the second would take the epoch of the first."""
    waiting = Held()
    hook_waits(monkeypatch, before=lambda engine: waiting.open() if engine.rank == 0 else None)
    first = []
    with local_world(2, "cpu", config=small()) as world:
        groups = world.groups
        thread = threading.Thread(target=lambda: first.append(gathered(groups[0], 5.0)))
        thread.start()
        waiting.wait()
        with pytest.raises(BusyError, match="give each thread a channel") as caught:
            gathered(groups[0], 7.0)
        assert (caught.value.rank, caught.value.op) == (0, "all_gather_pair")
        assert gathered(groups[1], 6.0) == [5.0, 6.0]
        thread.join(5)
        assert first == [[5.0, 6.0]]
        assert world.run(lambda group: gathered(group, group.rank)) == [[0.0, 1.0]] * 2


def test_a_broken_lane_leaves_the_others_alone():
    with local_world(2, "cpu", config=small(timeout_s=0.2)) as world:
        lanes = world.run(lambda group: group.channel("draft"))
        with pytest.raises(PeerTimeoutError):
            gathered(world.groups[0], 1.0)
        assert run_threads(lambda rank: gathered(lanes[rank], rank), 2) == [[0.0, 1.0]] * 2
        lanes[0].check()
        with pytest.raises(BrokenError):
            gathered(world.groups[0], 1.0)
        with pytest.raises(PeerTimeoutError):
            world.groups[0].check()


def test_different_names_are_a_mismatch_and_the_group_goes_on():
    groups = build_each([{}] * 3)
    errors = on_each(groups, lambda group: group.channel(("a", "b", "a")[group.rank]))
    for error in errors:
        assert isinstance(error, MismatchError)
        assert [error.values[rank]["channel"] for rank in range(3)] == ["a", "b", "a"]
    lanes = on_each(groups, lambda group: group.channel("a"))
    values = on_each(lanes, lambda lane: gathered(lane, 1.0))
    assert values == [[1.0] * 3] * 3
    close_each(groups)


@pytest.mark.parametrize("name", ["", None, 5, b"draft", "x" * 101, ["draft"]])
def test_a_bad_lane_name_is_refused(name):
    with local_world(1, "cpu", config=small()) as world:
        with pytest.raises(InvalidArgumentError, match="is no channel name"):
            world.groups[0].channel(name)
        world.groups[0].channel("x" * 100)


def test_lanes_close_with_their_group():
    groups = build_each([{}] * 2)
    lanes = [*on_each(groups, lambda g: g.channel("a")), *on_each(groups, lambda g: g.channel("b"))]
    assert len(own_mappings()) == 2 * 3 * 2
    close_each(groups)
    assert own_mappings() == []
    for lane in lanes:
        with pytest.raises(ClosedError):
            lane.all_gather_pair(*pair_of(1.0))


def test_remembered_calls_are_bounded(monkeypatch):
    monkeypatch.setattr(channel, "REMEMBERED_CALLS", 4)
    with local_world(1, "cpu", config=small()) as world:
        lane = world.groups[0].channel("default")
        for width in range(1, 12):
            local = torch.ones(1, width)
            outs = torch.empty(1, width), torch.empty(1, width)
            world.groups[0].all_gather_pair(local, local, out=outs)
            assert torch.equal(outs[1], local)
            assert len(lane._planned) <= 4
            assert len(lane._bound) <= 4

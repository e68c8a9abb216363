"""Counters across 2^31 and 2^32: errors name the right epochs, and nobody seems dead.

Results across the wrap: tests/test_group.py and tests/test_soak.py on the CPU,
tests/gpu/test_exact.py on a GPU; tags in the model (docs/protocol.md). Arithmetic: test_layout.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from worlds import build_each, close_each, engine_of, on_each, pair_of, small

from pcie_comm import MismatchError, PcieDcpGroup, PeerTimeoutError, local_world
from pcie_comm.layout import EPOCH_MASK, StatusLayout, next_epoch
from pcie_comm.status import Failure
from pcie_comm.watch.cause import Cause
from pcie_comm.watch.peer import Peer
from pcie_comm.watch.process import Process
from pcie_comm.watch.roll_call import RollCall, State
from pcie_comm.watch.watch import Watch

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

STARTS = pytest.mark.parametrize("start", [2**31 - 2, 2**31 - 1, 2**32 - 3, 2**32 - 2, 2**32 - 1])
PROTOCOLS = pytest.mark.parametrize("protocol", ["push", "pull", "tagged", "auto"])


def seed(groups: list[PcieDcpGroup], start: int) -> None:
    for group in groups:
        engine_of(group).seed_epoch(start)


@STARTS
@PROTOCOLS
def test_two_lanes_cross_the_wrap_at_different_times(start, protocol):
    with local_world(3, "cpu", config=small(protocol=protocol)) as world:
        lanes = world.run(lambda group: group.channel("second"))
        seed(world.groups, start)
        for lane in lanes:
            lane.engine.seed_epoch(start - 3)

        def on_rank(group: PcieDcpGroup) -> None:
            for turn in range(12):
                value = 10.0 * turn + group.rank
                for owner in (group, lanes[group.rank]):
                    first, _ = owner.all_gather_pair(*pair_of(value))
                    assert first[0, ::4].tolist() == [10.0 * turn + rank for rank in range(3)]

        world.run(on_rank)


@STARTS
@PROTOCOLS
def test_a_timeout_names_the_epoch_behind_the_wrap(start, protocol):
    with local_world(2, "cpu", config=small(protocol=protocol, timeout_s=0.2)) as world:
        seed(world.groups, start)
        world.run(lambda group: group.all_gather_pair(*pair_of(1.0)))
        with pytest.raises(PeerTimeoutError) as caught:
            world.groups[0].all_gather_pair(*pair_of(1.0))
        wanted = next_epoch(next_epoch(start))
        assert (caught.value.epoch, caught.value.wanted, caught.value.seen) == (wanted, wanted, 0)


@STARTS
@PROTOCOLS
def test_a_mismatch_is_one_behind_the_wrap(start, protocol):
    groups = build_each([{"config": small(protocol=protocol)}] * 2)
    seed(groups, start)
    assert len(on_each(groups, lambda group: group.all_gather_pair(*pair_of(1.0)))) == 2
    errors = on_each(
        groups, lambda g: g.all_gather_pair(torch.ones(1, 4 + g.rank), torch.ones(1, 4))
    )
    assert [type(error) for error in errors] == [MismatchError] * 2
    assert {error.epoch for error in errors} == {next_epoch(next_epoch(start))}
    close_each(groups)


@pytest.mark.parametrize("epoch", [2**31 - 1, 2**31, EPOCH_MASK, 2])
def test_a_kernels_record_is_read_without_a_sign(epoch):
    failure = Failure(StatusLayout.CODE_TIMEOUT, 1, epoch, 5, EPOCH_MASK, 5, 1, 0)
    error = failure.error(0, {5: "all_gather_pair"})
    assert (error.epoch, error.wanted, error.seen) == (epoch, epoch, EPOCH_MASK)


def test_a_heartbeat_that_wraps_is_a_life_sign():
    page = RollCall.create(one_process=True)
    stranger = dataclasses.replace(Process.here(), token="other", namespaces="pid:[1]")
    line = page.line(1)
    line.say(State.PRESENT)
    peer = Peer(1, 0, line, stranger)
    for now, beat in ((1.0, EPOCH_MASK), (2.0, 0), (3.0, 1)):
        line.beat = beat
        peer.judge(now)
        assert "has not run" not in peer.describe()
    peer.close()


def test_the_own_heartbeat_goes_on_across_the_wrap():
    causes: list[Cause] = []
    watch = Watch(0, [Process.here()], RollCall.create(one_process=True), causes.append)
    watch.attend()
    watch._own.beat = EPOCH_MASK
    watch.look()
    assert watch._own.beat == 0
    watch.look()
    assert watch._own.beat == 1
    watch.leave()
    assert causes == []

"""B38: launches that find every multiprocessor taken, and grids that no device could hold."""

from __future__ import annotations

import time

import harness
import pytest
import torch
from lifetimes import PAIR, enqueue, new_streams

from pcie_comm import Config, PeerTimeoutError, UnsupportedError, local_world
from pcie_comm.local import LocalWorld

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]

KIMI = "all_gather_pair_kimi_topk"
HOLD = """
template <typename T> T hold(T cycles) {
    long long start = clock64();
    while (clock64() - start < (long long)cycles) {}
    return cycles;
}
"""
CYCLES = 20_000_000.0
"""Of one element, 10 ms or so; a thread has four."""

WAVES = 12
"""As often all threads of the device are taken anew: half a second."""


class Crowd:
    """A kernel of torch's that takes all threads of the device, again and again."""

    def __init__(self, taken: list[torch.cuda.Stream]) -> None:
        properties = torch.cuda.get_device_properties(0)
        threads = properties.multi_processor_count * properties.max_threads_per_multi_processor
        self._cycles = torch.zeros(4 * threads * WAVES, device=harness.DEVICE)
        self._hold = torch.cuda.jiterator._create_jit_fn(HOLD)
        (self._stream,) = new_streams(1, taken)
        with torch.cuda.stream(self._stream):
            self._hold(self._cycles)  # compiled, loaded, its result's memory there for the next
        torch.cuda.synchronize()
        self._cycles.fill_(CYCLES)
        torch.cuda.synchronize()

    def enqueue(self) -> torch.cuda.Event:
        """Take the device; return an event behind it."""
        with torch.cuda.stream(self._stream):
            self._hold(self._cycles)
            return self._stream.record_event()


def open_world(world_size: int, timeout_s: float):
    config = Config(timeout_s=timeout_s, slot_nbytes=1 << 21)
    return local_world(world_size, harness.DEVICE, config=config)


def call(world: LocalWorld, batch: harness.Batch, ranks) -> None:
    for rank in ranks:
        with torch.cuda.stream(world.streams[rank]):
            enqueue(batch, world.groups[rank], rank)


@pytest.mark.parametrize("early", [0, 2])
def test_b38_calls_end_once_a_full_device_is_free(early, figures):
    """The largest batch; `early` of four ranks are there first, and wait for the others."""
    with open_world(4, 10.0) as world:
        for group in world.groups:
            group.prepare(KIMI)
        batch, crowd = harness.make_batch(KIMI, 1, 4, 64), Crowd(world.streams)
        batch.refresh()
        torch.cuda.synchronize()
        started = time.monotonic()
        call(world, batch, range(early))
        left = crowd.enqueue()
        call(world, batch, range(early, 4))
        assert not left.query(), "the device was not full"
        for stream in world.streams:
            stream.synchronize()
        waited_s = time.monotonic() - started
        harness.settle(world)
        figures(early=early, calls_s=waited_s, crowd_s=time.monotonic() - started)
        assert batch.mismatches() == 0


def test_b38_a_wait_for_a_full_device_ends_with_its_limit(figures):
    """Rank 1 comes in before rank 0's limit, or rank 0 names it. Right bytes, or an error."""
    with open_world(2, 0.1) as world:
        for group in world.groups:
            group.prepare(PAIR)
        batch, crowd = harness.make_batch(PAIR, 1, 2, 8), Crowd(world.streams)
        batch.refresh()
        torch.cuda.synchronize()
        started = time.monotonic()
        call(world, batch, [0])
        crowd.enqueue()
        call(world, batch, [1])
        world.streams[0].synchronize()
        waited_s = time.monotonic() - started
        torch.cuda.synchronize()
        failures = [group.channel("default").engine.failure() for group in world.groups]
        timed_out = {failure.rank for failure in failures if failure is not None}
        wrong = {rank for rank in (0, 1) if batch.mismatches([rank])}
        figures(waited_s=waited_s, timed_out=sorted(timed_out))
        assert waited_s < 5.0
        assert wrong <= timed_out
        for rank in timed_out:
            with pytest.raises(PeerTimeoutError) as caught:
                world.groups[rank].check()
            assert caught.value.peer == 1 - rank


def test_b38_a_grid_that_cannot_be_resident_is_refused():
    with open_world(1, 5.0) as world:
        (group,), batch = world.groups, harness.make_batch(PAIR, 1, 1, 8)
        engine = group.channel("default").engine
        fitting, engine._at_once = engine._at_once, 1 << 20
        with pytest.raises(UnsupportedError, match=r"the device has room for \d+") as caught:
            enqueue(batch, group, 0)
        assert caught.value.reason == "the launch would wait for blocks that cannot start"
        engine._at_once = fitting
        call(world, batch, [0])
        harness.settle(world)
        assert batch.mismatches() == 0

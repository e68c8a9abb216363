"""How memory goes back: when all have let go of it, not before, and not never."""

from __future__ import annotations

import os
import threading
import time

import pytest
from leaks import own_mappings
from worlds import build_each, close_each, hook_waits, on_each, pair_of, small

from pcie_comm import (
    CudaError,
    MismatchError,
    PcieDcpGroup,
    PeerAbortedError,
    PeerTimeoutError,
    closing,
    local_world,
)
from pcie_comm.host_engine import HostEngine
from pcie_comm.transport.host_shm import HostShmTransport

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture
def device_memory(monkeypatch):
    """Slabs that must not be freed while a peer maps them, as those in device memory."""
    monkeypatch.setattr(HostShmTransport, "mappings_keep_memory", False)


def own_slabs(group: PcieDcpGroup) -> list[object]:
    """Return what is left of a group's own slabs."""
    own = [transport._own for transport in group._transports.values()]
    return [slab for slab in own if slab is not None]


# --- after a failure -----------------------------------------------------------------------------


def test_survivors_of_a_failure_free_at_once_where_mappings_keep_the_memory():
    groups = build_each([{}] * 3)
    groups[1].abort()
    started = time.monotonic()
    groups[0].close()
    assert time.monotonic() - started < 1.0
    assert own_slabs(groups[0]) == []
    assert len(own_mappings()) == 6, "those of the others"
    for group in groups[1:]:
        group.close()
    assert own_mappings() == []


def test_device_memory_is_freed_once_every_peer_has_let_go(device_memory):
    groups = build_each([{}] * 3)
    groups[1].abort()
    freed = []

    def close(group):
        time.sleep(0.1 * group.rank)
        group.close()
        freed.append(group.rank)

    started = time.monotonic()
    assert on_each(groups, close) == [None] * 3
    assert 0.2 <= time.monotonic() - started < 2.0
    assert own_mappings() == []
    assert closing._kept == []


def test_device_memory_of_a_peer_that_does_not_close_is_kept_and_reclaimed(
    device_memory, monkeypatch
):
    monkeypatch.setattr(closing, "CLOSE_TIMEOUT_S", 0.1)
    groups = build_each([{}] * 2)
    groups[1].abort()
    groups[0].close()
    assert len(own_slabs(groups[0])) == 1
    assert len(closing._kept) == 1
    with PcieDcpGroup(1, device="cpu", config=small()):
        assert len(closing._kept) == 1, "rank 1 has not let go yet"
    groups[1].close()
    with PcieDcpGroup(1, device="cpu", config=small()):
        assert closing._kept == []
    assert own_mappings() == []


def test_a_call_of_another_thread_ends_before_its_memory_goes():
    groups = build_each([{}] * 2)
    errors = []

    def call():
        try:
            groups[0].all_gather_pair(*pair_of(1.0))
        except PeerAbortedError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.1)
    groups[0].abort()
    groups[0].close()
    thread.join(5)
    assert len(errors) == 1
    groups[1].close()
    assert own_mappings() == []


# --- B18 and B19 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [False, True])
def test_b18_what_a_captured_graph_addresses_is_kept_on_every_rank(
    broken, device_memory, monkeypatch
):
    """Closed it is all the same; nothing waits for the graph, now or at the end."""
    groups = build_each([{}] * 2)
    groups[1]._channels["default"].engine.captured = True
    if broken:
        groups[0].abort()
    monkeypatch.setattr(closing, "CLOSE_TIMEOUT_S", 0.1)
    close_each(groups)
    assert [len(own_slabs(group)) for group in groups] == [1, 1]
    closing.reclaim()
    assert [len(own_slabs(group)) for group in groups] == [1, 1]
    assert len(closing._kept) == 2


def test_b19_closing_waits_for_a_call_of_the_peer(monkeypatch):
    """Rank 0 closes while rank 1 is still reading what both have exchanged."""
    reading, ends = threading.Event(), []

    def slow(engine: HostEngine) -> None:
        if engine.rank == 1:
            reading.set()
            time.sleep(0.3)
            ends.append(time.monotonic())

    groups = build_each([{}] * 2)
    hook_waits(monkeypatch, after=slow)

    def on_rank(group):
        first, _ = group.all_gather_pair(*pair_of(float(group.rank)))
        if group.rank == 0:
            reading.wait(5)
        group.close()
        return time.monotonic(), first[0, ::4].tolist()

    results = on_each(groups, on_rank)
    assert [values for _, values in results] == [[0.0, 1.0]] * 2
    assert results[0][0] > ends[0]


@pytest.mark.parametrize("often", [1, 100])
def test_b19_a_slab_that_cannot_be_unmapped_is_kept_and_every_rank_is_told(
    often, device_memory, monkeypatch
):
    """A driver that fails once: the next try succeeds. One that always fails: memory is kept."""
    detach, left = HostShmTransport._detach, [often]

    def failing(transport: HostShmTransport) -> None:
        if transport.info.rank == 1 and left[0] > 0:
            left[0] -= 1
            raise CudaError("no", name="CUDA_ERROR_UNKNOWN", call="cuIpcCloseMemHandle")
        detach(transport)

    monkeypatch.setattr(HostShmTransport, "_detach", failing)
    monkeypatch.setattr(closing, "CLOSE_TIMEOUT_S", 0.3)
    groups = build_each([{}] * 3)
    errors = on_each(groups, lambda group: group.close())
    assert [type(error) for error in errors] == [PeerAbortedError, CudaError, PeerAbortedError]
    assert "unmapping failed on rank 1: CudaError" in str(errors[0])
    assert [len(own_slabs(group)) for group in groups] == ([0] if often == 1 else [1]) * 3
    left[0] = 0
    for _ in range(2):  # rank 1 lets go, then the others see it
        closing.reclaim()
    assert [len(own_slabs(group)) for group in groups] == [0] * 3
    del errors
    for group in groups:
        group.close()


def test_b19_a_hundred_groups_leave_nothing():
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = None
    for turn in range(100):
        with local_world(2, "cpu", config=small(slot_nbytes=4096)) as world:
            if turn % 3 == 0:
                world.groups[turn % 2].abort()
            else:
                world.run(lambda g: g.all_gather_pair(*pair_of(1.0)))
        before = before or descriptors()
    assert own_mappings() == []
    assert descriptors() <= before
    assert threading.active_count() < 10
    assert closing._kept == []


# --- what close says -----------------------------------------------------------------------------


def test_a_rank_that_closes_after_its_own_failure_ends_the_others_waits():
    """Rank 2 made another call; ranks 0 and 1 see that, and rank 3 never came to it."""
    groups = build_each([{}] * 4)
    widths = (4, 4, 8)
    errors = on_each(groups[:3], lambda g: g.all_gather_pair(*pair_of(1.0, widths[g.rank])))
    assert [type(error) for error in errors] == [MismatchError] * 3
    del errors
    groups[0].close()
    with pytest.raises(PeerAbortedError, match=r"by rank 0 \(it gave up after MismatchError"):
        groups[3].check()
    for group in groups[1:]:
        group.close()


def test_a_lane_that_failed_on_one_rank_does_not_make_the_others_close_fail():
    """Rank 0 closes alone; rank 1, whose lanes are sound, is already waiting for it."""
    for _ in range(20):
        groups = build_each([{"config": small(timeout_s=0.05)}] * 2)
        with pytest.raises(PeerTimeoutError):
            groups[0].all_gather_pair(*pair_of(1.0))
        close_each(groups)
        assert closing._kept == []


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_close_says_nothing_of_an_abort_that_comes(when, device_memory):
    groups = build_each([{}] * 2)
    delay_s = 0.0 if when == "before" else 0.2

    def on_rank(group):
        if group.rank == 1:
            time.sleep(delay_s)
            group.abort()
            time.sleep(0.2)
        elif when == "before":
            time.sleep(0.2)
        group.close()

    started = time.monotonic()
    assert on_each(groups, on_rank) == [None, None]
    assert time.monotonic() - started < 2.0
    assert own_mappings() == []

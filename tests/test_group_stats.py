"""What group.stats() says on the CPU: each call and wait once, the late rank by name."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from launcher import run_threads, succeeded
from transport.fake_cuda import FakeHost, Status

import pcie_comm
from pcie_comm import (
    ClosedError,
    Config,
    CudaError,
    PcieDcpGroup,
    PeerTimeoutError,
    UnsupportedError,
    counters,
    driver,
    local_world,
)
from pcie_comm.bootstrap import ThreadBootstrap
from pcie_comm.counters import DeviceCounters, HostCounters
from pcie_comm.layout import MAX_WORLD, CountLayout
from pcie_comm.stats import WORDS, channel_stats
from pcie_comm.transport.cuda_memory import CudaDevice

ROWS = torch.ones(1, 4)
COUNTING = Config(stats=True, timeout_s=10.0)
DELAY_S = 0.05


def call(group):
    return group.all_gather_pair(ROWS, ROWS)


@pytest.mark.parametrize("transport", ["auto", "torch_dist"])
def test_calls_bytes_and_waits_are_counted(transport):
    with local_world(3, "cpu", transport, COUNTING) as world:
        for _ in range(4):
            world.run(call)
        for group in world.groups:
            (stats,) = group.stats().values()
            assert (stats.channel, stats.rank, stats.world_size) == ("default", group.rank, 3)
            assert (stats.ops, stats.sent_nbytes) == (4, 4 * 2 * 128)
            joint = transport == "torch_dist"
            assert stats.waits.count == (4 if joint else 8)
            assert len(stats.peers) == (0 if joint else 2)
            assert sum(stats.waits.histogram) == stats.waits.count
            assert 0 < stats.waits.longest_ns <= stats.waits.total_ns
            assert joint == (stats.slowest_peer is None)


def test_the_late_rank_is_the_slowest_peer():
    def late(group):
        if group.rank == 1:
            time.sleep(DELAY_S)
        return call(group)

    with local_world(3, "cpu", config=COUNTING) as world:
        world.run(late)
        for rank in (0, 2):
            stats = world.groups[rank].stats()["default"]
            assert stats.slowest_peer == 1
            waited = {one.peer: one.waits for one in stats.peers}
            assert waited[1].longest_ns > 0.8e9 * DELAY_S
            assert waited[1].histogram[waited[1].longest_ns.bit_length() - 1] == 1


def test_channels_are_apart():
    with local_world(2, "cpu", config=COUNTING) as world:
        world.run(lambda group: call(group.channel("draft")))
        world.run(lambda group: call(group.channel("draft")))
        world.run(call)
        stats = world.groups[0].stats()
        assert {name: one.ops for name, one in stats.items()} == {"default": 1, "draft": 2}


def test_a_rank_that_counts_matches_one_that_does_not():
    bootstraps = ThreadBootstrap.create(2)

    def rank(number: int) -> tuple[torch.Tensor, ...]:
        config = Config(stats=number == 0, timeout_s=10.0)
        with PcieDcpGroup.from_bootstrap(bootstraps[number], "cpu", config=config) as group:
            result = call(group)
            assert number or group.stats()["default"].ops == 1
            return result

    for first, second in succeeded(run_threads(rank, 2)):
        assert torch.equal(first, torch.ones(1, 8))
        assert torch.equal(second, first)


def test_a_broken_channel_still_tells_whom_it_waited_for():
    with local_world(2, "cpu", config=Config(stats=True, timeout_s=0.1)) as world:
        lonely = world.groups[0]
        with pytest.raises(PeerTimeoutError):
            call(lonely)
        stats = lonely.stats()["default"]
        assert (stats.ops, stats.slowest_peer, stats.waits.count) == (1, 1, 1)
        assert stats.waits.longest_ns > 0.09e9


def test_nothing_is_counted_unless_asked_for():
    with local_world(2, "cpu") as world:
        assert world.groups[0]._channels["default"].engine.counters is None
        with pytest.raises(UnsupportedError, match=r"Config\.stats=True") as caught:
            world.groups[0].stats()
        assert caught.value.reason == "Config.stats is off"


def test_a_closed_group_says_so():
    with local_world(2, "cpu", config=COUNTING) as world:
        group = world.groups[0]
    with pytest.raises(ClosedError):
        group.stats()


def test_a_world_of_one_has_no_peers():
    with local_world(1, "cpu", config=COUNTING) as world:
        world.run(call)
        stats = world.groups[0].stats()["default"]
    assert (stats.ops, stats.peers, stats.slowest_peer, stats.waits.count) == (1, (), None, 0)
    assert len(stats.waits.histogram) == CountLayout.BUCKETS


@pytest.mark.parametrize(
    ("value", "bucket"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (1 << 31, 31), (1 << 40, 31)]
)
def test_buckets(value, bucket):
    counting = HostCounters(0, joint=False)
    counting.note_wait(1, value)
    (peer,) = channel_stats("c", 0, 2, counting.read()).peers
    assert peer.waits.histogram.index(1) == bucket
    assert (peer.waits.total_ns, peer.waits.longest_ns) == (value, value)


def test_values_cannot_be_changed():
    stats = channel_stats("c", 0, 2, HostCounters(0, joint=False).read())
    with pytest.raises(AttributeError):
        stats.ops = 1  # type: ignore[misc]
    assert isinstance(stats, pcie_comm.ChannelStats)


# --- on a device, as far as the driver's calls show it --------------------------------------------


class Host(FakeHost):
    """A driver whose copies end after some looks at their stream, and that notes the mode."""

    looks = 3

    def __init__(self) -> None:
        super().__init__()
        self.log: list[object] = []
        self.left = 0
        self.pinned: dict[int, np.ndarray] = {}

    class CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_RELAXED = "relaxed"

    def cuThreadExchangeStreamCaptureMode(self, mode):
        self.log.append(mode)
        return Status.CUDA_SUCCESS, "before"

    def cuCtxGetStreamPriorityRange(self):
        return Status.CUDA_SUCCESS, 0, -5

    def cuStreamCreateWithPriority(self, flags, priority):
        assert (flags, priority) == (1, -5), "it must not wait for the default stream"
        return Status.CUDA_SUCCESS, "private"

    def cuMemHostAlloc(self, nbytes, flags):
        memory = np.zeros(nbytes, np.uint8)
        self.pinned[memory.ctypes.data] = memory
        return Status.CUDA_SUCCESS, memory.ctypes.data

    def cuMemFreeHost(self, address):
        del self.pinned[address]
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyDtoHAsync(self, host, address, nbytes, stream):
        assert stream == "private"
        self.left = self.looks
        return super().cuMemcpyDtoHAsync(host, address, nbytes, stream)

    def cuStreamQuery(self, stream):
        self.left -= 1
        return (600,) if self.left > 0 else (Status.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream):
        raise AssertionError("a reading has a deadline")


@pytest.fixture
def host(monkeypatch):
    fake = Host()
    monkeypatch.setattr(driver, "_bindings", fake)
    with fake.process().entered():
        yield fake


def on_device(host) -> tuple[DeviceCounters, int]:
    device = CudaDevice.at(0)
    with device.current():
        address = driver.call("cuMemAlloc", MAX_WORLD * CountLayout.NBYTES)
        records = np.arange(MAX_WORLD * WORDS, dtype=np.uint64)
        driver.call("cuMemcpyHtoD", address, records.ctypes.data, records.nbytes)
    return DeviceCounters(device, address), address


def test_a_reading_copies_on_a_stream_of_its_own(host):
    reader, _ = on_device(host)
    records = reader.read().by_rank
    assert records.shape == (MAX_WORLD, WORDS)
    assert records[2, 3] == 2 * WORDS + 3
    assert host.log == ["relaxed", "before"], "a capture of another thread goes on"
    reader.close()
    reader.close()
    assert host.pinned == {}
    with pytest.raises(ClosedError):
        reader.read()


def test_a_reading_that_does_not_end_is_an_error_and_may_be_repeated(host, monkeypatch):
    reader, _ = on_device(host)
    monkeypatch.setattr(counters, "READ_TIMEOUT_S", 0.02)
    host.looks = 1 << 30
    with pytest.raises(CudaError, match="did not come from the device"):
        reader.read()
    host.looks, host.left = 1, 1
    assert reader.read().by_rank[0, 1] == 1

"""Groups that fail to come about: on every rank, by the same reason, with nothing left behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch
from launcher import run_threads
from leaks import own_files, own_mappings
from worlds import Held, build_each, close_each, hook_waits, on_each, pair_of, small

from pcie_comm import (
    CommError,
    InvalidArgumentError,
    MismatchError,
    PcieDcpGroup,
    PeerAbortedError,
    PeerTimeoutError,
    UnsupportedError,
    kimi_topk16,
    local_world,
)
from pcie_comm.bootstrap import ThreadBootstrap
from pcie_comm.host_engine import HostEngine
from pcie_comm.layout import SlabLayout
from pcie_comm.rank_facts import RankFacts
from pcie_comm.transport.host_shm import HostShmTransport

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def assert_good(groups) -> None:
    """Make a call on every rank, and close."""
    results = on_each(groups, lambda g: g.all_gather_pair(*pair_of(float(g.rank)))[0][0, ::4])
    for result in results:
        assert result.tolist() == [float(rank) for rank in range(len(groups))]
    close_each(groups)


# --- B14: one rank fails -------------------------------------------------------------------------


def fail_on_rank_1(monkeypatch, cls, name: str, error: Exception, *, half_done: bool) -> None:
    """Make a method raise on rank 1, before or after its work."""
    method = getattr(cls, name)

    def failing(self, *arguments):
        rank = self.info.rank if isinstance(self, HostShmTransport) else arguments[0]
        if rank != 1:
            return method(self, *arguments)
        if half_done:
            method(self, *arguments)
        raise error

    monkeypatch.setattr(cls, name, failing)


def full() -> UnsupportedError:
    return UnsupportedError("no room: free_nbytes=7", reason="full")


FAILURES = {
    "transport": ({"transport": "carrier_pigeon"}, None, "carrier_pigeon"),
    "transport of the wrong type": ({"transport": ["host_shm"]}, None, "host_shm"),
    "transport for GPUs": ({"device": "cuda:0"}, None, "cuda"),
    "device": ({"device": "toaster"}, None, "toaster"),
    "device of another kind": ({"device": "meta"}, None, "meta"),
    "allocate": ({}, (HostShmTransport, "_create", full(), False), "free_nbytes=7"),
    "allocate half done": ({}, (HostShmTransport, "_create", full(), True), "free_nbytes=7"),
    "allocate, a bug": ({}, (HostShmTransport, "_create", ZeroDivisionError("1/0"), True), "1/0"),
    "map": ({}, (HostShmTransport, "_attach", OSError("EMFILE"), False), "EMFILE"),
    "map half done": ({}, (HostShmTransport, "_attach", OSError("EMFILE"), True), "EMFILE"),
    "B31, a check": ({}, (HostShmTransport, "seal", full(), False), "free_nbytes=7"),
    "engine": ({}, (HostEngine, "__init__", MemoryError("no memory"), False), "no memory"),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("own", "patch", "text"), FAILURES.values(), ids=FAILURES)
def test_b14_a_constructor_that_fails_on_one_rank_fails_on_all(
    own, patch, text, world_size, monkeypatch
):
    """Long before the limit, with the first rank's reason; nothing is left, a second try works."""
    if own.get("device") == "cuda:0" and torch.cuda.is_available():
        own = {"device": "cuda:99"}
    with monkeypatch.context() as patched:
        if patch is not None:
            cls, name, error, half_done = patch
            fail_on_rank_1(patched, cls, name, error, half_done=half_done)
        started = time.monotonic()
        errors = build_each([{} if rank != 1 else own for rank in range(world_size)])
        assert time.monotonic() - started < 5.0
    first = errors[1]
    assert isinstance(first, Exception)
    assert not isinstance(first, PeerAbortedError)
    assert text in str(first)
    for rank, error in enumerate(errors):
        if rank == 1:
            continue
        assert isinstance(error, PeerAbortedError), error
        assert (error.rank, error.peer) == (rank, 1)
        assert "failed on rank 1" in str(error)
        assert f"{type(first).__name__}: {first}".split(" [")[0] in str(error)
    assert own_files() == []
    del first, error, errors
    gc.collect()
    assert own_mappings() == []
    assert_good(build_each([{}] * world_size))


def test_b14_a_rank_that_never_comes(monkeypatch):
    """The others wait for the limit of the set-up, not for ever."""
    ends = ThreadBootstrap.create(2)
    started = time.monotonic()
    with pytest.raises(PeerTimeoutError, match="ranks 1 of world_size=2 did not come") as caught:
        PcieDcpGroup.from_bootstrap(ends[0], "cpu", config=small(setup_timeout_s=0.3))
    assert 0.3 <= time.monotonic() - started < 2.0
    assert (caught.value.rank, caught.value.peer) == (0, 1)


def test_b14_a_channel_that_fails_on_one_rank_leaves_the_group_alone(monkeypatch):
    groups = build_each([{}] * 3)
    with monkeypatch.context() as patched:
        fail_on_rank_1(patched, HostShmTransport, "_attach", OSError("EMFILE"), half_done=True)
        errors = on_each(groups, lambda group: group.channel("draft"))
    assert [type(error) for error in errors] == [PeerAbortedError, OSError, PeerAbortedError]
    assert "mapping of channel 'draft' failed on rank 1: OSError: EMFILE" in str(errors[0])
    lanes = on_each(groups, lambda group: group.channel("draft"))
    on_each(lanes, lambda lane: lane.all_gather_pair(*pair_of(1.0)))
    assert_good(groups)


def test_b14_an_interrupt_during_set_up_reaches_the_other_ranks(monkeypatch):
    fail_on_rank_1(monkeypatch, HostShmTransport, "_create", KeyboardInterrupt(), half_done=True)
    started = time.monotonic()
    errors = build_each([{}] * 2)
    assert time.monotonic() - started < 5.0
    assert isinstance(errors[1], KeyboardInterrupt)
    assert isinstance(errors[0], PeerAbortedError)
    assert "rank 1 aborted: slab of channel 'default': KeyboardInterrupt" in str(errors[0])


def test_b31_a_check_that_does_not_return_holds_up_nobody_else(monkeypatch):
    """The driver of rank 1 hangs in a read of its peer's memory."""
    attach, hanging = HostShmTransport._attach, Held()

    def hang(self, records):
        if self.info.rank == 1:
            hanging.wait()
        return attach(self, records)

    monkeypatch.setattr(HostShmTransport, "_attach", hang)
    ends = ThreadBootstrap.create(2)

    def build(rank):
        started = time.monotonic()
        try:
            return PcieDcpGroup.from_bootstrap(ends[rank], "cpu", config=small(setup_timeout_s=0.5))
        except PeerTimeoutError as error:
            assert rank == 0
            return error.peer, time.monotonic() - started
        finally:
            if rank == 0:
                hanging.open()

    (peer, elapsed_s), other = run_threads(build, 2)
    assert peer == 1
    assert 0.4 < elapsed_s < 5.0
    assert isinstance(other, CommError), "rank 0 has freed what it then finds no more"


# --- B27: ranks that do not agree ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("protocol", ("push", "pull")),
        ("protocol", ("auto", "push")),
        ("slot_nbytes", (1 << 16, 1 << 17)),
        ("max_rows", (8, 4)),
        ("timeout_s", (10.0, 11.0)),
        ("setup_timeout_s", (20.0, 21.0)),
        ("overlap", (False, True)),
    ],
)
def test_b27_different_settings_are_a_mismatch_on_all_ranks(field, values):
    choices = [values[0], values[1], values[0]]
    errors = build_each([{"config": small(**{field: value})} for value in choices])
    for error in errors:
        assert isinstance(error, MismatchError)
        assert error.values == {rank: {field: value} for rank, value in enumerate(choices)}
        assert f"{field}: rank 0={values[0]!r}, rank 1={values[1]!r}" in str(error)


def test_b27_different_transports_and_devices():
    errors = build_each([{"transport": "auto"}, {"transport": "host_shm"}])
    for error in errors:
        assert isinstance(error, MismatchError)
        assert error.values == {0: {"transport": "auto"}, 1: {"transport": "host_shm"}}


def test_b27_a_transport_that_does_not_serve_the_device():
    for error in build_each([{"transport": "cuda_ipc"}] * 2):
        assert isinstance(error, UnsupportedError)
        assert "transport='cuda_ipc' does not serve device=cpu" in str(error)


def test_b27_different_kernels_are_a_mismatch(monkeypatch):
    gather = RankFacts.gather
    seen = iter(range(10))

    def other(device, contract):
        return gather(device, {**contract, "kernels": {"all_gather_pair": str(next(seen))}})

    monkeypatch.setattr(RankFacts, "gather", other)
    errors = build_each([{}] * 2)
    assert [type(error) for error in errors] == [MismatchError] * 2
    assert "kernels" in str(errors[0])


def test_facts_survive_the_journey():
    here = RankFacts.gather(torch.device("cpu"), {})
    assert RankFacts.decode(here.encode(), 0) == here


# --- B28: world sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [0, -1, 17, 32, True, 2.0, "2", None, [0, 0]])
def test_b28_impossible_world_sizes_are_refused_at_construction(world_size):
    with pytest.raises(InvalidArgumentError, match=r"1 to 16|more than once"):
        PcieDcpGroup(world_size, device="cpu")
    with pytest.raises(InvalidArgumentError, match="give 1 to 16"):
        local_world(world_size, "cpu")


@pytest.mark.parametrize("world_size", [1, 3, 5, 6, 9, 12])
def test_b28_kimi_serves_every_world_and_a_wrong_share_is_named(world_size):
    """Shards are those of torch.tensor_split; what is not is refused, and the group works on."""
    down, bias = torch.randn(1, 3584).bfloat16(), torch.randn(896)
    logits = torch.randn(1, 896)
    downs, routers = (whole.tensor_split(world_size, 1) for whole in (down, logits))
    wanted = (down, *kimi_topk16(logits, bias))

    def on_rank(group):
        group.prepare("all_gather_pair_kimi_topk", rows=1)
        with pytest.raises(InvalidArgumentError, match="router"):
            group.all_gather_pair_kimi_topk(downs[group.rank], torch.zeros(1, 7), bias)
        got = group.all_gather_pair_kimi_topk(downs[group.rank], routers[group.rank], bias)
        first, _ = group.all_gather_pair(*pair_of(float(group.rank)))
        return all(map(torch.equal, got, wanted)), first[0, ::4].tolist()

    with local_world(world_size, "cpu", config=small()) as world:
        assert world.run(on_rank) == [(True, list(map(float, range(world_size))))] * world_size


# --- B29: order of the set-up --------------------------------------------------------------------


def late_rank_1(monkeypatch, delay: Callable[[HostShmTransport], None]) -> None:
    """Call `delay` on rank 1 between the end of the exchange and its first call."""
    open_channel = PcieDcpGroup._open_channel

    def late(self, name):
        channel = open_channel(self, name)
        if self.rank == 1:
            delay(self._transports[name])
        return channel

    monkeypatch.setattr(PcieDcpGroup, "_open_channel", late)


def first_call(group):
    """Make the call at once, from the thread that built the group."""
    with group:
        return group.all_gather_pair(*pair_of(float(group.rank)))[0][0, ::4].tolist()


def create_and_call(config) -> list:
    ends = ThreadBootstrap.create(2)
    return run_threads(
        lambda r: first_call(PcieDcpGroup.from_bootstrap(ends[r], "cpu", config=config)), 2
    )


def test_b29_the_first_call_may_come_while_a_peer_is_still_on_its_way(monkeypatch):
    late_rank_1(monkeypatch, lambda transport: time.sleep(0.002))
    for _ in range(200):
        assert create_and_call(small(slot_nbytes=4096)) == [[0.0, 1.0]] * 2
    assert own_files() == []
    assert own_mappings() == []


def test_b29_clearing_flags_after_the_exchange_would_lose_one(monkeypatch):
    """Negative control: the flag that rank 0 raised at once is gone."""
    flag_is_up = Held()
    hook_waits(monkeypatch, before=lambda engine: flag_is_up.open() if engine.rank == 0 else None)

    def clear(transport):
        flag_is_up.wait()
        start, stop = SlabLayout.FLAGS_OFFSET, SlabLayout.SLOTS_OFFSET
        transport._own.view[start:stop] = bytes(stop - start)

    late_rank_1(monkeypatch, clear)
    results = create_and_call(small(timeout_s=0.3, slot_nbytes=4096))
    assert isinstance(results[1], PeerTimeoutError)

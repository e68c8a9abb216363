"""Groups over several hosts, and over torch.distributed on one: results, failures, ends."""

from __future__ import annotations

import threading
import time

import exact
import pytest
import torch
import torch.distributed as dist
from hosts import build_on, fake_hosts, on_hosts
from launcher import succeeded
from test_plugins import PLUGIN, values_of
from worlds import pair_of, small

from pcie_comm import (
    BrokenError,
    InvalidArgumentError,
    MismatchError,
    PeerAbortedError,
    PeerError,
    PeerTimeoutError,
    UnsupportedError,
    local_world,
)
from pcie_comm.transport import torch_dist
from pcie_comm.watch import watchdog

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LAYOUTS = ["ab", "aabb", "abab", "aab", "abb", "aaab", "abbca", "abcd", "abaabab"]
LAYOUTS.append(pytest.param("aabbbbbc", marks=pytest.mark.slow))
LARGE = {"config": small(slot_nbytes=1 << 20, timeout_s=20.0)}


@pytest.fixture(autouse=True)
def _fake(monkeypatch):
    fake_hosts(monkeypatch)
    yield
    deadline = time.monotonic() + 15  # what hangs up has limits of its own
    while time.monotonic() < deadline and any(
        thread.name in ("pcie_comm.far", "pcie_comm.hang_up", "pcie_comm.store")
        for thread in threading.enumerate()
    ):
        time.sleep(0.01)
    left = [t.name for t in threading.enumerate() if t.name.startswith("pcie_comm.")]
    assert left == []
    assert watchdog.watched() == 0


def digest_on_one_host(world_size: int) -> tuple[int, str]:
    with local_world(world_size, "cpu", **LARGE) as world:
        return world.run(exact.run_all)[0]


def calls_on_every_rank(group):
    digests = [exact.run_all(group), group.channel("draft").run(PLUGIN, *plugin_inputs(group))]
    group.close()
    return digests


def plugin_inputs(group):
    return values_of(group.rank), torch.full((3,), group.rank, dtype=torch.int32)


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_every_collective_gives_the_bytes_of_one_host(hosts):
    """Unequal numbers of ranks, in any order; every rank on a host of its own, too."""
    groups = succeeded(build_on(hosts, **LARGE))
    described = groups[0].describe()
    count = len(set(hosts))
    assert described["transport"] == "torch_dist"
    assert described["transport_reason"] == f"the ranks are on {count} hosts; inside each: auto"
    assert described["hosts"] == [
        [rank for rank, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)
    ]
    shared = "host_shm" if hosts.count(hosts[0]) > 1 else None
    assert described["channel default"]["inside"] == shared
    results = succeeded(on_hosts(groups, hosts, calls_on_every_rank))
    want = torch.stack([values_of(rank) for rank in range(len(hosts))]).amax(0)
    for rank, (digest, largest) in enumerate(results):
        assert digest == digest_on_one_host(len(hosts))
        assert torch.equal(largest, want + rank)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_torch_dist_on_one_host_gives_the_same_bytes(world_size):
    with local_world(world_size, "cpu", "torch_dist", **LARGE) as world:
        digests = world.run(exact.run_all)
        described = world.groups[0].describe()
    assert set(digests) == {digest_on_one_host(world_size)}
    assert (described["transport"], described["transport_reason"]) == ("torch_dist", "asked for")
    calls = described["channel default"]["calls"]
    assert calls["all_gather_pair"] == ["torch_dist: gathered by gloo"]


def test_torch_dist_may_be_asked_for_over_hosts():
    """Then nothing is shared inside a host: one rail for all."""
    groups = succeeded(build_on("aab", transport="torch_dist"))
    assert groups[0].describe()["channel default"]["inside"] is None
    results = on_hosts(groups, "aab", lambda g: g.all_gather_pair(*pair_of(float(g.rank)))[0])
    assert [result[0, ::4].tolist() for result in results] == [[0.0, 1.0, 2.0]] * 3
    succeeded(on_hosts(groups, "aab", lambda g: g.close()))


def test_a_transport_inside_hosts_may_be_asked_for():
    groups = succeeded(build_on("aab", transport="host_shm"))
    assert groups[0].describe()["channel default"]["inside"] == "host_shm"
    succeeded(on_hosts(groups, "aab", lambda g: g.close()))
    errors = build_on("aab", transport="cuda_ipc")
    assert all(isinstance(error, (UnsupportedError, PeerError)) for error in errors), errors
    assert isinstance(errors[0], UnsupportedError)


def test_calls_larger_than_a_slot():
    """As many bytes as a slot holds on one host, where a small host has several rails; and more."""
    hosts = "aaaab"
    groups = succeeded(build_on(hosts, config=small(slot_nbytes=5 * 4096)))
    width = 4096 // 4 // 2

    def call(group):
        return group.all_gather_pair(*pair_of(float(group.rank), width))[0]

    for result in succeeded(on_hosts(groups, hosts, call)):
        assert result[0, ::width].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    width *= 10
    for result in succeeded(on_hosts(groups, hosts, call)):
        assert result[0, ::width].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    succeeded(on_hosts(groups, hosts, lambda g: g.close()))


# --- failures ------------------------------------------------------------------------------------

WAYS = {"over hosts": ("aabb", "auto"), "on one host": ("aaaa", "torch_dist")}
way = pytest.mark.parametrize(("hosts", "transport"), WAYS.values(), ids=WAYS)


def call(group):
    return group.all_gather_pair(*pair_of(1.0))


def close_all(groups, hosts):
    started = time.monotonic()
    assert on_hosts(groups, hosts, lambda g: g.close()) == [None] * len(groups)
    assert time.monotonic() - started < 5.0


@way
def test_a_rank_that_does_not_call_is_named(hosts, transport):
    config = small(timeout_s=1.0)
    groups = succeeded(build_on(hosts, transport=transport, config=config))
    succeeded(on_hosts(groups, hosts, call))
    started = time.monotonic()
    errors = on_hosts(groups, hosts, lambda g: None if g.rank == 3 else call(g))
    assert time.monotonic() - started < 4.0
    partners = [1] if transport == "auto" else [0, 1, 2]  # the others miss it inside their host
    for rank in partners:
        assert isinstance(errors[rank], PeerTimeoutError), errors
        assert (errors[rank].peer, errors[rank].wanted, errors[rank].epoch) == (3, 2, 2)
        assert errors[rank].elapsed_ns >= 1e9
    assert all(isinstance(errors[rank], PeerError) for rank in (0, 1, 2)), errors
    with pytest.raises(BrokenError):
        call(groups[0])
    close_all(groups, hosts)


@way
def test_other_shapes_are_a_mismatch(hosts, transport):
    groups = succeeded(build_on(hosts, transport=transport))
    started = time.monotonic()
    errors = on_hosts(
        groups, hosts, lambda g: g.all_gather_pair(*pair_of(1.0, 400 if g.rank == 3 else 4))
    )
    assert time.monotonic() - started < 5.0
    assert isinstance(errors[3], MismatchError), errors
    assert isinstance(errors[1], MismatchError), errors
    assert errors[1].peer == 3
    assert set(errors[1].values) == {1, 3}
    assert all(isinstance(error, (MismatchError, PeerError)) for error in errors), errors
    close_all(groups, hosts)


@way
def test_another_call_of_the_same_size_is_a_mismatch(hosts, transport):
    """What came must never be computed with."""
    groups = succeeded(build_on(hosts, transport=transport))
    heads = torch.ones(1, 1, 4).half()

    def on_rank(group):
        if group.rank == 3:
            return group.all_gather_heads(heads.view(1, 1, 4).repeat(1, 2, 1))
        return group.all_gather_heads(heads.view(1, 1, 4).repeat(1, 1, 2))

    errors = on_hosts(groups, hosts, on_rank)
    assert all(isinstance(error, (MismatchError, PeerError)) for error in errors), errors
    assert isinstance(errors[3], MismatchError)
    close_all(groups, hosts)


@pytest.mark.parametrize("epoch", [0xFFFF_FFFD])
def test_the_epoch_survives_its_wrap(epoch):
    hosts = "aab"
    groups = succeeded(build_on(hosts))
    for group in groups:
        group._channels["default"].engine.seed_epoch(epoch)

    def calls(group):
        return [group.all_gather_pair(*pair_of(float(i)))[0][0, 0].item() for i in range(6)]

    assert on_hosts(groups, hosts, calls) == [[0.0, 1, 2, 3, 4, 5]] * 3
    close_all(groups, hosts)


@way
def test_an_abort_ends_the_waits_of_every_host(hosts, transport):
    # What is under way to another host ends with its own limit: the shorter, the less to wait for.
    groups = succeeded(build_on(hosts, transport=transport, config=small(timeout_s=4.0)))
    started = time.monotonic()

    def on_rank(group):
        if group.rank == 0:
            time.sleep(0.3)
            group.abort()
            return None
        return call(group)

    errors = on_hosts(groups, hosts, on_rank)
    assert time.monotonic() - started < 3.0
    for error in errors[1:]:
        assert isinstance(error, PeerAbortedError), errors
        assert error.peer == 0
    for group in groups[1:]:
        with pytest.raises(PeerAbortedError):
            group.check()
    close_all(groups, hosts)


def test_channels_fail_alone():
    hosts = "aabb"
    groups = succeeded(build_on(hosts, config=small(timeout_s=1.0)))
    lanes = succeeded(on_hosts(groups, hosts, lambda g: g.channel("draft")))
    errors = on_hosts(lanes, hosts, lambda lane: None if lane.info.rank == 3 else call(lane))
    assert [isinstance(error, PeerError) for error in errors] == [True, True, True, False]
    results = succeeded(on_hosts(groups, hosts, call))
    assert all(torch.equal(first, torch.ones(1, 16)) for first, _ in results)
    close_all(groups, hosts)


def test_a_rank_that_fails_in_the_constructor_is_told_to_all():
    hosts = "aabb"
    errors = build_on(hosts, device="toaster")
    assert all(isinstance(error, InvalidArgumentError) for error in errors)


# --- backends ------------------------------------------------------------------------------------


def test_which_backend():
    choose = torch_dist.choose_backend
    assert choose([("nccl", "gloo")] * 2, ["a", "b"]) == "nccl"
    assert choose([("nccl", "gloo")] * 2, ["a", "a"]) == "gloo"
    assert choose([("nccl", "gloo"), ("gloo",)], ["a", "b"]) == "gloo"
    assert choose([("mine", "nccl", "gloo")] * 2, ["a", "a"]) == "mine"
    assert torch_dist.backends_for(torch.device("cpu"), None) == ("gloo",)


def test_a_backend_of_somebody_else(monkeypatch):
    made = []

    def create(store, rank, size, limit):
        made.append((rank, size))
        return dist.ProcessGroupGloo(store, rank, size, limit)

    plugin = dist.Backend._BackendPlugin(create, False)
    monkeypatch.setitem(dist.Backend._plugins, "MINE", plugin)
    monkeypatch.setattr("pcie_comm.meeting.backends_for", lambda *_: ("mine", "gloo"))
    hosts = "aab"
    groups = succeeded(build_on(hosts))
    assert groups[0].describe()["channel default"]["across"] == "mine"
    results = on_hosts(groups, hosts, lambda g: g.all_gather_pair(*pair_of(float(g.rank)))[0])
    assert [result[0, ::4].tolist() for result in results] == [[0.0, 1.0, 2.0]] * 3
    assert sorted(made) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    close_all(groups, hosts)


def test_a_backend_that_is_not_there(monkeypatch):
    monkeypatch.setattr("pcie_comm.meeting.backends_for", lambda *_: ("nothing", "gloo"))
    errors = build_on("ab")
    assert all(isinstance(error, UnsupportedError) for error in errors), errors
    assert "'nothing'" in str(errors[0])

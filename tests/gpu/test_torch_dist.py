"""Calls over torch.distributed with tensors on a GPU: NCCL with one rank, gloo with several."""

from __future__ import annotations

import time

import harness
import pytest
import torch
import torch.distributed as dist
from hosts import build_on, fake_hosts, on_hosts
from launcher import free_port, succeeded

from pcie_comm import PcieDcpGroup, UnsupportedError, local_world

pytestmark = pytest.mark.gpu

GATHERS = ("all_gather_pair", "all_gather_heads")
KIMI_OP = "all_gather_pair_kimi_topk"


def ops_of(world_size: int) -> tuple[str, ...]:
    return (*GATHERS, KIMI_OP) if world_size in harness.KIMI_WORLDS else GATHERS


def check(world, world_size: int) -> None:
    for op in ops_of(world_size):
        for rows in (1, 8, 64):
            batch = harness.make_batch(op, 2, world_size, rows)
            batch.refresh()
            torch.cuda.synchronize()
            world.run(lambda group, batch=batch: [batch.call(group, i) for i in range(2)])
            assert batch.mismatches() == 0, (op, rows)


def per_call_us(call, count: int = 50) -> float:
    for _ in range(5):
        call()
    started = time.perf_counter()
    for _ in range(count):
        call()
    return round((time.perf_counter() - started) / count * 1e6, 1)


def test_nccl_with_one_rank(figures):
    with local_world(1, harness.DEVICE, transport="torch_dist") as world:
        group = world.groups[0]
        assert group.describe()["channel default"]["across"] == "nccl"
        check(world, 1)
        batch = harness.make_batch(KIMI_OP, 1, 1, 1)
        with torch.cuda.stream(world.streams[0]):
            figures(backend="nccl", ranks=1, kimi_us=per_call_us(lambda: batch.call(group, 0)))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gloo_with_ranks_that_share_the_gpu(world_size, figures):
    with local_world(world_size, harness.DEVICE, transport="torch_dist") as world:
        group = world.groups[0]
        assert group.describe()["channel default"]["across"] == "gloo"
        check(world, world_size)
        times = group.describe()["channel default"]["times"]
        figures(backend="gloo", ranks=world_size, **times)


def test_an_existing_nccl_group_is_left_alone(monkeypatch):
    """Its backend is taken, itself it is not touched."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    torch.cuda.set_device(harness.DEVICE)
    dist.init_process_group("nccl", rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        with PcieDcpGroup(1, harness.DEVICE, world, transport="torch_dist") as group:
            assert group.describe()["channel default"]["across"] == "nccl"
            heads = torch.randn(2, 1, 8, device=harness.DEVICE).half()
            assert torch.equal(group.all_gather_heads(heads), heads)
        one = torch.ones(1, device=harness.DEVICE)
        dist.all_reduce(one)
        assert float(one) == 1.0
    finally:
        dist.destroy_process_group()


def test_a_capture_is_refused_and_ends_cleanly():
    with local_world(1, harness.DEVICE, transport="torch_dist") as world:
        group, stream = world.groups[0], world.streams[0]
        heads = torch.randn(2, 1, 8, device=harness.DEVICE).half()
        out = torch.zeros_like(heads)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out.add_(1)
            with pytest.raises(UnsupportedError, match="cannot be captured"):
                group.all_gather_heads(heads, out=out)
        graph.replay()
        torch.cuda.synchronize()
        assert float(out.float().sum()) == out.numel()


@pytest.mark.parametrize("hosts", ["ab", "aab", "aabb"])
def test_hosts_share_through_slabs_on_the_gpu(hosts, monkeypatch, figures):
    """Threads say that they are on two hosts: gloo between them, kernels inside each."""
    fake_hosts(monkeypatch)
    groups = succeeded(build_on(hosts, device=harness.DEVICE, config=None))
    streams = [torch.cuda.Stream(harness.DEVICE) for _ in hosts]
    inside = groups[0].describe()["channel default"]["inside"]
    assert inside == ("cuda_local" if hosts.count("a") > 1 else None)
    for op in ops_of(len(hosts)):
        for rows in (1, 8):
            batch = harness.make_batch(op, 1, len(hosts), rows)
            batch.refresh()
            torch.cuda.synchronize()

            def call(group, batch=batch):
                with torch.cuda.stream(streams[group.rank]):
                    batch.call(group, 0)
                    streams[group.rank].synchronize()

            succeeded(on_hosts(groups, hosts, call))
            assert batch.mismatches() == 0, (op, rows)
    figures(hosts=hosts, **groups[0].describe()["channel default"]["times"])
    succeeded(on_hosts(groups, hosts, lambda group: group.close()))

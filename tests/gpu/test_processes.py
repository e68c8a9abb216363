"""One process per rank on one GPU: CUDA IPC and pinned host memory, with MPS and without."""

from __future__ import annotations

import os
import time
from pathlib import Path

import harness
import pytest
from launcher import run_ranks
from mps_server import FEW_QUEUES, mps_server

from pcie_comm import driver
from pcie_comm.transport.cuda_memory import dashed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def mps(tmp_path_factory):
    """Yield the environment of an MPS server's clients."""
    with mps_server(tmp_path_factory.mktemp("mps")) as environment:
        yield environment


def exchange(rank: int, world_size: int, rounds: int) -> list[dict[str, object]]:
    """Run every op over both transports; return mismatches and what is left after close."""
    import torch

    torch.cuda.set_device(0)
    harness.warm_up()
    return [exchange_over(name, rank, world_size, rounds) for name in ("cuda_ipc", "host_pinned")]


def exchange_over(transport: str, rank: int, world_size: int, rounds: int) -> dict[str, object]:
    """Run every op over one transport."""
    import torch

    from pcie_comm import Config, PcieDcpGroup

    mismatches, started = {}, time.monotonic()
    config = Config(timeout_s=20)
    with PcieDcpGroup(world_size, "cuda:0", transport=transport, config=config) as group:
        stream = torch.cuda.Stream()
        for op in harness.ops_for(world_size):
            group.prepare(op)
            torch.manual_seed(7)  # every rank makes the whole batch, and uses its own part
            batch = harness.make_batch(op, harness.RING, world_size, 2)
            mismatches[op] = 0
            for _ in range(rounds // harness.RING):
                batch.refresh()
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    for index in range(batch.rounds):
                        batch.call(group, index)
                    stream.synchronize()
                group.check()
                mismatches[op] += batch.mismatches([rank])
            del batch
        described = group.describe()
    maps = Path("/proc/self/maps").read_text()
    return {
        "mismatches": mismatches,
        "transport": described["transport"],
        "seconds": round(time.monotonic() - started, 2),
        "mapped": maps.count("pcie_comm."),
        "device_bytes_grown": growth_of_groups(world_size, transport),
    }


def growth_of_groups(world_size: int, transport: str) -> int:
    """Return how much device memory three more groups cost after they were closed."""
    import torch

    from pcie_comm import Config, PcieDcpGroup

    config = Config(slot_nbytes=128 << 20)
    free = []
    for count in (1, 3):
        for _ in range(count):
            with PcieDcpGroup(world_size, "cuda:0", transport=transport, config=config) as group:
                heads = torch.zeros(1, 1, 8, dtype=torch.bfloat16, device="cuda")
                group.all_gather_heads(heads)
                torch.cuda.synchronize()
        time.sleep(0.5)  # the figure is the whole device's: let the other ranks close, too
        free.append(torch.cuda.mem_get_info()[0])
        time.sleep(0.5)
    return free[0] - free[1]


def check(world_size: int, environment, figures, mps: bool) -> None:
    rounds = harness.FULL_ROUNDS
    by_rank = run_ranks(exchange, world_size, timeout_s=240, args=(rounds,), env=environment)
    for results in zip(*by_rank, strict=True):
        figures(
            world=world_size,
            transport=results[0]["transport"],
            mps=mps,
            rounds=rounds,
            mismatches=sum(sum(r["mismatches"].values()) for r in results),
            seconds=max(r["seconds"] for r in results),
            device_bytes_grown=[r["device_bytes_grown"] for r in results],
        )
        for result in results:
            assert not any(result["mismatches"].values())
            assert result["mapped"] == 0
            assert result["device_bytes_grown"] < 64 << 20  # a leak would be three slabs
    assert [r["transport"] for r in by_rank[0]] == ["cuda_ipc", "host_pinned"]
    assert not list(Path("/dev/shm").glob("pcie_comm.*"))


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_under_mps(world_size, mps, figures):
    check(world_size, mps, figures, True)


def test_b21_processes_without_mps(figures):
    """Time slices: a handshake takes milliseconds, and must still be right. One process names its
    GPU by number, the other by UUID, which CUDA_VISIBLE_DEVICES takes as well."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    uuid = f"GPU-{dashed(driver.device_uuid(0))}"
    environment = [{**FEW_QUEUES, "CUDA_VISIBLE_DEVICES": name} for name in (shown, uuid)]
    check(2, environment, figures, False)

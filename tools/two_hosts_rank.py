"""The ranks of one host of tools/two_hosts.py, each a process: calls, checks, times, faults."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import exact  # noqa: E402
import torch  # noqa: E402

from pcie_comm import CommError, Config, PcieDcpGroup, local_world  # noqa: E402

CONFIG = Config(timeout_s=5.0, setup_timeout_s=30.0, slot_nbytes=1 << 20)
WARM_UP = 20
PATIENCE_S = 20.0
"""How long a rank that was stopped is left so."""


def inputs(group: PcieDcpGroup, rows: int) -> dict[str, Callable[[], Any]]:
    """Return a call of each collective."""
    world = group.world_size
    down = torch.randn(rows, 3584 // world).bfloat16()
    logits, bias = torch.randn(rows, 896 // world), torch.randn(896)
    heads = torch.randn(rows, 2, 128).half()
    calls: dict[str, Callable[[], Any]] = {
        "all_gather_pair": lambda: group.all_gather_pair(down, logits),
        "all_gather_heads": lambda: group.all_gather_heads(heads),
    }
    if 896 % world == 0:
        calls["all_gather_pair_kimi_topk"] = lambda: group.all_gather_pair_kimi_topk(
            down, logits, bias
        )
    return calls


def measured(group: PcieDcpGroup, way: str, calls: int) -> list[dict[str, Any]]:
    """Return microseconds per call of each collective: the whole, and where they went."""
    found = []
    for rows in (1, 8):
        for op, call in inputs(group, rows).items():
            for _ in range(WARM_UP):
                call()
            before = dict(times_of(group))
            samples = []
            for _ in range(calls):
                started = time.perf_counter_ns()
                call()
                samples.append((time.perf_counter_ns() - started) / 1000)
            after = times_of(group)
            split = {
                f"{part}_us": (after[f"{part}_ns"] - before[f"{part}_ns"]) / calls / 1000
                for part in ("across", "inside")
            }
            facts = {"way": way, "op": op, "rows": rows, "us": statistics.mean(samples)}
            found.append({**facts, "median_us": statistics.median(samples), **split})
    return found


def times_of(group: PcieDcpGroup) -> dict[str, int]:
    """Return where the calls of a group have spent their time so far."""
    channel: Any = group.describe()["channel default"]
    return dict(channel["times"])


def check_and_time(world_size: int, calls: int) -> dict[str, Any]:
    """Make calls of every kind over both ways; on rank 0 also on one host."""
    report: dict[str, Any] = {}
    with PcieDcpGroup(world_size, device="cpu", config=CONFIG) as group:
        described = group.describe()
        report["described"] = {k: described[k] for k in ("transport", "transport_reason", "hosts")}
        report["inside"] = described["channel default"]["inside"]  # type: ignore[index]
        report["digest"] = exact.run_all(group)
        report["times"] = measured(group, "rails", calls)
        rank = group.rank
    with PcieDcpGroup(world_size, device="cpu", transport="torch_dist", config=CONFIG) as flat:
        report["flat"] = exact.run_all(flat)
        report["times"] += measured(flat, "one rail", calls)
    if rank == 0:
        with local_world(world_size, "cpu", config=CONFIG) as world:
            report["one_host"] = world.run(exact.run_all)[0]
    return report


def suffer(world_size: int, rank: int, fault: str, victim: int) -> dict[str, Any]:
    """Let a fault happen while all others are in a call; return what this rank saw."""
    group = PcieDcpGroup(world_size, device="cpu", config=CONFIG)
    call = inputs(group, 1)["all_gather_pair"]
    for _ in range(3):
        call()
    if rank == victim:
        time.sleep(0.5)
        if fault == "abort":
            group.abort()
            group.close()
            return {"victim": True}
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    started = time.monotonic()
    report: dict[str, Any] = {}
    try:
        call()
    except CommError as error:
        report = {"error": type(error).__name__, "peer": error.peer, "text": str(error)}
    report["elapsed_s"] = round(time.monotonic() - started, 3)
    started = time.monotonic()
    group.close()
    report["close_s"] = round(time.monotonic() - started, 3)
    return report


def play(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Be a rank; write its report."""
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    world_size = int(os.environ["WORLD_SIZE"])
    if options.fault:
        report = suffer(world_size, rank, options.fault, options.victim)
    else:
        report = check_and_time(world_size, options.calls)
    part = Path(folder) / f"rank{rank}.part"
    part.write_text(json.dumps(report))
    part.rename(part.with_suffix(".json"))


def main() -> int:
    """Run this host's ranks until they end, or until a fault leaves one that does not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("ranks")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--fault", default="")
    parser.add_argument("--victim", type=int, default=0)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ranks = [int(rank) for rank in options.ranks.split(",")]
    processes = {
        rank: context.Process(target=play, args=(rank, options.folder, options), daemon=True)
        for rank in ranks
    }
    for process in processes.values():
        process.start()
    for rank, process in processes.items():
        process.join(PATIENCE_S if options.fault and rank == options.victim else None)
    for process in processes.values():
        process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Microseconds per operation of N ranks on one GPU, from captured graphs.

All ranks are captured into one graph that forks into their streams, runs the operation OPS times
in each and joins; so they start together, and one replay's time over OPS is one operation.
Outputs are checked after the timed replays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "gpu")]
sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

OPS, SAMPLES = 64, 21
CONTENDERS = (("tagged", True), ("tagged", False), ("push", False), ("pull", False))
"""Protocol, and whether launches overlap."""

MEMORIES = {"VRAM": "cuda_local", "pinned host": "host_pinned"}


def capture(streams: list[Any], enqueue: Callable[[int], object]) -> Any:
    """Return a graph in which every stream runs `enqueue(rank)` OPS times."""
    import torch

    graph = torch.cuda.CUDAGraph()
    root = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=root):
        for rank, stream in enumerate(streams):
            stream.wait_stream(root)
            with torch.cuda.stream(stream):
                for _ in range(OPS):
                    enqueue(rank)
        for stream in streams:
            root.wait_stream(stream)
    return graph


def time_graph(graph: Any) -> dict[str, float]:
    """Return median, min and max microseconds of one operation."""
    import torch

    samples = []
    for index in range(SAMPLES + 3):
        start, stop = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if index >= 3:
            samples.append(start.elapsed_time(stop) * 1000 / OPS)
    values = (statistics.median(samples), min(samples), max(samples))
    return dict(zip(("median_us", "min_us", "max_us"), (round(v, 3) for v in values), strict=True))


def caller(batch: Any, groups: Sequence[Any]) -> Callable[[int], object]:
    """Return a function that enqueues the first round of `batch` on a rank."""
    return lambda rank: batch.call(groups[rank], 0)


def measure_world(
    world_size: int, memory: str, protocol: str, overlap: bool
) -> list[dict[str, Any]]:
    """Return the latencies of every op at one world size."""
    import harness
    import torch

    from pcie_comm import Config, local_world

    results = []
    config = Config(protocol=protocol, timeout_s=5, overlap=overlap)
    with local_world(world_size, harness.DEVICE, MEMORIES[memory], config) as world:
        for op in harness.ops_for(world_size):
            for group in world.groups:
                group.prepare(op)
            for rows in (1, 8):
                batch = harness.make_batch(op, 1, world_size, rows)
                harness.run_eager(world, batch)
                torch.cuda.synchronize()
                graph = capture(world.streams, caller(batch, world.groups))
                figures = time_graph(graph)
                torch.cuda.synchronize()
                for group in world.groups:
                    group.check()
                facts = {"op": op, "world": world_size, "rows": rows, "memory": memory}
                facts |= {
                    "protocol": protocol,
                    "overlap": overlap,
                    "correct": batch.mismatches() == 0,
                }
                results.append({**facts, **figures})
    return results


def router_caller(logits: Any, bias: Any, out: Any) -> Callable[[int], object]:
    """Return a function that enqueues the stand-alone router."""
    from pcie_comm import kimi_topk16

    return lambda _: kimi_topk16(logits, bias, out=out)


def measure_router() -> list[dict[str, Any]]:
    """Return the latencies of the stand-alone router."""
    import torch

    from pcie_comm import kimi_topk16

    results = []
    for rows in (1, 8, 64):
        logits, bias = torch.randn(rows, 896, device="cuda"), torch.randn(896, device="cuda")
        out = kimi_topk16(logits, bias)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = capture([stream], router_caller(logits, bias, out))
        results.append({"op": "kimi_topk16", "rows": rows, **time_graph(graph)})
    return results


def main() -> int:
    """Measure and write JSON; return 1 if an output was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    import harness

    harness.warm_up()
    results = measure_router()
    for memory in MEMORIES:
        for protocol, overlap in CONTENDERS:
            for world_size in (2, 4, 8, 16):
                results += measure_world(world_size, memory, protocol, overlap)
                arguments.out.write_text(json.dumps(results, indent=1))
    for result in results:
        print(" ".join(f"{name}={value}" for name, value in result.items()))
    return 0 if all(result.get("correct", True) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())

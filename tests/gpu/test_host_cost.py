"""What an eager call costs the host, beside a bare launch of the same kernel."""

from __future__ import annotations

import statistics
import time

import harness
import pytest
import torch

from pcie_comm import driver, kimi_topk16, local_world

pytestmark = pytest.mark.gpu

CALLS, SAMPLES = 200, 40


def microseconds(call) -> float:
    """Median host time of one call; the device catches up between samples."""
    samples = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter_ns() - started) / CALLS / 1000)
    return statistics.median(samples)


def test_eager_call_costs_at_most_two_bare_launches(figures):
    with local_world(1, harness.DEVICE) as world:
        group = world.groups[0]
        batch = harness.make_batch("all_gather_pair_kimi_topk", 1, 1, 1)
        inputs = [tensor[0, 0] for tensor in batch.inputs] + batch.shared
        out = tuple(tensor[0, 0] for tensor in batch.outputs)
        torch.cuda.set_stream(world.streams[0])
        group.all_gather_pair_kimi_topk(*inputs, out=out)
        call = next(iter(group._channels["default"]._bound.values()))
        kernel = call.kernel
        stream = torch.cuda.current_stream().cuda_stream
        launch, function, block = kernel.entry_point, kernel.function, kernel.block
        grid, address = call.plan.grid, call.launch.arguments.address

        def bare() -> None:
            launch(function, grid, 1, 1, block, 1, 1, 0, stream, address, 0)

        costs = {
            "bare_launch_us": [],
            "eager_out_us": [],
            "eager_allocating_us": [],
            "kimi_topk16_out_us": [],
        }
        for _ in range(3):  # alternate, so that a busy host hits all alike
            costs["bare_launch_us"].append(microseconds(bare))
            costs["eager_out_us"].append(
                microseconds(lambda: group.all_gather_pair_kimi_topk(*inputs, out=out))
            )
            costs["eager_allocating_us"].append(
                microseconds(lambda: group.all_gather_pair_kimi_topk(*inputs))
            )
            costs["kimi_topk16_out_us"].append(
                microseconds(lambda: kimi_topk16(inputs[1], inputs[2], out=out[1:]))
            )
        torch.cuda.set_stream(torch.cuda.default_stream())
    medians = {name: round(statistics.median(values), 2) for name, values in costs.items()}
    ratio = medians["eager_out_us"] / medians["bare_launch_us"]
    figures(**medians, eager_over_bare=round(ratio, 2), driver=driver.call("cuDriverGetVersion"))
    assert ratio <= 2.0

"""Level 4, measure: several transfers at once, each also alone."""

from __future__ import annotations

from dataclasses import replace

from ..topology.probed import Flow, Pattern
from ..topology.record import ANY
from .lab import Lab, Memory
from .task import Answer, Task
from .transfer import Transfer, run


def pattern(lab: Lab, task: Task) -> Answer:
    """Fill in a pattern whose flows are given, without their figures.

    Raises:
        WrongBytes: A transfer did not arrive.
        UnsupportedError, CudaError: A GPU cannot address another.
    """
    (blank,) = task.blanks
    assert isinstance(blank, Pattern)
    open_ends = {ANY: "not yet"}
    flows = tuple(Flow(one, other, unknown=open_ends) for one, other in task.options["flows"])
    nbytes, budget_s = int(task.options["nbytes"]), float(task.options["budget_s"])
    with lab.memory() as memory:
        lanes: dict[str, int] = {}
        ways = []
        for flow in flows:
            lanes[flow.source] = lanes.get(flow.source, 0) + 1
            ways.append(_way(lab, memory, flow, (blank.access, nbytes, lanes[flow.source])))
        alone = [run(lab, [way], budget_s / len(ways)).each[0] for way in ways]
        rate = run(lab, ways, budget_s)
    filled = tuple(
        replace(flow, gbps=round(gbps, 3), alone_gbps=round(single, 3))
        for flow, gbps, single in zip(flows, rate.each, alone, strict=True)
    )
    return Answer((replace(blank, flows=filled, gbps=round(rate.together, 3)),))


def _way(lab: Lab, memory: Memory, flow: Flow, facts: tuple[str, int, int]) -> Transfer:
    access, nbytes, lane = facts
    gpu = lab.gpu(flow.source)
    near, far = memory.of(gpu.name, nbytes, gpu), memory.of(flow.target, nbytes, gpu)
    source, target = (near, far) if access == "write" else (far, near)
    return Transfer(gpu, lane, source, target, False, lab.seed())

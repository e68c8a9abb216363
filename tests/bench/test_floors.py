"""Kernels that only the benchmark runs: who builds them, and that groups run them."""

from __future__ import annotations

import pytest

from pcie_comm import build, local_world
from pcie_comm.bench.floors import FLOORS, Empty, Evict, Handshake
from pcie_comm.kernels.collective import PlanInfo, TensorMeta
from pcie_comm.kernels.plan_checks import check_plan, make_plan
from pcie_comm.kernels.registry import collectives

ARCH = "sm_90a"
INFO = PlanInfo(0, 8, "push", 1 << 20, 64, 16)
TOKEN = TensorMeta((4,), "float32", (1,), 4)
VALUES = TensorMeta((264, 4), "float32", (4, 1), 4)


@pytest.mark.parametrize(
    ("floor", "meta", "grid", "exchanged"),
    [(Empty(), TOKEN, 1, ()), (Handshake(), TOKEN, 1, (0,)), (Evict(), VALUES, 264, ())],
)
def test_plans(floor, meta, grid, exchanged):
    plan = make_plan(floor, INFO, [meta])
    check_plan(floor, plan, INFO, plan.staged_nbytes)
    assert (plan.grid, plan.exchanged, plan.staged_nbytes) == (grid, exchanged, 0)
    assert plan.kernel in floor.variants()
    assert len(plan.scalars) == floor.num_scalars(plan.kernel)


def test_they_are_not_registered():
    assert not set(FLOORS) & set(collectives())


def test_the_builder_knows_them_when_it_is_asked_to():
    usual = build.jobs([ARCH])
    assert not {job.key.op for job in usual} & set(FLOORS)
    more = build.jobs([ARCH], floors=True)
    assert more[: len(usual)] == usual
    assert [job.key.op for job in more[len(usual) :]] == list(FLOORS)
    named = build.jobs([ARCH], ["bench_empty"], floors=True)
    assert sorted(job.key.op for job in named) == sorted(FLOORS)
    assert not {job.key.op for job in build.own_jobs([ARCH])} & set(FLOORS)


def test_they_run_through_a_group():
    import torch

    with local_world(2, "cpu") as world:
        for floor in (Empty(), Handshake()):
            token = torch.ones(4)
            assert world.run(lambda g, f=floor, t=token: g.run(f, t, out=())) == [(), ()]
        values = torch.rand(3, 4)
        assert all(torch.equal(one, values) for one in world.run(lambda g: g.run(Evict(), values)))

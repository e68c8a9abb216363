"""The standalone collectives on the CPU: what they return, and what they refuse."""

from __future__ import annotations

import itertools

import pytest
import torch
from collective_cases import CASES, wrong
from worlds import small

from pcie_comm import InvalidArgumentError, UnsupportedError, local_world
from pcie_comm.kernels.all_gathers import AllGather
from pcie_comm.kernels.all_reduce_norm import AllReduceRmsNorm
from pcie_comm.kernels.collective import PlanInfo
from pcie_comm.kernels.plan_checks import check_plan, make_plan
from pcie_comm.kernels.registry import find
from pcie_comm.tensors import meta_of

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def as_tuple(results) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


@pytest.mark.parametrize("protocol", ["push", "pull"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_case_is_right(world_size, protocol):
    generator = torch.Generator().manual_seed(world_size)
    config = small(protocol=protocol, slot_nbytes=1 << 18)
    with local_world(world_size, "cpu", config=config) as world:
        for case, rows in itertools.product(CASES, (1, 4, 0)):
            inputs = case.make(world_size, rows, generator)
            want = case.expected(inputs) if rows else None

            def call(group, case=case, inputs=inputs):
                return as_tuple(group.run(case.plugin, *inputs[group.rank]))

            got = world.run(call)
            if rows:
                assert wrong(case, inputs, got) == []
                out = [tuple(torch.empty_like(one) for one in outputs) for outputs in got]
                world.run(
                    lambda g, c=case, i=inputs, o=out: g.run(c.plugin, *i[g.rank], out=o[g.rank])
                )
                assert wrong(case, inputs, out) == []
            assert want is None or len(want) == world_size


@pytest.mark.parametrize("protocol", ["push", "pull", "tagged", "auto"])
def test_every_plan_fits_its_kernel(protocol):
    generator = torch.Generator().manual_seed(1)
    for case, world, rows in itertools.product(CASES, (1, 2, 3, 7, 8, 16), (0, 1, 7, 64)):
        inputs = case.make(world, rows, generator)[0]
        for blocks in (2, 32):
            info = PlanInfo(0, world, protocol, 1 << 20, 64, blocks)
            plan = make_plan(case.plugin, info, [meta_of(tensor) for tensor in inputs])
            check_plan(case.plugin, plan, info, plan.staged_nbytes)
            assert plan.kernel in case.plugin.variants()
            assert len(plan.scalars) == case.plugin.num_scalars(plan.kernel)


def test_all_gather_takes_any_number_of_tensors_by_name():
    tensors = [torch.full((2, i + 1), i, dtype=torch.int32) for i in range(8)]
    with local_world(2, "cpu", config=small()) as world:
        for results in world.run(lambda group: group.run("all_gather", *tensors)):
            assert [tuple(one.shape) for one in results] == [(2, 2 * i + 2) for i in range(8)]
        single = world.run(lambda group: group.run("all_gather", tensors[0]))
        assert single[0].tolist() == [[0, 0], [0, 0]]
        for count in (0, 9):
            with pytest.raises(InvalidArgumentError, match="1 to 8 tensors"):
                world.groups[0].run("all_gather", *[tensors[0]] * count)


def test_shards_differ_between_ranks_where_they_should():
    whole = torch.arange(12.0).reshape(1, 12)
    with local_world(3, "cpu", config=small()) as world:
        for rank, part in enumerate(world.run(lambda g: g.run("reduce_scatter", whole))):
            assert torch.equal(part, 3 * whole[:, 4 * rank : 4 * rank + 4])


def test_the_sign_of_a_zero_is_kept():
    zeros = torch.full((1, 4), -0.0)
    with local_world(2, "cpu", config=small()) as world:
        for total in world.run(lambda g: g.run("all_reduce", zeros)):
            assert bool(total.signbit().all())


def test_norms_of_different_eps_do_not_match_and_are_different():
    inputs = [torch.ones(1, 8) * 1e-3, torch.zeros(1, 8), torch.ones(8)]
    with local_world(1, "cpu", config=small()) as world:
        (group,) = world.groups
        small_eps, _ = group.run("all_reduce_rms_norm", *inputs)
        large_eps, _ = group.run(AllReduceRmsNorm(1.0), *inputs)
        assert small_eps[0, 0] > 0.6
        assert large_eps[0, 0] < 0.01


X = torch.randn(2, 8)
REFUSED = {
    "one dimension": ("all_reduce", torch.randn(4)),
    "whole numbers": ("all_reduce", torch.ones(2, 4, dtype=torch.int32)),
    "an odd row of 2-byte numbers": ("all_reduce", torch.ones(2, 3, dtype=torch.bfloat16)),
    "columns apart": ("all_reduce", torch.randn(2, 16)[:, ::2]),
    "columns that do not divide": ("reduce_scatter", torch.randn(2, 5)),
    "heads that do not divide": ("lse_reduce_scatter", torch.randn(2, 3, 4), torch.randn(2, 3)),
    "lse of another shape": ("lse_reduce_scatter", torch.randn(2, 4, 4), torch.randn(2, 3)),
    "lse in bf16": ("lse_reduce_scatter", torch.randn(2, 4, 4), torch.randn(2, 4).bfloat16()),
    "a residual of another shape": ("all_reduce_rms_norm", X, X[:1], torch.ones(8)),
    "a residual of another dtype": ("all_reduce_rms_norm", X, X.half(), torch.ones(8)),
    "a weight of another size": ("all_reduce_rms_norm", X, X, torch.ones(7)),
    "logits of three dimensions": ("vocab_argmax", torch.randn(2, 3, 4)),
    "logits in fp8": ("vocab_argmax", torch.zeros(2, 4).to(torch.float8_e5m2)),
    "complex numbers": ("all_gather", torch.zeros(2, 4, dtype=torch.cfloat)),
    "rows that differ": ("all_gather", X, X[:1]),
    "a long word": ("barrier", torch.zeros(1, 2, dtype=torch.int32)),
    "a word of a half": ("barrier", torch.zeros(1, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_inputs_are_refused(name):
    op, *tensors = REFUSED[name]
    with local_world(2, "cpu", config=small()) as world:
        for group in world.groups:
            with pytest.raises((InvalidArgumentError, UnsupportedError)) as caught:
                group.run(op, *tensors)
            assert caught.value.op == op
            assert "plugin" not in str(caught.value)


def test_gathers_are_told_apart_by_their_kernels():
    keys = [str(key) for count in range(1, 9) for key in AllGather(count).variants()]
    assert len(set(keys)) == len(keys)
    assert find("all_gather").for_inputs(3) is find("all_gather").for_inputs(3)

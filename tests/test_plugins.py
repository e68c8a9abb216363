"""Plugins of one's own on a CPU: run without being registered, and found out when they lie."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from worlds import build_each, close_each, engine_of, on_each, pair_of, small

from pcie_comm import (
    Collective,
    InvalidArgumentError,
    KernelKey,
    MismatchError,
    OutputSpec,
    Plan,
    UnsupportedError,
    local_world,
)

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class LargestOfRanks(Collective):
    """[rows, width] int32 per rank, and a [width] bias of its own -> the largest, plus the bias."""

    name = "largest_of_ranks"
    num_inputs = 2

    def plan(self, info, *tensors):
        values, bias = tensors
        if values.dtype != "int32" or len(values.shape) != 2 or bias.shape != values.shape[1:]:
            raise InvalidArgumentError(f"no int32 rows and bias: {values}, {bias}", op=self.name)
        rows, width = values.shape
        return Plan(
            op=self.name,
            outputs=(OutputSpec(values.shape, "int32"),),
            kernel=KernelKey(self.name, (info.protocol,)),
            grid=1,
            scalars=(rows, width),
            staged_nbytes=4 * rows * width,
            exchanged=(0,),
            facts=(values.shape,),
        )

    def variants(self):
        return [KernelKey(self.name, (protocol,)) for protocol in ("push", "pull")]

    def kernel(self, key):
        raise AssertionError("a CPU needs no kernel")

    def num_scalars(self, key):
        return 2

    def reference(self, shards):
        values = torch.stack([values for values, _ in shards])
        return (values.amax(0) + shards[0][1],)


PLUGIN = LargestOfRanks()


def values_of(rank: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.int32).view(2, 3) * (1 if rank % 2 else -1)


@pytest.mark.parametrize("protocol", ["push", "pull"])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_plugin_runs_without_being_registered(world_size, protocol):
    """The exchanged input is every rank's, the other one the rank's own."""
    want = torch.stack([values_of(rank) for rank in range(world_size)]).amax(0)

    def on_rank(group):
        bias, out = torch.full((3,), group.rank, dtype=torch.int32), torch.empty(2, 3).int()
        group.prepare(PLUGIN, rows=2)
        allocated = group.run(PLUGIN, values_of(group.rank), bias)
        given = group.run(PLUGIN, values_of(group.rank), bias, out=out)
        assert given is out
        lane = group.channel("mine").run(PLUGIN, values_of(group.rank), bias)
        for result in (allocated, out, lane):
            assert torch.equal(result, want + group.rank)
        with pytest.raises(InvalidArgumentError, match="no int32 rows"):
            group.run(PLUGIN, values_of(group.rank).float(), bias)

    with local_world(world_size, "cpu", config=small(protocol=protocol)) as world:
        world.run(on_rank)


def test_a_plugin_and_a_built_in_operation_do_not_match():
    groups = build_each([{}] * 2)
    bias = torch.zeros(3, dtype=torch.int32)
    errors = on_each(
        groups,
        lambda g: g.run(PLUGIN, values_of(0), bias) if g.rank else g.all_gather_pair(*pair_of(1.0)),
    )
    assert [type(error) for error in errors] == [MismatchError] * 2
    close_each(groups)


# --- plugins that lie ----------------------------------------------------------------------------


def lying(name: str = "liar", **changes):
    """Return a plugin whose plan differs from what is right."""

    class Liar(LargestOfRanks):
        def plan(self, info, *tensors):
            plan = super().plan(info, *tensors)
            return dataclasses.replace(plan, op=self.name, **changes)

    Liar.name = name
    return Liar()


def answering(**methods):
    """Return a plugin with other methods or attributes."""
    return type("Liar", (LargestOfRanks,), {"name": "liar", **methods})()


def failing(self, *_):
    raise ZeroDivisionError("1/0")


IN_PLAN = {
    "grid above the resident": lying(grid=65),
    "grid of nothing": lying(grid=0),
    "grid below nothing": lying(grid=-1),
    "blocks below the ranks": answering(block=16),
    "blocks above the device": answering(block=2048),
    "more staged than a segment": lying(staged_nbytes=1 << 30),
    "less than nothing staged": lying(staged_nbytes=-1),
    "an input that is not there": lying(exchanged=(2,)),
    "an input from behind": lying(exchanged=(-1,)),
    "a dtype that is none": lying(outputs=(OutputSpec((2, 3), "float7"),)),
    "a shape that is none": lying(outputs=(OutputSpec((-2, 3), "int32"),)),
    "one output too many": lying(outputs=(OutputSpec((2, 3), "int32"),) * 2),
    "no output": lying(outputs=()),
    "an error of its own": answering(plan=failing),
    "no plan": answering(plan=lambda self, info, *tensors: None),
    "a plan of text": answering(plan=lambda self, info, *tensors: "grid=1"),
}


@pytest.mark.parametrize("plugin", IN_PLAN.values(), ids=IN_PLAN)
@pytest.mark.parametrize("given", [False, True])
def test_a_plan_that_lies_is_found_out_before_anything_happens(plugin, given):
    bias = torch.zeros(3, dtype=torch.int32)
    with local_world(2, "cpu", config=small()) as world:
        for group in world.groups:
            out = torch.full((2, 3), 7, dtype=torch.int32) if given else None
            with pytest.raises((UnsupportedError, InvalidArgumentError), match="liar") as caught:
                group.run(plugin, values_of(0), bias, out=out)
            assert caught.value.op == "liar"
            assert out is None or bool((out == 7).all())
            assert engine_of(group).epoch == 0
        assert_works(world)


def assert_works(world) -> None:
    for first, _ in world.run(lambda g: g.all_gather_pair(*pair_of(float(g.rank)))):
        assert first[0, ::4].tolist() == [0.0, 1.0]


IN_REFERENCE = {
    "shape": (lambda self, shards: (shards[0][0][:1],), "returned=[((1, 3),"),
    "dtype": (lambda self, shards: (shards[0][0].float(),), "torch.float32)]"),
    "number": (lambda self, shards: (shards[0][0],) * 2, "other results than it planned"),
}


@pytest.mark.parametrize(("reference", "text"), IN_REFERENCE.values(), ids=IN_REFERENCE)
def test_a_reference_that_lies_is_found_out(reference, text):
    """A result of one row would otherwise be spread over all rows of the output."""
    plugin, bias = answering(reference=reference), torch.zeros(3, dtype=torch.int32)
    out = [torch.full((2, 3), 7, dtype=torch.int32) for _ in range(2)]
    groups = build_each([{}] * 2)
    for error in on_each(groups, lambda g: g.run(plugin, values_of(0), bias, out=out[g.rank])):
        assert isinstance(error, UnsupportedError)
        assert text in str(error)
        assert "'liar'" in str(error)
    assert all(bool((output == 7).all()) for output in out)
    assert all(not engine_of(group).failed() for group in groups)
    on_each(groups, lambda g: g.run(PLUGIN, values_of(0), bias, out=out[g.rank]))
    assert torch.equal(out[1], values_of(0))
    close_each(groups)


def test_a_reference_that_raises_breaks_nothing():
    """The exchange is over by then: every rank has copies of its own."""
    plugin, bias = answering(reference=failing), torch.zeros(3, dtype=torch.int32)
    groups = build_each([{}] * 2)
    errors = on_each(groups, lambda g: g.run(plugin, values_of(0), bias))
    assert [type(error) for error in errors] == [UnsupportedError] * 2
    assert all(isinstance(error.__cause__, ZeroDivisionError) for error in errors)
    results = on_each(groups, lambda g: g.run(PLUGIN, values_of(0), bias))
    assert all(torch.equal(result, values_of(0)) for result in results)
    close_each(groups)


def test_plugins_are_told_apart_by_object_not_by_name():
    """Two plugins of one name on one channel: each plans its own calls."""
    other = answering(name=PLUGIN.name, reference=lambda self, shards: (shards[-1][0] * 2,))
    bias = torch.zeros(3, dtype=torch.int32)
    barrier = threading.Barrier(2)

    def on_rank(group):
        barrier.wait(10)
        first, second = (group.run(p, values_of(group.rank), bias) for p in (PLUGIN, other))
        assert torch.equal(first, values_of(1))
        assert torch.equal(second, 2 * values_of(1))

    with local_world(2, "cpu", config=small()) as world:
        world.run(on_rank)

"""The suite for plugins: ours pass it, and what it checks for it finds where that is broken."""

from __future__ import annotations

import dataclasses
import unittest

import pytest
import torch
from example_plugin import load_example

from pcie_comm import InvalidArgumentError, Plan, UnsupportedError
from pcie_comm.kernels.plan_checks import variants_of
from pcie_comm.kernels.registry import collectives
from pcie_comm.layout import SlabLayout
from pcie_comm.testing import CHECKS, ConformanceError, Subject, check_all, guard, on_cpu, plans

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

EXAMPLE = type(load_example())
BY_NAME = {check.__name__: check for check in CHECKS}
ELSEWHERE = {"kernels_compile_and_signal", "runs_on_a_device", "stages_what_it_declares"}
"""For our own: tests/kernels, tests/test_build.py and tests/gpu do it."""


# --- our own -------------------------------------------------------------------------------------


def pairs(world_size: int, rows: int, seed: int):
    random = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, 6, generator=random).half(), torch.randn(rows, 3, generator=random))
        for _ in range(world_size)
    ]


def heads(world_size: int, rows: int, seed: int):
    return [(first.view(rows, 2, 3),) for first, _ in pairs(world_size, rows, seed)]


def kimi(world_size: int, rows: int, seed: int):
    random = torch.Generator().manual_seed(seed)
    bias = torch.randn(896, generator=random)
    widths = 3584 // world_size, 896 // world_size
    down, logits = (torch.randn(world_size, rows, width, generator=random) for width in widths)
    return [(down[r].bfloat16(), logits[r], bias) for r in range(world_size)]


def router(world_size: int, rows: int, seed: int):
    return [kimi(1, rows, seed)[0][1:]] * world_size


MADE = {
    "all_gather_pair": pairs,
    "all_gather_heads": heads,
    "all_gather_pair_kimi_topk": kimi,
    "kimi_topk16": router,
}
"""Inputs of those that give none themselves."""

SKIPPED = {
    "barrier": {"tells_calls_apart"},  # all its calls are alike
    "kimi_topk16": {"tells_calls_apart", "waits_are_bounded"},  # it talks to nobody
}

OWN = {
    name: one for name, one in collectives().items() if type(one).__module__.startswith("pcie_comm")
}


@pytest.mark.parametrize("name", OWN)
def test_our_own_collectives_pass(name):
    subject = Subject(OWN[name], MADE.get(name), world_sizes=(1, 2), rows=(1, 3))
    skipped = set()
    for check in CHECKS:
        if check.__name__ not in ELSEWHERE:
            try:
                check(subject)
            except unittest.SkipTest:
                skipped.add(check.__name__)
    assert skipped == SKIPPED.get(name, set())


def test_all_checks_in_a_row():
    """What cannot run here is said; an error of one ends it."""
    subject = Subject(load_example(), world_sizes=(2,), device="cuda:99")
    outcomes = check_all(subject)
    assert list(outcomes) == list(BY_NAME)
    assert outcomes["runs_on_a_device"] == "skipped: there is no cuda:99"
    assert outcomes["is_a_torch_operator"] == "skipped: one rank is no world for it"
    assert outcomes["runs_on_cpu_ranks"] == "passed"
    with pytest.raises(ConformanceError, match="Changed"):
        check_all(Subject(changed(exchanged=())))


# --- broken ones ---------------------------------------------------------------------------------


def changed(**fields: object):
    """Return the example with other fields in its plans."""

    class Changed(EXAMPLE):
        def plan(self, info, *tensors) -> Plan:
            return dataclasses.replace(super().plan(info, *tensors), **fields)

    return Changed()


def other(**methods: object):
    return type("Changed", (EXAMPLE,), methods)()


def by_rank(self, info, *tensors):
    plan = EXAMPLE.plan(self, info, *tensors)
    return dataclasses.replace(plan, staged_nbytes=plan.staged_nbytes + info.rank)


class Forgetful(EXAMPLE):
    calls = 0

    def plan(self, info, *tensors):
        type(self).calls += 1
        return dataclasses.replace(super().plan(info, *tensors), scalars=(self.calls, 1))


def careless(self, info, *tensors):
    plan = EXAMPLE.plan(self, info, *[dataclasses.replace(t, dtype="float32") for t in tensors])
    return dataclasses.replace(plan, outputs=(dataclasses.replace(plan.outputs[0]),))


def unchecked(self, info, *tensors):
    rows, width = tensors[0].shape
    return EXAMPLE.plan(self, info, dataclasses.replace(tensors[0], shape=(rows, width)))


def in_place(self, shards):
    shards[0][0].zero_()
    return EXAMPLE.reference(self, [shard[1:] for shard in shards])


def shared_input(self, world_size, rows, seed):
    return [(torch.ones(rows, 4),)] * (world_size + 1)


BROKEN = {
    "plans by rank": ("plans_are_pure_and_alike", other(plan=by_rank), "plans of rank 0 and 1"),
    "plans by count": ("plans_are_pure_and_alike", Forgetful(), "plan() is not pure"),
    "facts of objects": (
        "plans_are_pure_and_alike",
        changed(facts=({"rows", "width"},)),
        "tuples of strings and numbers alone",
    ),
    "a kernel that is not listed": (
        "variants_cover_every_plan",
        other(variants=lambda self: EXAMPLE.variants(self)[:1]),
        "all_reduce_max-pull",
    ),
    "other results": (
        "outputs_are_those_of_the_reference",
        other(reference=lambda self, shards: (shards[0][0][:1],)),
        "returned=[((1, 7), torch.float32)]",
    ),
    "nothing is exchanged": ("runs_on_cpu_ranks", changed(exchanged=()), "a result is wrong"),
    "any dtype": ("refuses_wrong_arguments", other(plan=careless), "is complex: it is not checked"),
    "any shape": ("refuses_wrong_arguments", other(plan=unchecked), "it is not checked, it fails"),
    "no facts": ("tells_calls_apart", changed(facts=(), staged_nbytes=64), "put shapes and dtypes"),
    "too many inputs": (
        "runs_on_cpu_ranks",
        other(example_inputs=shared_input),
        "have [1, 1] tensors",
    ),
}


WORLDS = {"refuses_wrong_arguments": (1,)}  # nobody whom a call that is let pass would wait for


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found_and_named(name):
    check, plugin, text = BROKEN[name]
    with pytest.raises(ConformanceError) as caught:
        BY_NAME[check](Subject(plugin, world_sizes=WORLDS.get(check, (1, 2))))
    assert text in str(caught.value)
    assert f"({type(plugin).__module__}." in str(caught.value)


def test_inputs_that_a_reference_writes_to_are_found():
    plugin = other(reference=in_place, num_inputs=2, plan=_with_bias)
    subject = Subject(plugin, lambda world, rows, seed: [(torch.ones(rows, 4),) * 2] * world)
    with pytest.raises(ConformanceError, match="was written to"):
        on_cpu.runs_on_cpu_ranks(subject)


def _with_bias(self, info, *tensors):
    return dataclasses.replace(EXAMPLE.plan(self, info, tensors[0]), exchanged=(1,))


def test_plans_that_raise_are_typed():
    """In the suite as in a call."""
    with pytest.raises(UnsupportedError, match="ZeroDivisionError"):
        plans.plans_are_pure_and_alike(Subject(other(plan=lambda self, info, *t: 1 / 0)))
    with pytest.raises(InvalidArgumentError, match="capacity"):
        plans.plans_are_pure_and_alike(Subject(changed(staged_nbytes=1 << 40)))
    with pytest.raises(UnsupportedError, match="has no example inputs"):
        plans.plans_are_pure_and_alike(Subject(OWN["all_gather_pair"]))


@pytest.mark.parametrize(
    "keys",
    [
        lambda self: ["push"],
        lambda self: EXAMPLE.variants(self) * 2,
        lambda self: OWN["all_gather"].variants(),
        lambda self: 1 / 0,
    ],
)
def test_kernels_that_are_none_are_refused(keys):
    with pytest.raises(UnsupportedError, match=r"plugin 'all_reduce_max' \(\S*Changed\)") as caught:
        variants_of(other(variants=keys), rank=3)
    assert (caught.value.rank, caught.value.op) == (3, "all_reduce_max")


def test_guard_bytes():
    """Every segment of both kinds of slots may be written up to what is declared, no further."""
    layout = SlabLayout(4096, 2)
    slab = bytearray(layout.nbytes)
    guard.paint(slab, layout)
    assert set(slab[: layout.SLOTS_OFFSET]) == {0}
    for slot in range(2):
        for writer in range(2):
            for offset in (layout.segment_offset, layout.tagged_offset):
                begin = offset(slot, writer)
                slab[begin : begin + 100] = bytes(100)
    assert guard.trespasses(slab, layout, 100) == []
    assert guard.trespasses(slab, layout, 99)[0] == "byte 99 of a segment, staged_nbytes=99"
    assert len(guard.trespasses(slab, layout, 99)) == 8

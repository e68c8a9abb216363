"""Checks with ranks that are threads, on the CPU."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from typing import Any

import torch

from ..config import Config
from ..errors import (
    BrokenError,
    InvalidArgumentError,
    MismatchError,
    PeerTimeoutError,
    UnsupportedError,
)
from ..group import PcieDcpGroup
from ..local import LocalWorld, local_world
from .subject import Subject, Tensors, as_tuple, empty_like, same

SHORT_S = 0.2
"""Timeout of a rank whose peers do not come."""

PATIENT_S = 3.0
"""Timeout of a rank that should not wait at all, and then makes a call with its peers."""


def call_all(subject: Subject, world: LocalWorld, inputs: list[Tensors], how: str) -> None:
    """Call on every rank, with outputs allocated and given, and compare.

    Raises:
        ConformanceError: A result is wrong, or an input was written to.
    """
    plugin, before = subject.plugin, [[one.clone() for one in tensors] for tensors in inputs]
    wanted = [subject.wanted(inputs, rank) for rank in range(len(inputs))]
    given = [empty_like(outputs) for outputs in wanted]

    def on_rank(group: PcieDcpGroup) -> Tensors:
        allocated = as_tuple(group.run(plugin, *inputs[group.rank]))
        group.run(plugin, *inputs[group.rank], out=given[group.rank])
        return allocated

    for rank, allocated in enumerate(world.run(on_rank)):
        for got in (allocated, given[rank]):
            for index, (one, want) in enumerate(zip(got, wanted[rank], strict=True)):
                if not same(one, want):
                    where = f"output {index} of rank {rank}, {how}"
                    subject.fail(f"a result is wrong: {where}: {one}, not {want}")
        for index, (one, was) in enumerate(zip(inputs[rank], before[rank], strict=True)):
            if not same(one, was):
                subject.fail(f"input {index} of rank {rank} was written to, {how}")


def runs_on_cpu_ranks(subject: Subject) -> None:
    """Every rank gets the reference's result, by push and by pull; inputs stay as they were."""
    for world_size in subject.served():
        for protocol in ("push", "pull"):
            with local_world(world_size, "cpu", config=Config(protocol=protocol)) as world:
                for seed, rows in enumerate(subject.rows):
                    how = f"world_size={world_size}, protocol={protocol}, rows={rows}"
                    call_all(subject, world, subject.make(world_size, rows, seed), how)


def wrong_calls(inputs: Tensors, outputs: Tensors) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yield what is wrong, the inputs and `out` of calls that must be refused."""
    yield "one input too many", (*inputs, inputs[0]), None
    yield "one input too few", inputs[:-1], None
    for index, one in enumerate(inputs):
        changed: dict[str, Any] = {
            "is None": None,
            "has no dimension": one.new_zeros(()),
            "is complex": torch.zeros(one.shape, dtype=torch.complex64),
        }
        for what, other in changed.items():
            yield f"input {index} {what}", (*inputs[:index], other, *inputs[index + 1 :]), None
    for index, one in enumerate(outputs):
        changed = {
            "is None": None,
            "has a dimension more": one.new_zeros((*one.shape, 2)),
            "is complex": torch.zeros(one.shape, dtype=torch.complex64),
        }
        for what, other in changed.items():
            yield f"out[{index}] {what}", inputs, (*outputs[:index], other, *outputs[index + 1 :])
    yield "out= has one too many", inputs, (*outputs, torch.zeros(1))


def refuses_wrong_arguments(subject: Subject) -> None:
    """Wrong arguments raise InvalidArgumentError or UnsupportedError, and the group works on.

    By checks of the plugin: that its `plan` stumbles over them does not count.
    """
    world_size = subject.served()[-1]
    inputs = subject.make(world_size, max(subject.rows))
    outputs = empty_like(subject.wanted(inputs, 0))
    with local_world(world_size, "cpu", config=Config(timeout_s=PATIENT_S)) as world:
        for what, tensors, out in wrong_calls(inputs[0], outputs):
            try:
                world.groups[0].run(subject.plugin, *tensors, out=out)
            except (InvalidArgumentError, UnsupportedError) as error:
                if getattr(error, "reason", "") == f"plugin {subject.plugin.name} failed":
                    subject.fail(f"{what}: it is not checked, it fails: {error}")
            except PeerTimeoutError:
                subject.fail(f"{what}: it is not refused")
            else:
                subject.fail(f"{what}: it is not refused")
        call_all(subject, world, inputs, "after wrong arguments")


def tells_calls_apart(subject: Subject) -> None:
    """Ranks that call with different numbers of rows get MismatchError and no other's bytes."""
    world_size, inputs = subject.communicating()
    other = subject.make(world_size, min(set(subject.rows) - {0}, default=1))
    if [one.shape for one in inputs[0]] == [one.shape for one in other[0]]:
        raise unittest.SkipTest("two numbers of rows are needed, and inputs whose shapes follow")

    def on_rank(group: PcieDcpGroup) -> None:
        group.run(subject.plugin, *(other if group.rank else inputs)[group.rank])

    with local_world(world_size, "cpu") as world:
        try:
            world.run(on_rank)
        except MismatchError:
            return
    subject.fail("ranks with different rows are not told apart; put shapes and dtypes into facts")


def waits_are_bounded(subject: Subject) -> None:
    """A rank whose peers do not come gets PeerTimeoutError with their rank; a new group works."""
    world_size, inputs = subject.communicating()
    name = subject.plugin.name
    with local_world(world_size, "cpu", config=Config(timeout_s=SHORT_S)) as world:
        lonely = world.groups[0]
        try:
            lonely.run(subject.plugin, *inputs[0])
            subject.fail("a rank whose peers did not come got a result")
        except PeerTimeoutError as error:
            if error.op != name or error.peer not in range(1, world_size):
                subject.fail(f"the timeout names op={error.op}, peer={error.peer}")
        try:
            lonely.run(subject.plugin, *inputs[0])
            subject.fail("a channel that failed goes on")
        except BrokenError:
            pass
    with local_world(world_size, "cpu") as world:
        call_all(subject, world, inputs, "in the group after a failed one")

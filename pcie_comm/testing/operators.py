"""Checks of the torch operator that a registered plugin has."""

from __future__ import annotations

import unittest

import torch

from ..local import local_world
from ..torch_ops import ALONE
from .subject import Subject, as_tuple, same


def is_a_torch_operator(subject: Subject) -> None:
    """Its torch operator keeps its schema, and its shapes are right where nothing runs.

    That is torch.ops.pcie_comm.NAME of a registered plugin, and `run` of any other.
    """
    plugin = subject.plugin
    if 1 not in subject.served():
        raise unittest.SkipTest("one rank is no world for it")
    named = plugin.registered and plugin.name.isidentifier()
    operator = getattr(torch.ops.pcie_comm, plugin.name if named else "run")
    inputs = subject.make(1, max(subject.rows))
    with local_world(1, "cpu") as world:
        group = () if named and plugin.name == ALONE else (world.groups[0].handle,)
        given = tuple(inputs[0]) if named else (plugin.handle, list(inputs[0]))
        arguments = (*group, *given)
        for test in ("test_schema", "test_faketensor"):
            outcome = torch.library.opcheck(
                operator.default, arguments, test_utils=test, raise_exception=False
            )
            if outcome != {test: "SUCCESS"}:
                subject.fail(f"opcheck: {outcome}")
        results = as_tuple(operator(*arguments))
    for index, (got, want) in enumerate(zip(results, subject.wanted(inputs, 0), strict=True)):
        if not same(got, want):
            subject.fail(f"output {index} of its torch operator is wrong")

"""Tests of the package, where it is installed."""

import pytest
import torch
from all_reduce_max import AllReduceMax

from pcie_comm import local_world, register
from pcie_comm.testing import CHECKS, Subject

PLUGIN = register(AllReduceMax())  # as the entry point does


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check):
    """Everything that any collective must do."""
    check(Subject(PLUGIN, rows=(0, 1, 5)))


def test_a_nan_of_any_rank_wins():
    """Whatever the ranks behind it hold."""
    shards = [torch.tensor([[1.0, -2.0, float("nan")]]), torch.tensor([[0.5, 3.0, 1.0]])]
    with local_world(2, device="cpu") as world:
        for largest in world.run(lambda group: group.run("all_reduce_max", shards[group.rank])):
            assert largest[0, :2].tolist() == [1.0, 3.0]
            assert largest[0, 2].isnan()


def test_torch_compiles_a_call():
    """Without a break in the graph."""
    with local_world(1, device="cpu") as world:
        layer = lambda x: world.groups[0].run(PLUGIN, x * 2) + 1  # noqa: E731
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(torch.ones(3, 4)), torch.full((3, 4), 3.0))

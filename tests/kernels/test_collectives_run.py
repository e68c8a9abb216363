"""The standalone collectives' kernels run as PTX on the CPU, every protocol, in several orders."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

import torch
from collective_cases import CASES, wrong
from ptx_world import World

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("protocol", ["push", "pull", "tagged"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_kernels_do_what_the_case_says(case, protocol):
    generator = torch.Generator().manual_seed(7)
    for world_size, rows, order in ((3, 5, None), (2, 1, 1), (1, 2, 2), (3, 0, None)):
        world = World(world_size, protocol, blocks=3, order=order, hosted=order == 1)
        for _ in range(2):
            inputs = case.make(world_size, rows, generator)
            got = world.call(case.plugin, inputs)
            if rows or case.name == "barrier":
                assert wrong(case, inputs, got) == []


def test_strides_of_rows_are_honoured():
    generator = torch.Generator().manual_seed(8)
    for case in CASES[5:]:
        inputs = case.make(2, 4, generator)
        apart = [[_apart(tensor) for tensor in tensors] for tensors in inputs]
        assert wrong(case, inputs, World(2, "push").call(case.plugin, apart)) == []


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same rows, further apart."""
    if tensor.ndim == 1:
        return tensor
    flat = tensor.flatten(1)
    wide = torch.full((len(flat), flat.shape[1] + 8), torch.nan).to(tensor.dtype)
    wide[:, : flat.shape[1]] = flat
    row = torch.empty(tensor.shape[1:]).stride()
    return wide.as_strided(tensor.shape, (wide.stride(0), *row))

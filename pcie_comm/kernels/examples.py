"""Inputs of the collectives that come along, for Collective.example_inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def draw(
    world_size: int, rows: int, seed: int, *kinds: tuple[tuple[int, ...], str]
) -> list[list[torch.Tensor]]:
    """Return normal numbers for every rank: a tensor [rows, *shape] for each shape and dtype.

    Args:
        world_size: Number of ranks.
        rows: Of each tensor.
        seed: The same numbers for the same seed.
        kinds: Shape of a row, and dtype.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)

    def one(shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.randn((rows, *shape), generator=generator).to(getattr(torch, dtype))

    return [[one(*kind) for kind in kinds] for _ in range(world_size)]

"""A small mixture-of-experts decoder whose router and down projection are sharded over ranks.

Weights are random, made from a seed, the same on every rank. A layer is attention over one head,
then the mixture: each rank multiplies with its columns of the router and of the down projection,
one collective gathers both and selects 16 of 896 experts, and the chosen experts scale the result.

So that token streams can be compared bit by bit, matrices are cut into PARTS column blocks whatever
the number of ranks is, and each product is of one block: its shape, and with it the order of its
additions, does not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

HIDDEN, EXPERTS, TOP_K, HEAD, PARTS = 3584, 896, 16, 64, 8

Gather = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""(local down [rows, 3584/W] bf16, local logits [rows, 896/W] fp32, bias [896] fp32) ->
(down [rows, 3584], weights [rows, 16] fp32, ids [rows, 16] int32)."""


@dataclass(frozen=True)
class Shape:
    """How large a model is.

    Attributes:
        layers: Of the decoder.
        vocab: Number of tokens.
        length: Most positions of a sequence.
        sequences: Most sequences at a time.
    """

    layers: int = 2
    vocab: int = 512
    length: int = 640
    sequences: int = 4


@dataclass
class Layer:
    """The weights of one layer that a rank holds."""

    attention: torch.Tensor
    attention_out: torch.Tensor
    router: list[torch.Tensor]
    down: list[torch.Tensor]
    bias: torch.Tensor
    experts: torch.Tensor


class Decoder:
    """The part of the model that one rank computes, with the caches of all sequences.

    Args:
        shape: Of the model.
        rank, world_size: Which part; the world size divides PARTS.
        device: Of weights and caches.
        seed: Of the weights.
        layers: How many layers to keep, for a draft that shares the first ones with its target.
    """

    def __init__(
        self,
        shape: Shape,
        rank: int,
        world_size: int,
        device: torch.device,
        seed: int = 0,
        layers: int | None = None,
    ) -> None:
        self.shape, self.device = shape, device
        dice = torch.Generator().manual_seed(seed)

        def draw(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=dice) / rows**0.5).to(device)

        self.embedding = draw(shape.vocab, HIDDEN) * shape.vocab**0.5
        self.unembedding = draw(HIDDEN, shape.vocab)
        own = range(rank * PARTS // world_size, (rank + 1) * PARTS // world_size)
        made = [self._layer(draw, own) for _ in range(shape.layers)]
        self.layers = made[:layers]
        room = (len(self.layers), shape.sequences, shape.length, HEAD)
        self.keys, self.values = torch.zeros(room, device=device), torch.zeros(room, device=device)
        self._places = torch.arange(shape.length, device=device)

    @staticmethod
    def _layer(draw: Callable[[int, int], torch.Tensor], own: range) -> Layer:
        def blocks(columns: int) -> list[torch.Tensor]:
            return [draw(HIDDEN, columns // PARTS) for _ in range(PARTS)]

        router, down = blocks(EXPERTS), blocks(HIDDEN)
        return Layer(
            attention=draw(HIDDEN, 3 * HEAD),
            attention_out=draw(HEAD, HIDDEN),
            router=[router[part] for part in own],
            down=[down[part] for part in own],
            bias=draw(1, EXPERTS)[0] * 0.01,
            experts=draw(EXPERTS, HIDDEN) * EXPERTS**0.5,
        )

    def step(
        self, tokens: torch.Tensor, sequences: torch.Tensor, positions: torch.Tensor, gather: Gather
    ) -> torch.Tensor:
        """Take one token per row to its place, and return the most likely next ones.

        Rows may be of one sequence or of many; each sees its sequence up to its own position.

        Args:
            tokens: [rows] int64.
            sequences: [rows] int64, which cache.
            positions: [rows] int64, which place in it.
            gather: The collective.

        Returns:
            [rows] int64; equal logits go to the lower token.
        """
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            x = x + self._attend(number, layer, x, sequences, positions)
            x = x + self._mix(layer, x, gather)
        return torch.argmax(_normalised(x) @ self.unembedding, dim=1)

    def _attend(
        self,
        number: int,
        layer: Layer,
        x: torch.Tensor,
        sequences: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        query, key, value = (_normalised(x) @ layer.attention).split(HEAD, dim=1)
        self.keys[number].index_put_((sequences, positions), key)
        self.values[number].index_put_((sequences, positions), value)
        keys, values = self.keys[number][sequences], self.values[number][sequences]
        scores = (keys * query[:, None]).sum(2) / HEAD**0.5
        later = self._places[None] > positions[:, None]
        chances = torch.softmax(scores.masked_fill(later, float("-inf")), dim=1)
        return (chances[:, :, None] * values).sum(1) @ layer.attention_out

    @staticmethod
    def _mix(layer: Layer, x: torch.Tensor, gather: Gather) -> torch.Tensor:
        inner = _normalised(x)
        logits = torch.cat([inner @ block for block in layer.router], dim=1)
        local = torch.cat([inner @ block for block in layer.down], dim=1)
        down, weights, ids = gather(local.bfloat16(), logits, layer.bias)
        scales = (layer.experts[ids.long()] * weights[:, :, None]).sum(1)
        return down.float() * scales


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)

"""Random bytes that every rank knows: inputs of a step, and what must come out of it."""

from __future__ import annotations

import random
from typing import Any

import torch

from pcie_comm import kimi_topk16

from .script import Step

NBYTES = 1 << 21
ROUTER_ROWS = 64
HIDDEN, EXPERTS, TOP_K = 3584, 896, 16
POISON = 0xA5
KIMI = "all_gather_pair_kimi_topk"
KIMI_WORLDS = (1, 2, 4, 7, 8, 14, 16)
PAIR = (torch.float32, torch.bfloat16)
HEADS = torch.float8_e4m3fn


def ops_for(world_size: int) -> tuple[str, ...]:
    """Return the operations that serve a world size, the slow one less often."""
    ops = ("all_gather_pair", "all_gather_heads")
    return (*ops, *ops, KIMI) if world_size in KIMI_WORLDS else ops


class Pool:
    """Bytes of every pattern, and router rows with their right answers.

    Every shard of every step lies somewhere else in the pool, so bytes of another call, of another
    rank or of a part of the right call differ from the right ones.

    Args:
        seed: The same seed gives the same pool.
        world_size: Number of ranks.
    """

    def __init__(self, seed: int, world_size: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.world_size = world_size
        self._bytes = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=draw)
        self._logits = torch.randn(ROUTER_ROWS, EXPERTS, generator=draw).mul(4).round().div(4)
        self._logits.view(-1)[::97] = float("nan")
        self._logits.view(-1)[5::89] = float("-inf")
        self.bias = torch.randn(EXPERTS, generator=draw).mul(0.1)
        self._weights, self._ids = kimi_topk16(self._logits, self.bias)

    def _shard(
        self, step: Step, rank: int, which: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        key = random.Random(step.place + (rank * 2 + which << 32)).randrange((NBYTES - nbytes) // 4)
        return self._bytes[4 * key : 4 * key + nbytes].view(dtype).view(shape)

    def _shards(self, step: Step, which: int) -> list[torch.Tensor]:
        """Return every rank's input number `which`."""
        if step.op == "all_gather_pair":
            width = step.width if which == 0 else step.width // 2 + 1
            shape: tuple[int, ...] = (step.rows, width)
            dtype = PAIR[which]
        elif step.op == "all_gather_heads":
            shape, dtype = (step.rows, 2, step.width), HEADS
        else:
            shape, dtype = (step.rows, HIDDEN // self.world_size), torch.bfloat16
        return [self._shard(step, rank, which, shape, dtype) for rank in range(self.world_size)]

    def call(self, lane: Any, rank: int, step: Step) -> bool:
        """Make a call of a rank; return whether every byte of what comes out is right."""
        first = self._shards(step, 0)
        if step.op == "all_gather_heads":
            wanted: tuple[torch.Tensor, ...] = (torch.cat([raw(one) for one in first], 1),)
            found: Any = (lane.all_gather_heads(first[rank], out=self._out(step, HEADS, first[0])),)
        elif step.op == "all_gather_pair":
            second = self._shards(step, 1)
            wanted = tuple(torch.cat([raw(one) for one in part], 1) for part in (first, second))
            out = None
            if step.given:
                out = tuple(
                    self._out(step, dtype, part[0])
                    for dtype, part in zip(PAIR, (first, second), strict=True)
                )
            found = lane.all_gather_pair(first[rank], second[rank], out=out)
        else:
            begin, end = self._router_rows(step)
            columns = slice(rank * EXPERTS // self.world_size, None)
            router = self._logits[begin:end, columns][:, : EXPERTS // self.world_size]
            found = lane.all_gather_pair_kimi_topk(first[rank], router, self.bias)
            down = torch.cat([raw(one) for one in first], 1)
            wanted = (down, raw(self._weights[begin:end]), raw(self._ids[begin:end]))
        return all(torch.equal(raw(a), b) for a, b in zip(found, wanted, strict=True))

    def _router_rows(self, step: Step) -> tuple[int, int]:
        begin = step.place % (ROUTER_ROWS - step.rows)
        return begin, begin + step.rows

    def _out(self, step: Step, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor | None:
        """Return a poisoned output, for steps that give one."""
        if not step.given:
            return None
        shape = (like.shape[0], like.shape[1] * self.world_size, *like.shape[2:])
        count = dtype.itemsize
        for size in shape:
            count *= size
        return torch.full((count,), POISON, dtype=torch.uint8).view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, row by row."""
    rows = tensor.shape[0]
    if tensor.numel() == 0:
        return torch.empty((rows, 0), dtype=torch.uint8)
    return tensor.contiguous().view(torch.uint8).view(rows, -1)

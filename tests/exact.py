"""Calls of every kind on one group, with random bytes; every output is compared bit for bit.

Each rank makes the inputs of all ranks from one seed, so it knows what must come out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from worlds import bytes_of

from pcie_comm import KIMI_K3, RouterSpec, kimi_topk16

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
PAIRS = (*zip(DTYPES, (*DTYPES[2:], *DTYPES[:2]), strict=True), (torch.float32, torch.float32))
FORMS = ("dense", "strided", "misaligned")
ROWS = (0, 1, 3, 64)
KIMI_WORLDS = (1, 2, 4, 7, 8, 14, 16)
POISON = 0xA5
VLLM = RouterSpec(896, 16, numerics="vllm")


class Maker:
    """Random tensors: the same on every rank that starts from the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)

    def raw(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` elements of every bit pattern, NaNs of all payloads included."""
        nbytes = count * dtype.itemsize
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=self._random).view(
            dtype
        )

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, form: str) -> torch.Tensor:
        """Return random bytes: dense, as rows of a wider array, or from an odd element on."""
        rows, inner = shape[0], math.prod(shape[1:])
        if form == "strided":
            wide = self.raw(rows * (inner + 5), dtype).view(rows, inner + 5)
            return wide[:, :inner].unflatten(1, shape[1:])
        if form == "misaligned":
            return self.raw(rows * inner + 1, dtype)[1:].view(shape)
        return self.raw(rows * inner, dtype).view(shape)

    def logits(self, rows: int, form: str) -> torch.Tensor:
        """Return router logits with ties, infinities and NaNs."""
        values = torch.randn(rows, 901, generator=self._random).mul(4).round().div(4)
        values.view(-1)[::97] = float("nan")
        values.view(-1)[5::89] = float("-inf")
        return values[:, :896] if form == "strided" else values[:, :896].contiguous()

    def bias(self) -> torch.Tensor:
        return torch.randn(896, generator=self._random).mul(0.1)


def poisoned(shape: Sequence[int], dtype: torch.dtype, form: str) -> torch.Tensor:
    """Return an output to write to, from an odd element on where `form` says so."""
    skipped = 1 if form == "misaligned" else 0
    nbytes = (math.prod(shape) + skipped) * dtype.itemsize
    return torch.full((nbytes,), POISON, dtype=torch.uint8).view(dtype)[skipped:].view(shape)


def check_columns(output: torch.Tensor, shards: Sequence[torch.Tensor], what: str) -> None:
    """Compare a gathered tensor with the shards' rows, side by side."""
    want = np.concatenate([bytes_of(shard) for shard in shards], axis=1)
    assert output.dtype == shards[0].dtype, what
    assert output.is_contiguous(), what
    assert np.array_equal(bytes_of(output), want), what


def check_pairs(group: Any, make: Maker) -> Iterator[torch.Tensor]:
    world, turn = group.world_size, 0
    for rows in ROWS:
        for dtypes in PAIRS:
            form, given = FORMS[turn % 3], turn % 2
            turn += 1
            widths = (5 + turn % 8, 16)
            shards = [
                [
                    make.tensor((rows, width), dtype, form)
                    for width, dtype in zip(widths, dtypes, strict=True)
                ]
                for _ in range(world)
            ]
            out = None
            if given:
                out = tuple(
                    poisoned((rows, width * world), dtype, FORMS[turn % 3])
                    for width, dtype in zip(widths, dtypes, strict=True)
                )
            results = group.all_gather_pair(*shards[group.rank], out=out)
            assert out is None or results is out
            for index, output in enumerate(results):
                what = f"pair {rows=} {dtypes=} {form=} {given=} {index=}"
                assert output.shape == (rows, widths[index] * world)
                check_columns(output, [shard[index] for shard in shards], what)
                yield output


def check_heads(group: Any, make: Maker) -> Iterator[torch.Tensor]:
    world = group.world_size
    for turn, rows in enumerate(ROWS):
        for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
            shards = [make.tensor((rows, 2, 12), dtype, FORMS[turn % 3]) for _ in range(world)]
            out = poisoned((rows, 2 * world, 12), dtype, "dense") if rows % 2 else None
            output = group.all_gather_heads(shards[group.rank], out=out)
            assert output.shape == (rows, 2 * world, 12)
            check_columns(output, shards, f"heads {rows=} {dtype=}")
            yield output


def check_kimi(group: Any, make: Maker) -> Iterator[torch.Tensor]:
    """Ids and weights are those of kimi_topk16 on the whole row, whatever the world size."""
    world = group.world_size
    for turn, (rows, spec) in enumerate([(0, KIMI_K3), (1, VLLM), (5, KIMI_K3), (64, KIMI_K3)]):
        form = FORMS[(turn + 1) % 3]
        downs = [make.tensor((rows, 3584 // world), torch.bfloat16, form) for _ in range(world)]
        logits, bias = make.logits(rows, form), make.bias()
        router = logits[:, group.rank * 896 // world : (group.rank + 1) * 896 // world]
        out = None
        if turn % 2:
            shapes = (((rows, 3584), torch.bfloat16), ((rows, 16), torch.float32))
            out = tuple(poisoned(*shape, "dense") for shape in (*shapes, ((rows, 16), torch.int32)))
        results = group.all_gather_pair_kimi_topk(
            downs[group.rank], router, bias, out=out, spec=spec
        )
        check_columns(results[0], downs, f"down {rows=}")
        wanted = kimi_topk16(logits, bias, spec=spec)
        for output, want, name in zip(results[1:], wanted, ("weights", "ids"), strict=True):
            assert (output.dtype, output.shape) == (want.dtype, want.shape), name
            assert np.array_equal(bytes_of(output), bytes_of(want)), f"{name} {rows=} {spec=}"
        yield from results


def run_all(group: Any, seed: int = 0) -> tuple[int, str]:
    """Make calls of every kind and check what they return.

    Collective. Returns how many outputs were checked, and a hash of all their bytes.
    """
    make, digest, count = Maker(seed), hashlib.sha256(), 0
    checks = [check_pairs, check_heads, *([check_kimi] if group.world_size in KIMI_WORLDS else [])]
    for check in checks:
        for output in check(group, make):
            digest.update(bytes_of(output).tobytes())
            count += 1
    return count, digest.hexdigest()

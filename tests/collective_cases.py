"""Calls of the standalone collectives, and what they must return, stated independently.

Shared by the CPU tests, by the kernels on the CPU, and by the GPU tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pcie_comm.kernels.collective import Collective
from pcie_comm.kernels.registry import find

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-23}
"""Half a unit in the last place, relative, but for fp32: what else happens to a sum of products."""

Inputs = list[list[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: For people.
        plugin: What is called.
        make: (world, rows, generator) -> inputs per rank.
        expected: inputs -> outputs per rank, in float64 or exact.
        close: (got, want) -> whether one output is right.
        worlds: Whether a world size is served.
    """

    name: str
    plugin: Collective
    make: Callable[[int, int, torch.Generator], Inputs]
    expected: Callable[[Inputs], Inputs]
    close: Callable[[torch.Tensor, torch.Tensor], bool]
    worlds: Callable[[int], bool] = lambda world: True


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bytes."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    return torch.equal(_bytes(got), _bytes(want))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def within(units: float, floor: float) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Within some roundings of a float64 result, of it and of `floor`."""

    def close(got: torch.Tensor, want: torch.Tensor) -> bool:
        bound = units * ROUNDING[got.dtype] * (want.abs() + floor) + units * 2**-23 * floor
        return got.shape == want.shape and bool(((got.double() - want).abs() <= bound).all())

    return close


def _random(shape, dtype, generator) -> torch.Tensor:
    device = generator.device
    if dtype.is_floating_point and dtype.itemsize > 1 and dtype != torch.float64:
        return torch.randn(shape, generator=generator, device=device).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, device=device).bool()
    wide = (*shape[:-1], shape[-1] * dtype.itemsize)
    raw = torch.randint(0, 256, wide, generator=generator, device=device, dtype=torch.uint8)
    return raw.view(dtype)


def _gathered(inputs: Inputs) -> Inputs:
    columns = [[shard[i] for shard in inputs] for i in range(len(inputs[0]))]
    raw = [
        torch.cat([t.contiguous().view(torch.uint8).flatten(1) for t in shards], 1)
        for shards in columns
    ]
    outputs = [
        one.view(shards[0].dtype).view(len(one), -1, *shards[0].shape[2:])
        for one, shards in zip(raw, columns, strict=True)
    ]
    return [outputs] * len(inputs)


GATHERED = (
    ((6,), torch.bfloat16),
    ((3,), torch.int64),
    ((5,), torch.uint8),
    ((2, 4), torch.float32),
    ((1,), torch.float64),
    ((7,), torch.bool),
    ((16,), torch.float8_e4m3fn),
    ((3,), torch.int16),
)


def gather(count: int) -> Case:
    def make(world, rows, generator):
        shapes = GATHERED[:count]
        return [
            [_random((rows, *shape), dtype, generator) for shape, dtype in shapes]
            for _ in range(world)
        ]

    plugin = find("all_gather").for_inputs(count)
    return Case(f"all_gather of {count}", plugin, make, _gathered, same)


def _words(world, rows, generator):
    words = torch.randint(-(2**31), 2**31, (world,), generator=generator, device=generator.device)
    return [[words[r].to(torch.int32).reshape(1, 1)] for r in range(world)]


def _one(shape: Callable[[int, int], tuple[int, ...]], dtype) -> Callable[..., Inputs]:
    def make(world, rows, generator):
        return [[_random(shape(world, rows), dtype, generator)] for _ in range(world)]

    return make


def exact_sum(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The stated order: fp32, rank 0 first, one rounding."""
    total = shards[0].float()
    for shard in shards[1:]:
        total = total + shard.float()
    return total.to(shards[0].dtype)


def _reduced(inputs: Inputs) -> Inputs:
    return [[exact_sum([shard[0] for shard in inputs])]] * len(inputs)


def _scattered(inputs: Inputs) -> Inputs:
    whole = exact_sum([shard[0] for shard in inputs])
    return [[part] for part in whole.chunk(len(inputs), 1)]


def reduce(op: str, dtype, width: int) -> Case:
    shape = {
        "all_reduce": lambda world, rows: (rows, width),
        "reduce_scatter": lambda world, rows: (rows, world * width, 2),
    }[op]
    expected = _reduced if op == "all_reduce" else _scattered
    name = f"{op} {dtype} {width}"
    return Case(name, find(op), _one(shape, dtype), expected, same)


def lse(dtype, dim: int) -> Case:
    def make(world, rows, generator):
        heads = 2 * world
        inputs = []
        for rank in range(world):
            partial = _random((rows, heads, dim), dtype, generator)
            sums = _random((rows, heads), torch.float32, generator) * 3
            sums[rank % max(rows, 1) :: 3, rank::3] = -torch.inf
            sums[rank % 2 :: 4, 1] = torch.nan
            sums[:, 2 % heads] = torch.inf if rank != world - 1 else 0.5
            sums[:, heads - 1] = -torch.inf  # nobody has anything
            partial[~sums.isfinite()] = torch.nan
            inputs.append([partial, sums])
        return inputs

    return Case(f"lse {dtype} {dim}", find("lse_reduce_scatter"), make, _merged, within(2, 1.0))


def _merged(inputs: Inputs) -> Inputs:
    sums = torch.stack([shard[1] for shard in inputs]).double()
    sums = torch.where(sums.isfinite(), sums, -torch.inf)
    weights = torch.softmax(sums, 0).nan_to_num(0.0).unsqueeze(-1)
    partials = torch.stack([shard[0] for shard in inputs]).double().nan_to_num(0.0)
    merged = (weights * partials).sum(0)
    return [[part] for part in merged.chunk(len(inputs), 1)]


def norm(dtype, hidden: int) -> Case:
    def make(world, rows, generator):
        residual = _random((rows, hidden), dtype, generator)
        weight = _random((1, hidden), dtype, generator)[0]
        local = [_random((rows, hidden), dtype, generator) for _ in range(world)]
        return [[one, residual.clone(), weight.clone()] for one in local]

    plugin = find("all_reduce_rms_norm")
    return Case(f"norm {dtype} {hidden}", plugin, make, _normed, within(3, 4.0))


def _normed(inputs: Inputs) -> Inputs:
    _, residual, weight = inputs[0]
    total = inputs[0][0].float()
    for shard in inputs[1:]:
        total = total + shard[0].float()
    updated = (total + residual.float()).to(residual.dtype).double()
    scale = torch.rsqrt((updated**2).mean(-1, keepdim=True) + 1e-6)
    return [[updated * scale * weight.double(), updated]] * len(inputs)


def argmax(dtype, width: int) -> Case:
    def make(world, rows, generator):
        inputs = []
        for rank in range(world):
            logits = (_random((rows, width), dtype, generator) * 4).round()  # many ties
            logits[::3, rank::2] = torch.nan
            logits[1::4] = torch.nan  # nothing else
            logits[2::4] = -torch.inf
            logits[3::4, ::2] = -0.0
            inputs.append([logits])
        return inputs

    plugin = find("vocab_argmax")
    return Case(f"argmax {dtype} {width}", plugin, make, _largest, same)


def _largest(inputs: Inputs) -> Inputs:
    rows = torch.cat([shard[0] for shard in inputs], 1).double().cpu()
    ids = []
    for row in rows.tolist():
        numbers = [(-value, place) for place, value in enumerate(row) if value == value]
        ids.append(min(numbers)[1] if numbers else 0)
    return [[torch.tensor(ids, dtype=torch.int64, device=inputs[0][0].device)]] * len(inputs)


CASES = (
    *(gather(count) for count in (1, 2, 3, 8)),
    Case("barrier", find("barrier"), _words, _gathered, same),
    *(reduce(op, dtype, 24) for op in ("all_reduce", "reduce_scatter") for dtype in DTYPES),
    *(reduce(op, torch.bfloat16, 2) for op in ("all_reduce", "reduce_scatter")),
    *(reduce("all_reduce", dtype, 1090) for dtype in (torch.float16, torch.float32)),
    *(lse(dtype, 16) for dtype in DTYPES),
    lse(torch.bfloat16, 6),
    *(norm(dtype, 200) for dtype in DTYPES),
    norm(torch.bfloat16, 2),
    *(argmax(dtype, 320) for dtype in DTYPES),
    argmax(torch.bfloat16, 14),
)


def wrong(case: Case, inputs: Inputs, got: Sequence[Sequence[torch.Tensor]]) -> list[str]:
    """Say which outputs are not right, or differ between ranks though they must not."""
    found = []
    want = case.expected(inputs)
    for rank, (outputs, wanted) in enumerate(zip(got, want, strict=True)):
        for index, (one, right) in enumerate(zip(outputs, wanted, strict=True)):
            if not case.close(one, right):
                found.append(f"{case.name}: output {index} of rank {rank}: {one} not {right}")
            if want[0] is wanted and not same(one, got[0][index]):
                found.append(f"{case.name}: output {index} of rank {rank} differs from rank 0's")
    return found

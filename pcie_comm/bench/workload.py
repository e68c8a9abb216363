"""Random inputs of all ranks for one operation, and what it must return.

The right answer is computed by the demo's oracle, which shares no code with the library. Weights
are sums of rounded numbers: against the oracle they are compared within its tolerance, and those
of this library also bit for bit with each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..demo.calls import (
    EXPERTS,
    HIDDEN,
    POISON,
    TOP_K,
    WEIGHT_RTOL,
    byte_fault,
    expected_ids,
    expected_weights,
    poisoned,
    random_bits,
)
from ..errors import UnsupportedError
from ..kernels.collective import PlanInfo
from ..kernels.plan_checks import blaming, make_plan
from ..kernels.registry import find
from ..layout import LINE_NBYTES, MAX_BLOCKS, STAGED_ALIGNMENT, align_up
from ..standalone import kimi_topk16
from ..tensors import close, meta_of
from .options import FUSED, HEADS, PAIR, ROUTER

LOCAL_HEADS, HEAD_DIM = 4, 96
SEED = 20_250_101

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Weights:
    """What router weights are compared with, and where they stand among the outputs."""

    place: int
    exact: np.ndarray


@dataclass(frozen=True)
class Workload:
    """One operation on one set of inputs.

    Attributes:
        op: Name of the operation.
        rows: Of every call.
        inputs: Per rank, on its device.
        expected: The outputs of every rank, on the CPU, bit for bit those of this library.
        weights: Of an operation that returns router weights.
        own: Where ranks get different outputs, those of each; `expected` is rank 0's then.
        tolerance: By how much numbers may differ, see Collective.
    """

    op: str
    rows: int
    inputs: Sequence[Tensors]
    expected: Tensors
    weights: Weights | None = None
    own: Sequence[Tensors] = ()
    tolerance: float = 0.0

    @property
    def world_size(self) -> int:
        return len(self.inputs)

    @property
    def devices(self) -> list[torch.device]:
        return [tensors[0].device for tensors in self.inputs]

    def outputs(self) -> list[Tensors]:
        """Return poisoned outputs for every rank."""
        return [
            tuple(poisoned(one.to(device), *one.shape) for one in self.wanted(rank))
            for rank, device in enumerate(self.devices)
        ]

    def wanted(self, rank: int) -> Tensors:
        """Return what a rank's outputs must be."""
        return self.own[rank] if self.own else self.expected

    def faults(self, outputs: Sequence[Tensors], ours: bool) -> list[str]:
        """Say what is wrong with the ranks' outputs; empty if nothing is.

        Args:
            outputs: Per rank.
            ours: Weights must have the bits of this library's router.
        """
        found = []
        for rank, tensors in enumerate(outputs):
            for place, (got, wanted) in enumerate(zip(tensors, self.wanted(rank), strict=True)):
                if self.tolerance and close(got, wanted, self.tolerance):
                    continue
                weighed = self.weights is not None and place == self.weights.place
                faults = byte_fault(f"output {place}", got, wanted) if ours or not weighed else []
                if weighed:
                    faults += self._weight_faults(got)
                found += [f"rank {rank}: {fault}" for fault in faults]
        return found

    def _weight_faults(self, got: torch.Tensor) -> list[str]:
        assert self.weights is not None
        right = np.isclose(got.cpu().numpy(), self.weights.exact, rtol=WEIGHT_RTOL, atol=0.0)
        return [] if right.all() else [f"{(~right).sum()} weights are wrong"]

    def received_nbytes(self) -> int:
        """Return the bytes that a rank receives in all, its own included; tags not counted."""
        info = PlanInfo(0, self.world_size, "push", 1 << 40, self.rows, MAX_BLOCKS)
        plan = find(self.op).plan(info, *map(meta_of, self.inputs[0]))
        return plan.staged_nbytes * self.world_size


def poison(outputs: Sequence[Tensors]) -> None:
    """Overwrite every output, so that nothing in it is right."""
    for tensors in outputs:
        for tensor in tensors:
            tensor.reshape(-1).view(torch.uint8).fill_(POISON)


def make(op: str, rows: int, devices: Sequence[torch.device]) -> Workload:
    """Draw the inputs of an operation for ranks on these devices. The same draw every time.

    Raises:
        UnsupportedError: The operation is not measured with that many ranks: the ways that stand
            beside the fused one gather equal shards.
    """
    find(op).check_world_size(len(devices))
    if op == FUSED and EXPERTS % len(devices):
        raise UnsupportedError(
            f"{op} is measured with equal shards, {EXPERTS} mod {len(devices)} is not 0",
            reason=f"{EXPERTS} experts do not divide by {len(devices)}",
        )
    return _MAKERS[op](rows, devices) if op in _MAKERS else _of_plugin(op, rows, devices)


def _draw(op: str, rows: int, world_size: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + 997 * rows + world_size + len(op))


def _shards(whole: torch.Tensor, devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Cut into as many column shards as there are devices; what does not divide is left out."""
    width = whole.shape[1] // len(devices)
    return [
        whole[:, rank * width : (rank + 1) * width].contiguous().to(device)
        for rank, device in enumerate(devices)
    ]


def _together(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([shard.cpu().view(torch.uint8) for shard in shards], dim=1).view(
        shards[0].dtype
    )


def _kimi_row(op: str, rows: int, world_size: int) -> tuple[torch.Tensor, ...]:
    """Return down rows of any bits, finite logits and a bias, on the CPU."""
    draw = _draw(op, rows, world_size)
    down = random_bits(draw, rows, HIDDEN)
    logits = torch.randn(rows, EXPERTS, generator=draw) * 2
    return down, logits, torch.randn(EXPERTS, generator=draw) * 0.1


def _pair(rows: int, devices: Sequence[torch.device]) -> Workload:
    down, logits, _ = _kimi_row(PAIR, rows, len(devices))
    parts = [_shards(whole, devices) for whole in (down, logits)]
    inputs = list(zip(*parts, strict=True))
    return Workload(PAIR, rows, inputs, tuple(_together(part) for part in parts))


def _heads(rows: int, devices: Sequence[torch.device]) -> Workload:
    draw = _draw(HEADS, rows, len(devices))
    shape = (rows, LOCAL_HEADS * len(devices), HEAD_DIM)
    bits = torch.randint(0, 256, (rows, math.prod(shape[1:])), generator=draw, dtype=torch.uint8)
    heads = bits.view(torch.float8_e4m3fn)
    inputs = [(part.view(rows, LOCAL_HEADS, HEAD_DIM),) for part in _shards(heads, devices)]
    return Workload(HEADS, rows, inputs, (heads.view(shape),))


def _route(logits: torch.Tensor, bias: torch.Tensor, place: int) -> tuple[Tensors, Weights]:
    """Return weights and ids of this library, and what the weights must be near to.

    The ids are the oracle's: were the library's others, its own calls would be found wrong.
    """
    weights, _ = kimi_topk16(logits, bias)
    # One sigmoid per row, on the rows' device: over a batch, torch's CPU sigmoid depends on how
    # the batch is split between threads, by an ulp.
    score = torch.stack([torch.sigmoid(row) for row in logits]).cpu().numpy()
    rows, values = logits.cpu().numpy(), bias.cpu().numpy()
    ids = np.stack(
        [expected_ids(row, one, values) for row, one in zip(rows, score, strict=True)]
    ).astype(np.int32)
    exact = np.stack([expected_weights(row, own) for row, own in zip(rows, ids, strict=True)])
    return (weights.cpu(), torch.from_numpy(ids)), Weights(place, exact)


def _fused(rows: int, devices: Sequence[torch.device]) -> Workload:
    down, logits, bias = _kimi_row(FUSED, rows, len(devices))
    selected, weights = _route(logits.to(devices[0]), bias.to(devices[0]), place=1)
    downs, routers = _shards(down, devices), _shards(logits, devices)
    biases = [bias.to(device) for device in devices]
    inputs = list(zip(downs, routers, biases, strict=True))
    return Workload(FUSED, rows, inputs, (down, *selected), weights)


def _router(rows: int, devices: Sequence[torch.device]) -> Workload:
    _, logits, bias = _kimi_row(ROUTER, rows, 1)
    inputs = (logits.to(devices[0]), bias.to(devices[0]))
    selected, weights = _route(*inputs, place=0)
    return Workload(ROUTER, rows, [inputs], selected, weights)


def _of_plugin(op: str, rows: int, devices: Sequence[torch.device]) -> Workload:
    """Any other collective, with inputs of its own; right is what its reference says."""
    plugin, world_size = find(op), len(devices)
    with blaming(plugin, "failed to make example inputs"):
        shards = plugin.example_inputs(world_size, rows, SEED)
        wanted = [tuple(plugin.reference_for(rank, shards)) for rank in range(world_size)]
    inputs = [
        tuple(one.to(device) for one in tensors)
        for tensors, device in zip(shards, devices, strict=True)
    ]
    return Workload(op, rows, inputs, wanted[0], own=wanted, tolerance=plugin.tolerance)


def slot_needed(op: str, rows: int, world_size: int) -> int:
    """Return the bytes of a slot that holds a call of any protocol; 0 for those in OPERATIONS.

    Raises:
        UnsupportedError: The collective has no example inputs, or does not serve that many ranks.
    """
    if op in _MAKERS:
        return 0
    work = make(op, rows, [torch.device("cpu")] * world_size)
    sizes = [sum(align_up(one.nbytes, STAGED_ALIGNMENT) for one in work.inputs[0])]
    for protocol in ("push", "pull", "tagged"):
        info = PlanInfo(0, world_size, protocol, 1 << 40, rows, MAX_BLOCKS)
        sizes.append(make_plan(find(op), info, [*map(meta_of, work.inputs[0])]).staged_nbytes)
    return align_up(max(sizes), LINE_NBYTES) * world_size


_MAKERS = {FUSED: _fused, PAIR: _pair, HEADS: _heads, ROUTER: _router}

assert TOP_K == 16, "kimi_topk16 selects 16"

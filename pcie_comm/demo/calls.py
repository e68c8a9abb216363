"""What the demo's ranks compute, and what the right answer is, said without the library.

The check shares no code with what it checks: gathered bytes are a `torch.cat` of the shards, ids
come from a NumPy sort by the router contract, weights from float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from ..tensors import byte_view, dense

HIDDEN, EXPERTS, TOP_K = 3584, 896, 16

WEIGHT_RTOL = 4e-6
"""Granted to a weight against float64: 16 fp32 sigmoids, their sum and a division are rounded."""

POISON = 0xFF


def random_bits(draw: torch.Generator, *shape: int) -> torch.Tensor:
    """Return bf16 of any bits, NaN payloads included: a copy must not touch them."""
    bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=draw, dtype=torch.int16)
    return bits.view(torch.bfloat16)


def poisoned(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return an output of `like`'s dtype and device in which nothing is right yet."""
    output = torch.empty(shape, dtype=like.dtype, device=like.device)
    output.reshape(-1).view(torch.uint8).fill_(POISON)
    return output


def byte_fault(name: str, got: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    """Say where the bytes of two tensors differ; empty if they do not."""
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return [f"{name} has shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"]
    here, there = (byte_view(dense(t.detach().cpu())) for t in (got, wanted))
    different = here != there
    if not different.any():
        return []
    different = different.reshape(len(got) if got.ndim else 1, -1)
    row = int(different.any(1).nonzero()[0])
    count = int(different.sum())
    return [f"{name}: {count} of {different.numel()} bytes differ, first in row {row}"]


class Call(ABC):
    """One collective call of one rank: random inputs, poisoned outputs, and the check of these.

    Attributes:
        inputs: This rank's shards.
        outputs: What the call writes to.
    """

    method: str = ""
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    @abstractmethod
    def faults(self) -> list[str]:
        """Say what is wrong with the outputs; empty if nothing is."""

    @property
    def digested(self) -> torch.Tensor | None:
        """The output that the ranks have to compare with each other, if there is one."""
        return None


class PairCall(Call):
    """all_gather_pair: bf16 and fp32 columns of different widths."""

    method = "all_gather_pair"

    def __init__(self, rank: int, world_size: int, rows: int, device: torch.device, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.shards = [
            (
                random_bits(draw, rows, 448).to(device),
                random_bits(draw, rows, 224).view(torch.float32).to(device),
            )
            for _ in range(world_size)
        ]
        self.inputs = self.shards[rank]
        self.outputs = tuple(poisoned(t, rows, t.shape[1] * world_size) for t in self.inputs)

    def faults(self) -> list[str]:
        return [
            fault
            for name, output, shards in zip(
                ("first", "second"), self.outputs, zip(*self.shards, strict=True), strict=True
            )
            for fault in byte_fault(name, output, torch.cat(shards, dim=1))
        ]


class HeadsCall(Call):
    """all_gather_heads: four bf16 heads of 128 per rank."""

    method = "all_gather_heads"

    def __init__(self, rank: int, world_size: int, rows: int, device: torch.device, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.shards = [random_bits(draw, rows, 4, 128).to(device) for _ in range(world_size)]
        self.inputs = (self.shards[rank],)
        self.outputs = (poisoned(self.shards[rank], rows, 4 * world_size, 128),)

    def faults(self) -> list[str]:
        return byte_fault("heads", self.outputs[0], torch.cat(self.shards, dim=1))


class FusedCall(Call):
    """all_gather_pair_kimi_topk: a Kimi-K3 decode row per row.

    Logits and bias lie on a coarse grid, so that rows have ties and the order of ids is tested;
    one logit per row is NaN.
    """

    method = "all_gather_pair_kimi_topk"

    def __init__(self, rank: int, world_size: int, rows: int, device: torch.device, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.down = random_bits(draw, rows, HIDDEN).chunk(world_size, dim=1)
        logits = (torch.randn(rows, EXPERTS, generator=draw) * 32).round() / 16
        nowhere = torch.randint(EXPERTS, (rows, 1), generator=draw)
        self.logits = logits.scatter_(1, nowhere, float("nan")).to(device)
        self.bias = ((torch.randn(EXPERTS, generator=draw) * 6).round() / 64).to(device)
        local_router = self.logits.chunk(world_size, dim=1)[rank]
        local_down = self.down[rank].to(device)
        self.inputs = (local_down.contiguous(), local_router.contiguous(), self.bias)
        self.outputs = (
            poisoned(self.inputs[0], rows, HIDDEN),
            poisoned(self.logits, rows, TOP_K),
            poisoned(torch.empty(0, dtype=torch.int32, device=device), rows, TOP_K),
        )

    @property
    def digested(self) -> torch.Tensor | None:
        return self.outputs[1]

    def faults(self) -> list[str]:
        down, weights, ids = self.outputs
        found = byte_fault("down", down, torch.cat(self.down, dim=1))
        bias = self.bias.cpu().numpy()
        for row, logits in enumerate(self.logits):
            # One sigmoid per row: over a batch, torch's CPU sigmoid depends on how the batch is
            # split between threads, by an ulp. On the rows' device, as the contract says.
            score = torch.sigmoid(logits).cpu().numpy()
            wanted = expected_ids(logits.cpu().numpy(), score, bias)
            got = ids[row].cpu().numpy()
            if not np.array_equal(got, wanted):
                found.append(f"ids of row {row} are {got.tolist()}, expected {wanted.tolist()}")
                continue
            exact = expected_weights(logits.cpu().numpy(), wanted)
            weight = weights[row].cpu().numpy()
            if not np.allclose(weight, exact, rtol=WEIGHT_RTOL, atol=0.0):
                found.append(f"weights of row {row} are {weight}, expected {exact}")
        return found


def expected_ids(logits: np.ndarray, score: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return a row's 16 experts: by fp32 score plus bias, descending, then by id; [896] each."""
    valid = np.isfinite(logits) & np.isfinite(bias)
    choice = np.where(valid, score + bias, -np.inf).astype(np.float32)
    return np.lexsort((np.arange(EXPERTS), -choice))[:TOP_K]


def expected_weights(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the weights of a row's selected experts in float64."""
    chosen = logits[ids].astype(np.float64)
    with np.errstate(over="ignore"):
        score = np.where(np.isfinite(chosen), 1.0 / (1.0 + np.exp(-chosen)), 0.0)
    weights: np.ndarray = score / (score.sum() + 1e-20)
    return weights


def call_types(world_size: int) -> tuple[type[PairCall | HeadsCall | FusedCall], ...]:
    """Return the calls of a round: the fused one where Kimi's experts divide by the ranks."""
    return (FusedCall,) if EXPERTS % world_size == 0 else (PairCall, HeadsCall)

"""The same decoder with torch.distributed in the place of the group: gloo, a process per rank."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from decode import Engine, lengths_of

from model import Gather, Shape
from pcie_comm import kimi_topk16


def gather_of(world_size: int) -> Gather:
    """Return the collective, of two all-gathers and the router on the whole row."""

    def columns(local: torch.Tensor) -> torch.Tensor:
        own = local.contiguous().view(torch.uint8).cpu()  # gloo gathers no device memory
        parts = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(parts, own)
        return torch.cat(parts, dim=1).view(local.dtype).to(local.device)

    def gather(
        local: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return (columns(local), *kimi_topk16(columns(logits), bias))

    return gather


def _rank(rank: int, world_size: int, device: str, shape: Shape, tokens: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    place = torch.device("cuda:0" if device == "cuda" else device)
    engine = Engine(shape, rank, world_size, place, lambda name: gather_of(world_size))
    lengths = lengths_of(tokens, shape.sequences)
    dist.barrier()
    started = time.perf_counter()
    streams = engine.decode(lengths)
    elapsed_s = time.perf_counter() - started
    if rank == 0:
        rate = round(sum(lengths) / elapsed_s, 1)
        torch.save({"streams": streams, "tokens_per_s": rate}, Path(folder) / "result.pt")
    dist.destroy_process_group()


def run_processes(world_size: int, device: str, shape: Shape, tokens: int) -> dict[str, Any]:
    """Decode with a process per rank; return streams and tokens per second."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, device, shape, tokens, folder)
        mp.spawn(_rank, arguments, nprocs=world_size)
        result: dict[str, Any] = torch.load(Path(folder) / "result.pt", weights_only=True)
    return result

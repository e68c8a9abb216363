"""torch.distributed among the ranks of one process, to compare with.

Every rank gets a process group object of its own, without torch.distributed's global one, so that
ranks may be threads. NCCL wants a GPU for each rank; gloo serves ranks on the CPU.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

distributed: Any = dist  # torch does not type what is used of it

TIMEOUT = datetime.timedelta(seconds=60)


def why_not(devices: Sequence[torch.device]) -> str:
    """Say why torch.distributed cannot serve ranks on these devices; empty if it can."""
    if not dist.is_available():
        return "this torch is built without torch.distributed"
    if devices[0].type == "cpu":
        return "" if dist.is_gloo_available() else "this torch is built without gloo"
    if not dist.is_nccl_available():
        return "this torch is built without NCCL"
    if len(set(devices)) < len(devices):
        return (
            f"NCCL wants a GPU for each rank (ranks={len(devices)}, GPUs={len(set(devices))}); "
            "gloo cannot be captured in a graph"
        )
    return ""


class TorchGroups:
    """A process group of torch.distributed for every rank.

    Args:
        devices: Of the ranks.

    Raises:
        RuntimeError: The backend refuses.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        store = distributed.HashStore()
        count = len(devices)

        def build(rank: int) -> Any:
            if devices[rank].type == "cpu":
                return distributed.ProcessGroupGloo(store, rank, count, TIMEOUT)
            with torch.cuda.device(devices[rank]):
                group = distributed.ProcessGroupNCCL(store, rank, count)
                first = torch.ones(1, dtype=torch.uint8, device=devices[rank])
                group._allgather_base(first.new_empty(count), first).wait()
                torch.cuda.synchronize()
                return group

        with ThreadPoolExecutor(count) as threads:  # building waits for the other ranks
            self._groups = list(threads.map(build, range(count)))

    def gather_columns(
        self, rank: int, local: torch.Tensor, flat: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Gather column shards as a user of torch would: all-gather, then put ranks side by side.

        Args:
            rank: Of the caller.
            local: [rows, ...], contiguous.
            flat: [world_size, rows, bytes of a row], uint8: room for the gathered shards.
            out: [rows, world_size * width, ...], contiguous.
        """
        shard = local.view(torch.uint8).view(1, *flat.shape[1:])
        whole = out.view(torch.uint8).view(flat.shape[1], flat.shape[0], flat.shape[2])
        if flat.shape[1] == 1:  # one row: the ranks are side by side as they come
            self._groups[rank]._allgather_base(whole.view(flat.shape), shard).wait()
            return
        self._groups[rank]._allgather_base(flat, shard).wait()
        whole.copy_(flat.transpose(0, 1))


def open_groups(devices: Sequence[torch.device]) -> tuple[TorchGroups | None, str]:
    """Return process groups for ranks on these devices, or None and why there are none."""
    why = why_not(devices)
    if why:
        return None, why
    try:
        return TorchGroups(devices), ""
    except RuntimeError as error:
        return None, f"{type(error).__name__}: {error}"

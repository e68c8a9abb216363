"""What stands beside this library's calls: torch.distributed, and PyTorch's symmetric memory.

NVLink multicast stays off: no multimem operations, and `ENVIRONMENT` forbids it to NCCL and torch.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from pcie_comm import PcieDcpGroup
from pcie_comm.bench import contenders
from pcie_comm.bench.contenders import NO_PROTOCOL, OURS, OVERLAPPING, Contender, torch_router
from pcie_comm.bench.options import FUSED, PAIR
from pcie_comm.bench.torch_group import TorchGroups, distributed
from pcie_comm.bench.workload import Tensors, Workload
from pcie_comm.kernels.registry import find

SYMMETRIC = "symmetric memory"
LIMIT = datetime.timedelta(seconds=30)
BUFFERS = 2
"""An operation writes to the other buffer than its predecessor: with that a barrier each is enough.

Whoever passes the barrier of the next operation knows that every peer has read this one's.
"""


class ProcessGroup(TorchGroups):
    """The default group of torch.distributed, for the one rank of this process.

    Args:
        rank, world_size: Of the process.
        device: Of the rank: NCCL on a GPU, else gloo.
        meeting: File through which the ranks meet.

    Raises:
        RuntimeError, ValueError: torch refuses.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, meeting: str) -> None:
        self.name = "NCCL" if device.type == "cuda" else "gloo"
        store = distributed.FileStore(meeting, world_size)
        store.set_timeout(LIMIT)  # so that a rank that fails alone does not hold the others up
        distributed.init_process_group(
            self.name.lower(),
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=LIMIT,
        )
        self._groups = [distributed.group.WORLD] * world_size
        first = torch.ones(1, dtype=torch.uint8, device=device)
        self._groups[rank]._allgather_base(first.new_empty(world_size), first).wait()


def why_no_process_group(device: torch.device, shared: bool) -> str:
    """Say why torch.distributed cannot serve; empty if it can."""
    if not dist.is_available():
        return "this torch is built without torch.distributed"
    if device.type == "cpu":
        return "" if dist.is_gloo_available() else "this torch is built without gloo"
    if shared:
        return "NCCL wants a GPU for each rank, and ranks share one"
    return "" if dist.is_nccl_available() else "this torch is built without NCCL"


class Symmetric:
    """A buffer of symmetric memory on every rank, twice.

    Args:
        rank, world_size: Of the process.
        device: A GPU.
        nbytes: Of a buffer.

    Raises:
        Exception: torch has no symmetric memory, or refuses.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, nbytes: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        memory: Any = symmetric
        self.rank, self.world_size = rank, world_size
        self._own = [memory.empty(nbytes // 4, dtype=torch.int32, device=device) for _ in range(2)]
        self._handles = [memory.rendezvous(one, distributed.group.WORLD) for one in self._own]
        if None in self._handles:
            raise RuntimeError("rendezvous gives no handle")

    def views(self, shards: Tensors) -> list[list[list[torch.Tensor]]]:
        """Return, by buffer, by shard and by rank, where shards lie: [rows, words]."""
        found = []
        for handle in self._handles:
            begin, by_shard = 0, []
            for shard in shards:
                shape = (shard.shape[0], shard.nbytes // shard.shape[0] // 4)
                by_shard.append(
                    [
                        handle.get_buffer(peer, shape, torch.int32, begin)
                        for peer in range(self.world_size)
                    ]
                )
                begin += -(-shape[0] * shape[1] // 32) * 32
            found.append(by_shard)
        return found

    def barrier(self, slot: int) -> None:
        """Enqueue a barrier of all ranks."""
        self._handles[slot].barrier(channel=slot)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor as [rows, words of 4 bytes], in the same memory."""
    return tensor.view(tensor.shape[0], -1).view(torch.int32)


def symmetric(memory: Symmetric, work: Workload) -> Contender:
    """The operation over symmetric memory: own shards in, a barrier, peers' shards in one kernel.

    Then torch's router where the operation selects.
    """
    rank, outputs = memory.rank, work.outputs()
    shards = tuple(work.inputs[rank][: 2 if work.op in (FUSED, PAIR) else 1])
    gathered = list(outputs[rank][: len(shards)])
    if work.op == FUSED:
        logits = shards[1]
        gathered[1] = logits.new_zeros(logits.shape[0], logits.shape[1] * work.world_size)
    views, turns = memory.views(shards), count()

    def local(rank: int) -> None:
        if work.op == FUSED:
            torch_router(gathered[1], work.inputs[rank][2], outputs[rank][1:])

    def enqueue(rank: int) -> None:
        slot = next(turns) % BUFFERS
        for shard, places in zip(shards, views[slot], strict=True):
            places[rank].copy_(_words(shard))
        memory.barrier(slot)
        for out, places in zip(gathered, views[slot], strict=True):
            torch.cat(places, dim=1, out=_words(out))
        local(rank)

    return Contender(SYMMETRIC, NO_PROTOCOL, enqueue, outputs, False, (), local)


def ours(name: str, group: PcieDcpGroup, work: Workload) -> Contender:
    """The operation as this library's single launch."""
    collective, outputs = find(work.op), work.outputs()
    group.prepare(collective, rows=work.rows)

    def enqueue(rank: int) -> None:
        group.run(collective, *work.inputs[rank], out=outputs[rank])

    return Contender(name, "auto", enqueue, outputs, groups=[group])


def makers(
    group: PcieDcpGroup,
    overlapping: PcieDcpGroup | None,
    torch_group: ProcessGroup | None,
    memory: Symmetric | None,
) -> list[Callable[[Workload], Contender]]:
    """Return what makes the contenders of a case, those that there are."""
    found: list[Callable[[Workload], Contender]] = [lambda work: ours(OURS, group, work)]
    if overlapping is not None:
        found.append(lambda work: ours(OVERLAPPING, overlapping, work))
    if torch_group is not None:
        found.append(
            lambda work: replace(contenders.distributed(torch_group, work), name=torch_group.name)
        )
    if memory is not None:
        found.append(lambda work: symmetric(memory, work))
    return found

"""Rendezvous of processes through torch: which of its means to use, and process groups.

A group in an initialised torch.distributed meets in the store of the default process group and not
in a side group: `new_group(use_local_synchronization=True)` derives its keys from the number of
groups that this process has, so it reads stale keys when a group is built a second time, and its
ranks never meet when one of them is a member of more groups than another (seen with torch 2.13).
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from .bootstrap import Bootstrap, alone
from .bootstrap_store import Pause, StoreBootstrap
from .config import LaunchEnvironment, agent_hosts_store
from .errors import InvalidArgumentError, PeerDiedError, PeerTimeoutError, UnsupportedError
from .rank_order import group_order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_launch_stores: dict[LaunchEnvironment, Store] = {}


class ProcessGroupBootstrap(Bootstrap):
    """Ranks are the members of a torch process group, in an order of our own.

    Tensors travel on the CPU where the group has a CPU backend (gloo), else on this process's
    current CUDA device (NCCL). The group belongs to the caller and is never destroyed here; after
    a timeout torch may not be able to use it again.

    Args:
        process_group: The group; this process is a member.
        order: Global ranks of its members in group-rank order.
    """

    def __init__(self, process_group: ProcessGroup, order: Sequence[int]) -> None:
        super().__init__(order.index(dist.get_rank()), order)
        self._process_group: ProcessGroup | None = process_group
        self._positions = [dist.get_group_rank(process_group, rank) for rank in order]
        self._device = torch.device("cpu")
        if "cpu:" not in dist.get_backend_config(process_group):
            bound = process_group.bound_device_id
            self._device = bound or torch.device("cuda", torch.cuda.current_device())

    def _exchange(self, payload: bytes, timeout_s: float) -> list[bytes]:
        pause = Pause(timeout_s)
        lengths = [int(length) for length in self._gather(torch.tensor([len(payload)]), pause)]
        longest = max(lengths)
        if longest == 0:
            return [b""] * self.world_size
        padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
        rows = self._gather(padded, pause)
        return [row.numpy().tobytes()[:length] for row, length in zip(rows, lengths, strict=True)]

    def _gather(self, tensor: torch.Tensor, pause: Pause) -> list[torch.Tensor]:
        """Gather one tensor of equal size; in group-rank order, on the CPU."""
        assert self._process_group is not None  # all_gather refuses after close
        mine = tensor.to(self._device)
        gathered = [torch.empty_like(mine) for _ in self._positions]
        # The work itself gets the limit, not only the wait: work that gloo still has pending would
        # hold up the end of the process.
        options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options.timeout = timedelta(seconds=max(pause.remaining_s(), 0.001))
        try:
            work = self._process_group.allgather([gathered], [mine], options)
            # wait() would see no peer that aborts, hear no signal, and on CUDA only order streams
            while not work.is_completed():
                self._check_peers()
                if pause.remaining_s() <= 0:
                    raise self._timed_out([], pause.started)
                pause.sleep()
            work.wait(options.timeout)
        except RuntimeError as error:
            if pause.remaining_s() <= 0.01:
                raise self._timed_out([], pause.started) from error
            self._blame_a_peer()
            reason = str(error).partition("\n")[0]
            raise PeerDiedError(
                f"the process group failed ({reason}); look for the errors of its other ranks",
                rank=self.rank,
            ) from error
        return [gathered[position].cpu() for position in self._positions]

    def shared_store(self) -> Store:
        assert self._process_group is not None  # nobody asks after close
        return c10d._get_process_group_store(self._process_group)

    @property
    def process_group(self) -> ProcessGroup | None:
        return self._process_group

    def close(self) -> None:
        """Let go of the group, which stays the caller's."""
        super().close()
        self._process_group = None


def from_process_group(ranks: int | Sequence[int], process_group: ProcessGroup) -> Bootstrap:
    """Return a bootstrap over the caller's process group, whose members are exactly `ranks`."""
    try:
        if not isinstance(process_group, dist.ProcessGroup):
            raise TypeError("not a torch.distributed.ProcessGroup with this process in it")
        members = dist.get_process_group_ranks(process_group)
    except (TypeError, KeyError, RuntimeError, ValueError) as error:
        raise InvalidArgumentError(
            f"process_group={process_group!r} is unusable ({error}); "
            "give a live group that this process is a member of"
        ) from error
    named = group_order(ranks)
    order = named if isinstance(ranks, Sequence) else tuple(members)
    if sorted(order) != sorted(members) or len(named) != len(members):
        raise InvalidArgumentError(
            f"ranks={ranks!r} are not the members of process_group, global ranks {members}; "
            "name exactly those, in group-rank order, or give their number"
        )
    if len(order) == 1:
        return alone(order)
    return ProcessGroupBootstrap(process_group, order)


def from_launch(order: tuple[int, ...], timeout_s: float) -> Bootstrap:
    """Return a bootstrap over what connects this process to the others of its launch."""
    initialised = dist.is_available() and dist.is_initialized()
    environment = LaunchEnvironment.read()
    if initialised:
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = environment.rank or 0, environment.world_size or 1
        connected = None not in (environment.rank, environment.world_size, environment.rendezvous)
        if len(order) > 1 and not connected:
            raise InvalidArgumentError(
                f"nothing connects this process to the other ranks of ranks={list(order)}; start "
                "it with torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), call "
                "torch.distributed.init_process_group, or use pcie_comm.local_world for ranks in "
                "one process"
            )
    _check_member(order, rank, world_size)
    if len(order) == 1:
        return alone(order)
    store = _default_store() if initialised else _launch_store(environment, timeout_s)
    return StoreBootstrap(store, order, rank, timeout_s)


def _check_member(order: tuple[int, ...], rank: int, world_size: int) -> None:
    if max(order) >= world_size and len(order) > 1:
        raise InvalidArgumentError(
            f"ranks={list(order)} names global rank {max(order)}, but WORLD_SIZE={world_size}; "
            f"name ranks from 0 to {world_size - 1}, or start more processes"
        )
    if rank not in order:
        raise InvalidArgumentError(
            f"ranks={list(order)} does not contain this process, global rank {rank}; "
            "only members build a group"
        )


def _default_store() -> Store:
    """Return the store of the default process group."""
    getter = getattr(dist.group.WORLD, "get_group_store", None)  # public since torch 2.9 or so
    store = getter() if getter else c10d._get_default_store()
    if store is None:
        raise UnsupportedError(
            "the default process group has no store to meet in; give process_group=",
            reason="torch.distributed has no store",
        )
    return store


def _launch_store(environment: LaunchEnvironment, timeout_s: float) -> Store:
    """Return this process's one connection to the store that its launcher described.

    Under torchrun the agent hosts the store, else global rank 0 does, on first use.
    """
    if environment not in _launch_stores:
        _launch_stores[environment] = _connect(environment, timeout_s)
    return _launch_stores[environment]


def _connect(environment: LaunchEnvironment, timeout_s: float) -> Store:
    """Host the launch's store, or connect to it.

    Torch's own limit counts for each attempt anew, and no signal ends its wait. So it is asked when
    somebody listens; and in a thread, because what listens may be no store and never answer. Only
    then is the thread left behind.
    """
    assert environment.rank is not None
    assert environment.rendezvous is not None
    rank, (host, port), pause = environment.rank, environment.rendezvous, Pause(timeout_s)
    if rank != 0 or agent_hosts_store():
        _await_listener(host, port, rank, pause)
    found = queue.SimpleQueue[Any]()

    def connect() -> None:
        try:
            # The last number is how many clients the host waits for. A group may be smaller than
            # WORLD_SIZE, and its ranks meet in the store anyway.
            limit = timedelta(seconds=max(pause.remaining_s(), 0.001))
            found.put(next(rendezvous("env://", rank, 1, timeout=limit))[0])
        except Exception as error:  # handed over
            found.put(error)

    threading.Thread(target=connect, name="pcie_comm.store", daemon=True).start()
    try:
        outcome = found.get(timeout=max(pause.remaining_s(), 0.001))
    except queue.Empty:
        outcome = TimeoutError("what listens there does not answer as a store does")
    if not isinstance(outcome, Exception):
        store: Store = outcome
        return store
    if "EADDRINUSE" in str(outcome):
        raise InvalidArgumentError(
            f"MASTER_PORT={port} is in use on this host by something else; choose another port"
        ) from outcome
    raise _unreachable(host, port, rank, outcome) from outcome


def _await_listener(host: str, port: int, rank: int, pause: Pause) -> None:
    """Return when something listens.

    Raises:
        PeerTimeoutError: Nothing did in time.
    """
    while True:
        try:
            socket.create_connection((host, port), max(pause.remaining_s(), 0.001)).close()
            return
        except OSError as error:
            if pause.remaining_s() <= 0:
                raise _unreachable(host, port, rank, error) from error
        pause.sleep()


def _unreachable(host: str, port: int, rank: int, why: Exception) -> PeerTimeoutError:
    return PeerTimeoutError(
        f"cannot reach the store at MASTER_ADDR={host} and MASTER_PORT={port} "
        f"({str(why).partition(chr(10))[0]}); the launcher or global rank 0 must host it, here is "
        f"global rank {rank}"
    )

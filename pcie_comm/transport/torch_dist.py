"""Bytes between ranks by a backend of torch.distributed: gloo, NCCL, or one of somebody else.

There are no slabs here and nothing that a kernel could address. A `Rail` gathers equal numbers of
bytes from a few ranks; dist_engine.py makes calls of it.

Every rail has a backend of its own, made over the store in which the group met. So it needs no
initialised torch.distributed, calls on two channels never get in each other's way, and what breaks
here leaves the caller's process groups alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from ..errors import UnsupportedError
from .base import PeerMap, Transport

NAME = "torch_dist"

HEADER_NBYTES = 16

FRAME_NBYTES = 4096
"""Length of a frame under gloo: a header, and what one rank sends of a token of Kimi K3 from two
ranks on."""

SPARE_S = 1.0
"""Torch's own limit of an exchange is later than ours: ours says more."""


class TorchDistTransport(Transport):
    """Owns no slab: there is nothing to map. Stands for one among the transports of a group."""

    name = NAME
    mappings_keep_memory = True

    def allocate(self, nbytes: int) -> bytes:
        """Return a record that says nothing. See Transport."""
        return b"{}"

    def map(self, records: Sequence[bytes]) -> PeerMap:
        """Return a map in which nothing can be addressed. See Transport."""
        return PeerMap((0,) * self.info.world_size)

    def unmap(self) -> None:
        """Do nothing."""

    def free(self) -> None:
        """Do nothing."""

    def describe(self) -> dict[str, object]:
        """Return facts for people."""
        return {"transport": self.name, "memory": "buffers of torch.distributed"}


def backends_for(device: torch.device, group: dist.ProcessGroup | None) -> tuple[str, ...]:
    """Return the backends that a rank could use, best first; gloo is always among them.

    Args:
        device: The rank's.
        group: The caller's process group; None: the default one, if there is one.
    """
    found: list[str] = []
    if group is not None or (dist.is_available() and dist.is_initialized()):
        for part in dist.get_backend_config(group).split(","):
            kind, _, name = part.partition(":")
            if kind == device.type:
                found.append(name)
    if device.type == "cuda" and dist.is_nccl_available():
        found.append("nccl")
    return tuple(dict.fromkeys([*found, "gloo"]))


def choose_backend(offers: Sequence[Sequence[str]], devices: Sequence[str]) -> str:
    """Return the backend of a group: the first that every rank has and that can serve them. Pure.

    Args:
        offers: Per rank, what `backends_for` said.
        devices: Per rank, a name of its device. NCCL refuses two ranks on one.
    """
    shared = len(set(devices)) < len(devices)
    common = [name for name in offers[0] if all(name in offer for offer in offers)]
    return next((name for name in common if not (name == "nccl" and shared)), "gloo")


def _create(name: str, store: Store, rank: int, size: int, limit: timedelta) -> Any:
    """Return a backend object of ranks that share a store.

    Raises:
        UnsupportedError: This torch has no such backend, or none that can be made like this.
    """
    if name == "gloo" and dist.is_gloo_available():
        return dist.ProcessGroupGloo(store, rank, size, limit)
    if name == "nccl" and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        raise UnsupportedError(
            f"transport={NAME!r} cannot make a backend {name!r}; use a process group of gloo, NCCL "
            "or a backend that was registered with torch.distributed.Backend.register_backend",
            reason=f"no backend {name}",
        )
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, limit)
    described = c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
    described.store, described.group_rank, described.group_size = store, rank, size
    described.timeout, described.group_id = limit, f"pcie_comm {name}"
    return plugin.creator_fn(described, None)


class Rail:
    """Gathers bytes among the ranks of a rail. Not for two threads at once.

    A row of bytes goes in two parts. Its first `frame_nbytes`, the frame, go by gloo, and every
    frame of a rail has the same length: gloo ends the process of who gets more than it expects.
    The rest follows once the frames, which start with a header, have shown that all members are
    there and send as much: NCCL waits for the others on the device, and knows no lengths.
    Under gloo a frame holds what a decode step sends, so most rows go in one gather.

    Args:
        backend: Carries the payload.
        store: Of the members, under a prefix of this rail.
        rank, size: Number of this member, and of all.
        device: Of the payload.
        timeout_s: Longest wait for the members while the rail is made, in seconds.

    Raises:
        UnsupportedError: This torch lacks the backend.
        RuntimeError: A member did not come in time.
    """

    def __init__(
        self,
        backend: str,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        limit = timedelta(seconds=timeout_s)
        prefixed = c10d.PrefixStore
        self.size = size
        self.device = device
        self.frame_nbytes = FRAME_NBYTES if backend == "gloo" else HEADER_NBYTES
        self._staged = backend == "gloo" and device.type != "cpu"
        self._control = _create("gloo", prefixed("control", store), rank, size, limit)
        self._data = self._control
        self._works: list[Any] = []
        if backend != "gloo":
            self._data = _create(backend, prefixed("data", store), rank, size, limit)

    def send_frame(self, row: torch.Tensor, limit_s: float) -> Flight:
        """Start gathering the frames of dense uint8 rows; results are on the CPU."""
        frame = torch.zeros(self.frame_nbytes, dtype=torch.uint8)
        frame[: len(row)] = row[: self.frame_nbytes]
        return self._start(self._control, frame, limit_s, torch.device("cpu"))

    def send_rest(self, row: torch.Tensor, limit_s: float) -> Flight:
        """Start gathering what follows the frame; results are on the rail's device."""
        rest = row[self.frame_nbytes :]
        carried = rest.cpu() if self._staged else rest.contiguous()
        return self._start(self._data, carried, limit_s, self.device)

    def warm_up(self, limit_s: float) -> None:
        """Make connections that the backend would make at its first gather.

        Raises:
            RuntimeError: That took longer than `limit_s`, or failed.
        """
        until = time.monotonic() + limit_s
        row = torch.zeros(2 * self.frame_nbytes, dtype=torch.uint8, device=self.device)
        for send in (self.send_frame, self.send_rest):
            flight = send(row, limit_s)
            while not flight.landed():
                if time.monotonic() > until:
                    raise RuntimeError(f"no connection within {limit_s} s")
                time.sleep(SPARE_S / 1000)
            flight.result()

    def _start(
        self, backend: Any, tensor: torch.Tensor, limit_s: float, device: torch.device
    ) -> Flight:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options.timeout = timedelta(seconds=limit_s + SPARE_S)
        work = backend.allgather([gathered], [tensor], options)
        self._works = [other for other in self._works if not other.is_completed()] + [work]
        return Flight(work, tensor, gathered, device)

    def drop(self) -> None:
        """Hang up: members that wait for this one get an error. Returns at once. Idempotent.

        Work that still waits would hold up whoever drops a gloo backend, so its end is awaited in
        the background; its own limit bounds that.
        """
        backends, works = [self._control, self._data], self._works
        self._control = self._data = None
        self._works = []
        for backend in backends:
            if backend is not None and backend.name() != "gloo":
                getattr(backend, "abort", lambda: None)()  # ends NCCL's kernels
        if any(not work.is_completed() for work in works):
            threading.Thread(
                target=_outlive, args=(backends, works), name="pcie_comm.hang_up", daemon=True
            ).start()


def _outlive(backends: list[Any], works: list[Any]) -> None:
    """Keep backends until their work has ended."""
    while any(not work.is_completed() for work in works):
        time.sleep(SPARE_S / 20)
    backends.clear()


class Flight:
    """A gather under way; holds what it reads and writes. `device` is where results go."""

    def __init__(
        self, work: Any, sent: torch.Tensor, gathered: list[torch.Tensor], device: torch.device
    ) -> None:
        self._work = work
        self._device = device
        self._sent = sent
        self._gathered = gathered

    def landed(self) -> bool:
        """Tell whether it is over, well or not. Does not wait."""
        return bool(self._work.is_completed())

    def result(self) -> list[torch.Tensor]:
        """Return what each member sent. Requires: `landed`.

        Raises:
            RuntimeError: The gather failed.
        """
        self._work.wait()
        return [tensor.to(self._device) for tensor in self._gathered]


def prefix(store: Store, *parts: object) -> Store:
    """Return a part of a store."""
    return c10d.PrefixStore("/".join(map(str, parts)), store)

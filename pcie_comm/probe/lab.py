"""The GPUs of a process, ways between them, and memory to try them with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from .. import driver
from ..errors import UnsupportedError
from ..kernels.store import KernelStore
from ..topology.probed import HOST
from .gpu import Gpu
from .pattern import Counts, count, pattern
from .region import Region, of_gpu, of_host

NO_PEER_ACCESS = "no peer access"
"""Reason of the error where CUDA says that a GPU cannot address another."""

ENOUGH_QUEUES = 16
"""Streams of a process take hardware queues in turn; a GPU has fewer than this at a time."""


class Lab:
    """What tasks work with. GPUs are opened when they are first asked for, and stay open.

    Args:
        ordinals: CUDA ordinals of all GPUs that may be asked for, by name.
        store: Where kernels come from.
        queues: Hardware queues of this process's CUDA.
    """

    def __init__(self, ordinals: Mapping[str, int], store: KernelStore, queues: int = 32) -> None:
        self._ordinals = dict(ordinals)
        self._queues = queues
        self._store = store
        self._gpus: dict[str, Gpu] = {}
        self._seeds = itertools.count(0x1234_5678, 0x0101_0307)

    def gpu(self, name: str) -> Gpu:
        """Return a GPU."""
        if name not in self._gpus:
            self._gpus[name] = Gpu(name, self._ordinals[name], self._store)
        return self._gpus[name]

    def check_side_by_side(self) -> None:
        """Check that two kernels can run at the same time, each on a stream of its own.

        Raises:
            UnsupportedError: They might share a hardware queue, and one would wait for the other.
        """
        if self._queues < ENOUGH_QUEUES:
            raise UnsupportedError(
                f"CUDA_DEVICE_MAX_CONNECTIONS={self._queues} is too few for kernels side by side; "
                f"unset it, or set it to {ENOUGH_QUEUES} or more",
                reason="too few hardware queues",
            )

    def seed(self) -> int:
        """Return a seed that was not used before."""
        return next(self._seeds) & 0xFFFF_FFFF

    def connect(self, one: Gpu, other: Gpu) -> None:
        """Let a GPU address another's memory.

        Raises:
            UnsupportedError: CUDA says that it cannot; reason NO_PEER_ACCESS.
            CudaError: The driver refuses.
        """
        if one.device.index == other.device.index:
            return
        ends = [driver.call("cuDeviceGet", gpu.device.index) for gpu in (one, other)]
        if not driver.call("cuDeviceCanAccessPeer", *ends):
            raise UnsupportedError(
                f"cuDeviceCanAccessPeer says no: {one.device} to {other.device}; "
                "use transport='host_pinned'",
                reason=NO_PEER_ACCESS,
            )
        one.device.enable_peer_access(other.device.index)

    @contextmanager
    def memory(self) -> Iterator[Memory]:
        """Yield a source of memory; what it gave is taken back in the end."""
        with ExitStack() as stack:
            yield Memory(self, stack)


class Memory:
    """Gives memory; see Lab.memory."""

    def __init__(self, lab: Lab, stack: ExitStack) -> None:
        self._lab = lab
        self._stack = stack

    def of(self, place: str, nbytes: int, *users: Gpu) -> Region:
        """Return memory of a place, a GPU's name or `host`, that `users` can address.

        Raises:
            UnsupportedError, CudaError: A user cannot address the owner's memory.
        """
        if place == HOST:
            return self._stack.enter_context(of_host(nbytes, users))
        owner = self._lab.gpu(place)
        for user in users:
            self._lab.connect(user, owner)
        return self.unconnected(owner, nbytes, *users)

    def unconnected(self, owner: Gpu, nbytes: int, *users: Gpu) -> Region:
        """Return memory of a GPU without peer access, for copy engines."""
        return self._stack.enter_context(of_gpu(owner, nbytes, [owner, *users]))

    def near(self, gpu: Gpu, nbytes: int, cpus: tuple[int, ...]) -> Region:
        """Return pinned memory that some processors touched first."""
        return self._stack.enter_context(of_host(nbytes, [gpu], cpus))


def fill_by_owner(region: Region, seed: int) -> None:
    """Fill a region with a pattern, as its owner does it; waits."""
    if region.owner is None:
        assert region.view is not None
        region.view.view("uint32")[:] = pattern(seed, region.nbytes // 4)
        return
    region.owner.fill(region, seed)
    region.owner.synchronize()


def count_by_owner(region: Region, seed: int, stale: int) -> Counts:
    """Compare a region with a pattern, as its owner sees it; waits."""
    if region.owner is None:
        assert region.view is not None
        return count(region.view, seed, stale)
    return region.owner.count(region, seed, stale)


def zero_by_owner(region: Region) -> None:
    """Zero a region; waits."""
    if region.owner is None:
        assert region.view is not None
        region.view[:] = 0
        return
    region.owner.zero(region)

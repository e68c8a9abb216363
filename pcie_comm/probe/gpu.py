"""A GPU as a probe uses it: streams, launches of the probes' kernels, copies, times.

Everything happens on streams of its own, which wait for no other work of the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import driver
from ..kernels.collective import KernelKey
from ..kernels.launch import Arguments, LoadedKernel, load
from ..kernels.store import KernelStore
from ..transport.cuda_memory import CudaDevice
from .kernels import PROBES
from .pattern import Bytes, Counts
from .region import Region
from .sizes import COUNTS_NBYTES, MOST_BLOCKS, PACK_NBYTES

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class Gpu:
    """One GPU of this process.

    Args:
        name: In records.
        ordinal: Of CUDA in this process.
        store: Where kernels come from.

    Attributes:
        device: Its primary context, current within `current()`.
        stream: For work that is waited for at once.
        multiprocessors: Their number.
    """

    def __init__(self, name: str, ordinal: int, store: KernelStore) -> None:
        self.name = name
        self.device = CudaDevice.at(ordinal)
        self._store = store
        self._kernels: dict[KernelKey, LoadedKernel] = {}
        self._counts = 0
        major, minor, self.multiprocessors = (
            device_attribute(ordinal, attribute)
            for attribute in (
                "COMPUTE_CAPABILITY_MAJOR",
                "COMPUTE_CAPABILITY_MINOR",
                "MULTIPROCESSOR_COUNT",
            )
        )
        self._capability = (major, minor)
        self._lanes: list[Any] = []
        self.stream = self.lane(0)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU's context current meanwhile."""
        with self.device.current():
            yield

    def lane(self, index: int) -> Any:
        """Return one of the GPU's streams; the same for the same number.

        They stay few: two streams that share a hardware queue run one after the other, and a
        kernel that waits for one behind it in the queue waits in vain.
        """
        with self.current():
            while len(self._lanes) <= index:
                self._lanes.append(driver.call("cuStreamCreate", _NON_BLOCKING))
        return self._lanes[index]

    def synchronize(self, stream: Any = None) -> None:
        """Wait for a stream, by default the own one.

        Raises:
            CudaError: The work failed; this process's use of the GPU may have ended with it.
        """
        with self.current():
            driver.call("cuStreamSynchronize", self.stream if stream is None else stream)

    def prepare(self, key: KernelKey) -> LoadedKernel:
        """Return a kernel, loaded. A load during a launch could wait for it, so load first.

        Raises:
            CompileError: It is neither there nor can it be compiled.
        """
        if key not in self._kernels:
            compiled = self._store.get(PROBES[key.op], key, self._capability)
            with self.current():
                self._kernels[key] = load(compiled, self.device.handle)
        return self._kernels[key]

    def launch(
        self,
        key: KernelKey,
        addresses: Sequence[int],
        scalars: Sequence[int],
        *,
        grid: int = MOST_BLOCKS,
        stream: Any = None,
        rank: int = 0,
    ) -> None:
        """Enqueue a launch of a probe's kernel, by default on the own stream."""
        kernel = self.prepare(key)
        arguments = Arguments((0, rank, 2, 0, 0), addresses, scalars)
        place = self.stream if stream is None else stream
        size = (grid, 1, 1, kernel.block, 1, 1)
        with self.current():
            driver.call("cuLaunchKernel", kernel.function, *size, 0, place, arguments.address, 0)

    def fill(self, region: Region, seed: int, stream: Any = None) -> None:
        """Enqueue stores of a pattern to a region."""
        packs = region.nbytes // PACK_NBYTES
        self.launch(KernelKey("probe_fill"), [region.seen_by(self)], [packs, seed], stream=stream)

    def move(self, source: Region, target: Region, stream: Any = None) -> None:
        """Enqueue a copy of all of `source` by this GPU's multiprocessors."""
        addresses = [source.seen_by(self), target.seen_by(self)]
        packs = source.nbytes // PACK_NBYTES
        self.launch(KernelKey("probe_copy"), addresses, [packs], stream=stream)

    def count(self, region: Region, seed: int, stale: int) -> Counts:
        """Compare a region with a pattern as this GPU's kernels see it; waits."""
        with self.current():
            if not self._counts:
                self._counts = int(driver.call("cuMemAlloc", COUNTS_NBYTES))
            driver.call("cuMemsetD8Async", self._counts, 0xFF, COUNTS_NBYTES, self.stream)
        packs = region.nbytes // PACK_NBYTES
        addresses = [region.seen_by(self), self._counts]
        self.launch(KernelKey("probe_check"), addresses, [packs, seed, stale])
        found = self.read(self._counts, COUNTS_NBYTES).view(np.uint32).reshape(-1, 2)
        wrong, old = (int(total) for total in found.sum(axis=0, dtype=np.uint64))
        return Counts(4 * packs, wrong, old)

    def read(self, address: int, nbytes: int) -> Bytes:
        """Return bytes of this GPU's memory; waits for the own stream."""
        target = np.empty(nbytes, dtype=np.uint8)
        with self.current():
            place = target.ctypes.data
            driver.call("cuMemcpyDtoHAsync", place, address, nbytes, self.stream)
            driver.call("cuStreamSynchronize", self.stream)
        return target

    def write(self, address: int, data: Bytes) -> None:
        """Write bytes to this GPU's memory; waits for the own stream."""
        source = ctypes.create_string_buffer(data.tobytes(), len(data))
        with self.current():
            place = ctypes.addressof(source)
            driver.call("cuMemcpyHtoDAsync", address, place, len(data), self.stream)
            driver.call("cuStreamSynchronize", self.stream)

    def zero(self, region: Region) -> None:
        """Zero a region of its own; waits."""
        with self.current():
            driver.call("cuMemsetD8Async", region.seen_by(self), 0, region.nbytes, self.stream)
        self.synchronize()

    def copy(self, source: Region, target: Region, stream: Any = None) -> None:
        """Enqueue a copy of all of `source` by this GPU's copy engine."""
        place = self.stream if stream is None else stream
        nbytes = source.nbytes
        with self.current():
            if source.owner is None:
                address = target.seen_by(self)
                driver.call("cuMemcpyHtoDAsync", address, source.host_address, nbytes, place)
            elif target.owner is None:
                address = source.seen_by(self)
                driver.call("cuMemcpyDtoHAsync", target.host_address, address, nbytes, place)
            elif source.owner is target.owner:
                ends = (target.seen_by(self), source.seen_by(self))
                driver.call("cuMemcpyDtoDAsync", *ends, nbytes, place)
            else:
                to = (target.seen_by(self), target.owner.device.handle)
                origin = (source.seen_by(self), source.owner.device.handle)
                driver.call("cuMemcpyPeerAsync", *to, *origin, nbytes, place)

    def mark(self, stream: Any) -> Any:
        """Enqueue a mark on a stream and return it; see elapsed_ms."""
        with self.current():
            event = driver.call("cuEventCreate", 0)
            driver.call("cuEventRecord", event, stream)
        return event

    def elapsed_ms(self, first: Any, last: Any) -> float:
        """Return the milliseconds between two marks that have been passed, and drop them."""
        with self.current():
            elapsed = float(driver.call("cuEventElapsedTime", first, last))
            for event in (first, last):
                driver.call("cuEventDestroy", event)
        return elapsed


def device_attribute(ordinal: int, name: str) -> int:
    """Return an attribute of a device by the end of its name."""
    attribute = getattr(driver.bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(driver.call("cuDeviceGetAttribute", attribute, driver.call("cuDeviceGet", ordinal)))

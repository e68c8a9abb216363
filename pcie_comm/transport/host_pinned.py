"""Slabs in POSIX shared memory that the GPUs of all ranks address: for hosts without P2P.

Every rank maps and registers every file for itself, also where several ranks share a process. A
kernel then reaches each slab over its own device's PCIe link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import driver
from .base import PeerMap, SlabRecord, TransportInfo
from .cuda_memory import CudaDevice
from .host_shm import HostShmTransport
from .shared_memory import SharedMemoryFile

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_DEVICEMAP = 2  # CU_MEMHOSTREGISTER_DEVICEMAP


class HostPinnedTransport(HostShmTransport):
    """Shared memory as in host_shm, registered with CUDA while it is mapped."""

    name = "host_pinned"

    def __init__(self, info: TransportInfo) -> None:
        super().__init__(info)
        self._device: CudaDevice | None = None
        self._registered: list[int] = []

    def _create(self, nbytes: int, header: bytes) -> Mapping[str, str | int]:
        self._device = CudaDevice.open(self.info, self.name)
        return super()._create(nbytes, header)

    def _attach(self, records: Sequence[SlabRecord]) -> PeerMap:
        files = self._open_files(records)
        addresses = tuple(self._register(file) for file in files)
        return PeerMap(addresses, tuple(file.view for file in files))

    def _register(self, file: SharedMemoryFile) -> int:
        """Pin a mapping and return its address on this rank's device."""
        assert self._device is not None  # _create opened it
        with self._device.current():
            driver.call(
                "cuMemHostRegister", file.address, file.mapped_nbytes, _PORTABLE | _DEVICEMAP
            )
            self._registered.append(file.address)
            return int(driver.call("cuMemHostGetDevicePointer", file.address, 0))

    def _detach(self) -> None:
        if self._registered:
            assert self._device is not None
            with self._device.current():
                while self._registered:  # a mapping that cannot be unregistered stays mapped
                    driver.call("cuMemHostUnregister", self._registered[-1])
                    self._registered.pop()
        super()._detach()

    def _memory(self) -> str:
        return "POSIX shared memory pinned by every rank"

    def describe(self) -> dict[str, object]:
        """Return facts for people."""
        return {**super().describe(), **({"device": str(self._device)} if self._device else {})}

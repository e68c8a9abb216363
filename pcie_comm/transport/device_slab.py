"""A slab of our own in device memory: what cuda_local and cuda_ipc have in common."""

from __future__ import annotations

from .base import TransportInfo
from .cuda_memory import CudaDevice
from .slab import SlabTransport


class DeviceSlabTransport(SlabTransport):
    """Owns one allocation on the rank's device. How peers reach it is the subclass's."""

    def __init__(self, info: TransportInfo) -> None:
        super().__init__(info)
        self._device: CudaDevice | None = None
        self._address = 0

    def _allocate(self, nbytes: int, header: bytes) -> CudaDevice:
        """Allocate the slab on the rank's device, and return the device."""
        self._device = CudaDevice.open(self.info, self.name)
        self._address = self._device.allocate(nbytes, header)
        return self._device

    def _destroy(self) -> None:
        if self._address:
            assert self._device is not None
            self._device.free(self._address)
            self._address = 0

    def describe(self) -> dict[str, object]:
        """Return facts for people."""
        return {**super().describe(), **({"device": str(self._device)} if self._device else {})}

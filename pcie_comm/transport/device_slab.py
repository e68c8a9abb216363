"""A slab of our own in device memory: what cuda_local and cuda_ipc have in common."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..layout import SlabLayout
from .base import SlabRecord, TransportInfo
from .cuda_memory import CudaDevice
from .identity import REMEDY
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

    def _greet(self, address: int, record: SlabRecord, peer: int) -> None:
        """Check a rank's slab as this device reads it, and leave a mark there for its owner.

        Raises:
            InvalidArgumentError: There is no slab, another one, or reads do not arrive.
        """
        assert self._device is not None
        self._device.check_slab(address, record, peer)
        if peer != self.info.rank:
            place = SlabLayout.MARKS_OFFSET + self.info.rank * SlabLayout.MARK_NBYTES
            self._device.write(address + place, _mark(record, self.info.rank))

    def seal(self) -> None:
        """Check that every peer's mark has arrived. See Transport."""
        if self._device is None or self._record is None:
            return
        width = SlabLayout.MARK_NBYTES
        marks = self._device.read(
            self._address + SlabLayout.MARKS_OFFSET, width * self.info.world_size
        )
        for peer in range(self.info.world_size):
            found = marks[peer * width : (peer + 1) * width]
            if peer != self.info.rank and found != _mark(self._record, peer):
                raise UnsupportedError(
                    f"what rank {peer} wrote to the memory of {self._device} did not arrive "
                    f"(found={found.hex()}), though it may address it; {REMEDY}",
                    reason="writes of a peer do not arrive",
                    rank=self.info.rank,
                    peer=peer,
                )

    def _destroy(self) -> None:
        if self._address:
            assert self._device is not None
            self._device.free(self._address)
            self._address = 0

    def describe(self) -> dict[str, object]:
        """Return facts for people."""
        return {**super().describe(), **({"device": str(self._device)} if self._device else {})}


def _mark(record: SlabRecord, writer: int) -> bytes:
    """Return what a peer writes to a slab while it maps it; never zeros."""
    return bytes([writer + 1]) + bytes.fromhex(record.nonce)[: SlabLayout.MARK_NBYTES - 1]

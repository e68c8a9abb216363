"""Memory of one CUDA device, whichever context the caller has current."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from .. import driver
from ..errors import CudaError, InvalidArgumentError, UnsupportedError
from .base import SlabRecord, TransportInfo
from .identity import HEADER_NBYTES, check_header

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


@dataclass(frozen=True)
class CudaDevice:
    """A device with its primary context, the one that torch and the CUDA runtime use.

    The context is retained and never released: modules and memory of others in this process live
    in it, and the last release would destroy them.

    Attributes:
        index: CUDA ordinal in this process.
        uuid: 32 hex digits, the same in every process.
    """

    index: int
    uuid: str
    _context: Any = field(repr=False)

    @classmethod
    def open(cls, info: TransportInfo, transport: str) -> CudaDevice:
        """Return the device of a rank.

        Raises:
            InvalidArgumentError: The rank has none.
            UnsupportedError: This machine has no CUDA driver.
            CudaError: The device cannot be used.
        """
        if info.device_index is None:
            raise InvalidArgumentError(
                f"transport={transport!r} needs a CUDA device; give device='cuda:N', "
                "or use transport='host_shm'",
                rank=info.rank,
            )
        return cls.at(info.device_index)

    @classmethod
    def at(cls, index: int) -> CudaDevice:
        """Return the device with this ordinal."""
        context = driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", index))
        return cls(index, driver.device_uuid(index), context)

    def __str__(self) -> str:
        return f"cuda:{self.index} uuid={dashed(self.uuid)}"

    @property
    def handle(self) -> int:
        """The context's handle."""
        return int(self._context)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this device current in this thread, and whatever was before afterwards."""
        driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            driver.call("cuCtxPopCurrent")

    def allocate(self, nbytes: int, header: bytes) -> int:
        """Allocate zeroed memory that starts with `header`; return its address.

        All of it has happened on the device when this returns. The work goes to a stream of its
        own, so that it neither waits for nor holds up launches of others.
        """
        source = ctypes.create_string_buffer(header, len(header))
        with self.current():
            address = int(driver.call("cuMemAlloc", nbytes))
            try:
                with _private_stream() as stream:
                    driver.call("cuMemsetD8Async", address, 0, nbytes, stream)
                    start = ctypes.addressof(source)
                    driver.call("cuMemcpyHtoDAsync", address, start, len(header), stream)
            except BaseException:
                with suppress(CudaError):  # the first error counts
                    driver.call("cuMemFree", address)
                raise
        return address

    def free(self, address: int) -> None:
        """Free what `allocate` returned. Waits for the device's running work.

        Wipes the header first: the driver keeps freed memory mapped as long as it shares a block
        with other allocations, and a stale record must not find its nonce there.
        """
        with self.current():
            with _private_stream() as stream:
                driver.call("cuMemsetD8Async", address, 0, HEADER_NBYTES, stream)
            driver.call("cuMemFree", address)

    def check_slab(self, address: int, record: SlabRecord, peer: int) -> None:
        """Read what an address starts with, as this device sees it, and check it.

        Raises:
            InvalidArgumentError: There is no slab, or another one.
            CudaError: The device cannot read there.
        """
        try:
            header = self.read(address, HEADER_NBYTES)
        except CudaError as error:
            if error.name != "CUDA_ERROR_INVALID_VALUE":
                raise
            raise InvalidArgumentError(
                f"the record of rank {peer} points to no memory (address={address:#x}): "
                "it is stale; exchange the records again",
                peer=peer,
            ) from error
        check_header(header, record, peer)

    def read(self, address: int, nbytes: int) -> bytes:
        """Return bytes of any memory that this device can address, by its own copy engine."""
        target = ctypes.create_string_buffer(nbytes)
        with self.current(), _private_stream() as stream:
            start = ctypes.addressof(target)
            driver.call("cuMemcpyDtoHAsync", start, address, nbytes, stream)
        return target.raw

    def write(self, address: int, data: bytes) -> None:
        """Write to any memory that this device can address, by its own copy engine."""
        source = ctypes.create_string_buffer(data, len(data))
        with self.current(), _private_stream() as stream:
            start = ctypes.addressof(source)
            driver.call("cuMemcpyHtoDAsync", address, start, len(data), stream)

    def check_peer_access(self, peer_uuid: str, peer: int) -> int:
        """Return the ordinal of rank `peer`'s device, which this one can address.

        Devices are matched by UUID: ordinals differ between processes (CUDA_VISIBLE_DEVICES).

        Raises:
            UnsupportedError: It is not visible here, or out of reach; names both devices.
        """
        if peer_uuid == self.uuid:
            return self.index
        devices = f"device of rank {peer} uuid={dashed(peer_uuid)}, device here {self}"
        visible = [i for i in range(driver.device_count()) if driver.device_uuid(i) == peer_uuid]
        if not visible:
            raise UnsupportedError(
                f"the device of a peer is not visible to this process: {devices}; make all devices "
                "of the group visible to every rank (CUDA_VISIBLE_DEVICES, container), "
                "or use transport='host_pinned'",
                reason="peer device is not visible",
                peer=peer,
            )
        own, other = (driver.call("cuDeviceGet", i) for i in (self.index, visible[0]))
        if not driver.call("cuDeviceCanAccessPeer", own, other):
            raise UnsupportedError(
                f"two devices cannot address each other: {devices}; use transport='host_pinned'",
                reason="no peer access between the devices",
                peer=peer,
            )
        return visible[0]

    def enable_peer_access(self, index: int) -> None:
        """Let this device's context address device `index`'s, in this process."""
        if index == self.index:
            return
        peer_context = CudaDevice.at(index)._context
        try:
            with self.current():
                driver.call("cuCtxEnablePeerAccess", peer_context, 0)
        except CudaError as error:
            if error.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                raise


@contextmanager
def _private_stream() -> Iterator[Any]:
    """Yield a stream in the current context; its work is done when the block ends well."""
    stream = driver.call("cuStreamCreate", _NON_BLOCKING)
    try:
        yield stream
        driver.call("cuStreamSynchronize", stream)
    finally:
        driver.call("cuStreamDestroy", stream)


def dashed(device_uuid: str) -> str:
    """Return a UUID as tools print it."""
    try:
        return str(uuid.UUID(hex=device_uuid))
    except ValueError:
        return device_uuid

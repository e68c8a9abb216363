"""Slabs in device memory of ranks that are processes of one host, by CUDA IPC.

Only slabs of our own are exported, each a cuMemAlloc allocation: memory of a caching allocator or
a virtual mapping (expandable segments) cannot be exported in general. The driver may still place a
small allocation inside a larger one, and a handle always names the larger one from its start, so
the record says how far into it the slab begins.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from .. import driver
from ..errors import CudaError, InvalidArgumentError, UnsupportedError
from .base import PeerMap, SlabRecord, TransportInfo
from .cuda_memory import dashed
from .device_slab import DeviceSlabTransport
from .identity import check_same_host, count_fact, process_facts, process_token, text_fact

_HANDLE_NBYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class CudaIpcTransport(DeviceSlabTransport):
    """Each rank opens its peers' handles in its own device's context."""

    name = "cuda_ipc"

    def __init__(self, info: TransportInfo) -> None:
        super().__init__(info)
        self._opened: list[int] = []

    def _create(self, nbytes: int, header: bytes) -> Mapping[str, str | int]:
        device = self._allocate(nbytes, header)
        with device.current():
            base, length = driver.call("cuMemGetAddressRange", self._address)
            handle = driver.call("cuIpcGetMemHandle", self._address)
        return {
            "handle": ctypes.string_at(handle.getPtr(), _HANDLE_NBYTES).hex(),
            "offset": self._address - int(base),
            "allocation_nbytes": int(length),
            "uuid": device.uuid,
            **process_facts(),
        }

    def _attach(self, records: Sequence[SlabRecord]) -> PeerMap:
        assert self._device is not None  # SlabTransport.map requires a record
        addresses = []
        for peer, record in enumerate(records):
            address = self._address
            if peer != self.info.rank:
                self._check_reachable(record, peer)
                address = self._open(record, peer)
            self._greet(address, record, peer)
            addresses.append(address)
        return PeerMap(tuple(addresses))

    def _check_reachable(self, record: SlabRecord, peer: int) -> None:
        assert self._device is not None
        check_same_host(record, peer)
        if text_fact(record, "process", peer) == process_token():
            raise UnsupportedError(
                f"rank {peer} lives in this process (pid={record.facts.get('pid')}), and CUDA does "
                "not open handles of its own process; use transport='cuda_local'",
                reason="peer is in the same process",
                rank=self.info.rank,
                peer=peer,
            )
        self._device.check_peer_access(text_fact(record, "uuid", peer), peer)

    def _open(self, record: SlabRecord, peer: int) -> int:
        """Open a peer's handle and return the address of its slab."""
        assert self._device is not None
        offset = count_fact(record, "offset", peer)
        allocation = count_fact(record, "allocation_nbytes", peer)
        handle = _read_handle(record, peer)
        if offset + record.nbytes > allocation:
            raise InvalidArgumentError(
                f"the slab of rank {peer} leaves its allocation (offset={offset}, "
                f"nbytes={record.nbytes}, allocation_nbytes={allocation}); its record is malformed",
                peer=peer,
            )
        try:
            with self._device.current():
                base = int(driver.call("cuIpcOpenMemHandle", handle, _LAZY_ENABLE_PEER_ACCESS))
        except CudaError as error:
            raise CudaError(
                f"cannot open the slab of rank {peer}: {error}; device of rank {peer} "
                f"uuid={dashed(text_fact(record, 'uuid', peer))}, device here {self._device}. "
                "Is the peer alive, do both containers share IPC and PID namespaces, do ACS and "
                "IOMMU allow peer access? Otherwise use transport='host_pinned'",
                name=error.name,
                call=error.call,
                rank=self.info.rank,
                peer=peer,
            ) from error
        self._opened.append(base)
        return base + offset

    def _detach(self) -> None:
        if not self._opened:
            return
        assert self._device is not None
        with self._device.current():
            while self._opened:  # what cannot be closed stays noted, and unmap() can try again
                driver.call("cuIpcCloseMemHandle", self._opened[-1])
                self._opened.pop()

    def _memory(self) -> str:
        return "device memory of the peers, CUDA IPC"


def _read_handle(record: SlabRecord, peer: int) -> Any:
    try:
        data = bytes.fromhex(text_fact(record, "handle", peer))
        if len(data) != _HANDLE_NBYTES:
            raise ValueError(f"handle of nbytes={len(data)}")
    except ValueError as error:
        raise InvalidArgumentError(
            f"the slab record of rank {peer} is malformed ({error}); "
            "do all ranks run the same version of pcie_comm?",
            peer=peer,
        ) from error
    handle = driver.bindings().CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), data, _HANDLE_NBYTES)
    return handle

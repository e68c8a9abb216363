"""Slabs in device memory of ranks that are threads of one process, on one device or on peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import UnsupportedError
from .base import PeerMap, SlabRecord
from .device_slab import DeviceSlabTransport
from .identity import count_fact, process_facts, process_token, text_fact


class CudaLocalTransport(DeviceSlabTransport):
    """Addresses are valid throughout the process; devices only need access to each other."""

    name = "cuda_local"

    def _create(self, nbytes: int, header: bytes) -> Mapping[str, str | int]:
        device = self._allocate(nbytes, header)
        return {"address": self._address, "uuid": device.uuid, **process_facts()}

    def _attach(self, records: Sequence[SlabRecord]) -> PeerMap:
        assert self._device is not None  # SlabTransport.map requires a record
        addresses = []
        for peer, record in enumerate(records):
            self._check_process(record, peer)
            index = self._device.check_peer_access(text_fact(record, "uuid", peer), peer)
            self._device.enable_peer_access(index)
            addresses.append(count_fact(record, "address", peer))
            self._greet(addresses[-1], record, peer)
        return PeerMap(tuple(addresses))

    def _check_process(self, record: SlabRecord, peer: int) -> None:
        if text_fact(record, "process", peer) != process_token():
            raise UnsupportedError(
                f"rank {peer} lives in another process (pid={record.facts.get('pid')}, here "
                f"pid={process_facts()['pid']}); use transport='cuda_ipc' between processes",
                reason="peer is in another process",
                rank=self.info.rank,
                peer=peer,
            )

    def _detach(self) -> None:
        """Nothing to undo: peer access belongs to the process, and others may rely on it."""

    def _memory(self) -> str:
        return "device memory of one process"

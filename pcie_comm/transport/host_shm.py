"""Slabs in POSIX shared memory that no GPU addresses. Ranks are processes, threads, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .base import PeerMap, SlabRecord, TransportInfo
from .identity import HEADER_NBYTES, check_header, check_same_host, process_facts, text_fact
from .shared_memory import SharedMemoryFile
from .slab import SlabTransport


class HostShmTransport(SlabTransport):
    """Each rank maps every rank's file for itself, also where two ranks share a process."""

    name = "host_shm"
    mappings_keep_memory = True

    def __init__(self, info: TransportInfo) -> None:
        super().__init__(info)
        self._own: SharedMemoryFile | None = None
        self._peers: dict[int, SharedMemoryFile] = {}

    def _create(self, nbytes: int, header: bytes) -> Mapping[str, str | int]:
        self._own = SharedMemoryFile.create(nbytes)
        self._own.view[: len(header)] = header
        return {"name": self._own.name, **process_facts()}

    def _attach(self, records: Sequence[SlabRecord]) -> PeerMap:
        files = self._open_files(records)
        return PeerMap((0,) * len(files), tuple(file.view for file in files))

    def _open_files(self, records: Sequence[SlabRecord]) -> list[SharedMemoryFile]:
        """Map every rank's file, in rank order, and check what it starts with."""
        assert self._own is not None  # SlabTransport.map requires a record
        files = []
        for peer, record in enumerate(records):
            file = self._own
            if peer != self.info.rank:
                check_same_host(record, peer)
                file = SharedMemoryFile.attach(text_fact(record, "name", peer), record.nbytes, peer)
                self._peers[peer] = file
            check_header(bytes(file.view[:HEADER_NBYTES]), record, peer)
            files.append(file)
        return files

    def seal(self) -> None:
        """Remove the own file's name: every peer has mapped it."""
        if self._own is not None:
            self._own.unlink()

    def _detach(self) -> None:
        while self._peers:
            self._peers.popitem()[1].close()

    def _destroy(self) -> None:
        if self._own is not None:
            self._own.unlink()
            self._own.close()
            self._own = None

    def _memory(self) -> str:
        return "POSIX shared memory"

"""One rank's side of a transport under test: real or fake driver, thread or process."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable

from leaks import own_files, own_mappings

from pcie_comm import driver
from pcie_comm.bootstrap import Bootstrap, open_bootstrap
from pcie_comm.transport import load
from pcie_comm.transport.base import PeerMap, Transport, TransportInfo
from pcie_comm.transport.cuda_memory import CudaDevice

NBYTES = 20_000
TIMEOUT_S = 20.0


def edited(record: bytes, **changes: object) -> bytes:
    """Return a record with other fields, or other facts where a field of that name is none."""
    raw = json.loads(record)
    for name, value in changes.items():
        target = raw if name in raw else raw["facts"]
        target[name] = value
    return json.dumps(raw).encode()


class Side:
    """A rank, its transport and its way to talk to the other ranks."""

    def __init__(self, name: str, bootstrap: Bootstrap, device_index: int | None) -> None:
        self.name = name
        self.rank = bootstrap.rank
        self.world_size = bootstrap.world_size
        self.device_index = device_index
        self._bootstrap = bootstrap

    def make(self) -> Transport:
        info = TransportInfo(self.rank, self.world_size, self.device_index)
        return load(self.name)(info)

    def exchange(self, payload: bytes = b"") -> list[bytes]:
        return self._bootstrap.all_gather(payload, TIMEOUT_S)

    def mapped(self) -> tuple[Transport, list[bytes], PeerMap]:
        """Allocate, exchange, map, and wait until all have."""
        transport = self.make()
        records = self.exchange(transport.allocate(NBYTES))
        peers = transport.map(records)
        self.exchange()
        transport.seal()
        return transport, records, peers

    def release(self, transport: Transport) -> None:
        transport.unmap()
        self.exchange()
        transport.free()

    def write(self, peers: PeerMap, target: int, offset: int, data: bytes) -> None:
        """Write to a slab as a kernel of this rank would, or as its host would."""
        if self.device_index is None:
            peers.views[target][offset : offset + len(data)] = data
            return
        source = ctypes.create_string_buffer(data, len(data))
        start = ctypes.addressof(source)
        with CudaDevice.at(self.device_index).current():
            driver.call("cuMemcpyHtoD", peers.addresses[target] + offset, start, len(data))
            driver.call("cuStreamSynchronize", 0)  # few bytes may be on their way still

    def read(self, peers: PeerMap, target: int, offset: int, nbytes: int) -> bytes:
        """Read from a slab: through the host's view where there is one."""
        if peers.views:
            return bytes(peers.views[target][offset : offset + nbytes])
        buffer = ctypes.create_string_buffer(nbytes)
        assert self.device_index is not None
        with CudaDevice.at(self.device_index).current():
            start = ctypes.addressof(buffer)
            driver.call("cuMemcpyDtoH", start, peers.addresses[target] + offset, nbytes)
        return buffer.raw


Check = Callable[[Side], None]


def in_process(rank: int, world_size: int, name: str, checks: tuple[Check, ...]) -> None:
    """Run checks as one process of several; CUDA ranks all use device 0."""
    bootstrap = open_bootstrap(world_size)
    side = Side(name, bootstrap, None if name == "host_shm" else 0)
    for check in checks:
        check(side)
        side.exchange()
    assert own_files() == []
    assert own_mappings() == []
    bootstrap.close()

"""GPUs that exist only here: the part of the driver API that probes use.

Work runs when it is launched; a kernel that plays with a peer runs when both are there. Ways
between GPUs can be bad (`faults`): what an actor does to another's memory is dropped, kept in a
mirror that only the actor sees, spoilt, late, or refused.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_kernels import HOST, Kernels

from pcie_comm.kernels.compile import CompiledKernel
from pcie_comm.probe.sizes import MOST_BLOCKS

Result = tuple[Any, ...]


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704


OK: Result = (Status.CUDA_SUCCESS,)
KERNELS = {
    "probe_fill": (1, 2),
    "probe_check": (2, 3),
    "probe_copy": (2, 1),
    "probe_chase": (2, 1),
    "probe_ping_pong": (3, 2),
    "probe_exchange-pull": (3, 4),
    "probe_exchange-push": (3, 4),
    "probe_exchange-tagged": (3, 4),
}
"""Addresses and scalars of each."""

NAMES = list(KERNELS)


class FakeStore:
    """Has every kernel, as its name."""

    def get(self, collective: Any, key: Any, capability: tuple[int, int]) -> CompiledKernel:
        name = str(key)
        return CompiledKernel(name, "sm_90a", name, collective.block, "", "", name.encode())


class Denied(Exception):
    """A kernel touched what it must not."""


class FakeDriver(Kernels):
    """Stands in for the module `cuda.bindings.driver`.

    Args:
        gpus: How many.
        faults: What is wrong with the way from an actor to an owner, by their numbers or HOST:
            `drop`, `mirror`, `spoil`, `stale`, `deny`, `break`, `hang`.
    """

    CUfunction = int
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="units",
    )
    CUdevice_P2PAttribute = SimpleNamespace(
        CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK="rank",
        CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED="atomics",
    )

    def __init__(self, gpus: int = 1, faults: dict[tuple[Any, Any], str] | None = None) -> None:
        self.count = gpus
        self.faults = dict(faults or {})
        self.memory: dict[int, tuple[int, np.ndarray]] = {}
        self.registered: dict[int, int] = {}
        self.mirrors: dict[tuple[int, int], np.ndarray] = {}
        self.seen_first: dict[tuple[int, int, int], np.ndarray] = {}
        self.access: set[tuple[int, int]] = set()
        self._threads = threading.local()
        self.waiting: list[tuple[int, int, str, list[int], list[int], int]] = []
        self.error = Status.CUDA_SUCCESS
        self.launches: list[str] = []
        self._addresses = itertools.count(0x7F00_0000_0000, 1 << 28)
        self._handles = itertools.count(1)

    @property
    def contexts(self) -> list[int]:
        """The calling thread's context stack."""
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        stack: list[int] = self._threads.stack
        return stack

    # ---- memory as actors see it

    def find(self, address: int) -> tuple[Any, np.ndarray]:
        """Return owner and memory from an address on."""
        for base, (owner, data) in self.memory.items():
            if base <= address < base + len(data):
                return owner, data[address - base :]
        for base, nbytes in self.registered.items():
            if base <= address < base + nbytes:
                kind = ctypes.c_ubyte * (base + nbytes - address)
                return HOST, np.frombuffer(kind.from_address(address), dtype=np.uint8)
        raise Denied(f"{address:#x} is nowhere")

    def fault(self, actor: int, owner: Any) -> str:
        if owner not in (actor, HOST) and (actor, owner) not in self.access:
            raise Denied(f"{actor} has no access to {owner}")
        found = self.faults.get((actor, owner), "")
        if found == "break":
            raise Denied(f"{actor} to {owner}")
        return found

    def load(self, actor: int, address: int, nbytes: int, checked: bool = True) -> np.ndarray:
        owner, data = self.find(address)
        fault = self.fault(actor, owner) if checked else ""
        if fault == "mirror" and (actor, address) in self.mirrors:
            return self.mirrors[actor, address][:nbytes].copy()
        if fault == "stale":
            return self.seen_first.setdefault((actor, address, nbytes), data[:nbytes].copy())
        return data[:nbytes].copy()

    def store(self, actor: int, address: int, data: np.ndarray, checked: bool = True) -> None:
        owner, target = self.find(address)
        fault = self.fault(actor, owner) if checked else ""
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if fault == "drop":
            return
        if fault == "mirror":
            self.mirrors[actor, address] = data.copy()
            return
        if fault == "spoil":
            data = data.copy()
            data[-3] ^= 0x10
        target[: len(data)] = data

    # ---- errors, devices, contexts

    def cuGetErrorName(self, error: Status) -> Result:
        return (*OK, Status(error).name.encode())

    def cuGetErrorString(self, error: Status) -> Result:
        return (*OK, b"as modelled")

    def cuDeviceGetCount(self) -> Result:
        return (*OK, self.count)

    def cuDeviceGet(self, ordinal: int) -> Result:
        return (*OK, ordinal)

    def cuDeviceGetUuid(self, dev: int) -> Result:
        digits = f"{dev:08x}111122223333{dev:012x}"
        return (*OK, SimpleNamespace(bytes=bytes.fromhex(digits)))

    def cuDeviceGetPCIBusId(self, length: int, dev: int) -> Result:
        return (*OK, f"0000:{dev + 0x40:02x}:00.0".encode().ljust(length, b"\0"))

    def cuDeviceGetName(self, length: int, dev: int) -> Result:
        return (*OK, b"Fake GPU".ljust(length, b"\0"))

    def cuDeviceGetAttribute(self, attrib: str, dev: int) -> Result:
        return (*OK, {"major": 9, "minor": 0, "units": 132}[attrib])

    def cuDeviceCanAccessPeer(self, dev: int, peerDev: int) -> Result:
        return (*OK, int(self.faults.get((dev, peerDev)) != "deny"))

    def cuDeviceGetP2PAttribute(self, attrib: str, srcDevice: int, dstDevice: int) -> Result:
        if attrib == "rank" and self.faults.get((srcDevice, dstDevice)) == "deny":
            return Status.CUDA_ERROR_INVALID_VALUE, None
        return (*OK, {"rank": abs(srcDevice - dstDevice) - 1, "atomics": 0}[attrib])

    def cuDevicePrimaryCtxRetain(self, dev: int) -> Result:
        return (*OK, dev)

    def cuCtxPushCurrent(self, ctx: int) -> Result:
        self.contexts.append(ctx)
        return OK

    def cuCtxPopCurrent(self) -> Result:
        return (*OK, self.contexts.pop())

    def cuCtxEnablePeerAccess(self, peerContext: int, Flags: int) -> Result:
        pair = (self.contexts[-1], peerContext)
        if pair in self.access:
            return (Status.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,)
        self.access.add(pair)
        return OK

    # ---- memory

    def cuMemAlloc(self, bytesize: int) -> Result:
        if not self.contexts:
            return Status.CUDA_ERROR_INVALID_CONTEXT, None
        address = next(self._addresses)
        self.memory[address] = (self.contexts[-1], np.full(bytesize, 0xAA, dtype=np.uint8))
        return (*OK, address)

    def cuMemFree(self, dptr: int) -> Result:
        return OK if self.memory.pop(dptr, None) else (Status.CUDA_ERROR_INVALID_VALUE,)

    class CUipcMemHandle:
        def __init__(self) -> None:
            self.bytes = ctypes.create_string_buffer(64)

        def getPtr(self) -> int:
            return ctypes.addressof(self.bytes)

    def cuMemGetAddressRange(self, dptr: int) -> Result:
        return (*OK, dptr, len(self.memory[dptr][1]))

    def cuIpcGetMemHandle(self, dptr: int) -> Result:
        handle = self.CUipcMemHandle()
        handle.bytes.raw = dptr.to_bytes(8, "little").ljust(64, b"\0")
        return (*OK, handle)

    def cuIpcOpenMemHandle(self, handle: CUipcMemHandle, Flags: int) -> Result:
        address = int.from_bytes(handle.bytes.raw[:8], "little")
        owner, _ = self.memory[address]
        if self.faults.get((self.contexts[-1], owner)) == "closed":
            return Status.CUDA_ERROR_INVALID_CONTEXT, None
        self.access.add((self.contexts[-1], owner))
        return (*OK, address)

    def cuIpcCloseMemHandle(self, dptr: int) -> Result:
        return OK

    def cuMemHostRegister(self, p: int, bytesize: int, Flags: int) -> Result:
        if not self.contexts or Flags != 3:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        self.registered[p] = bytesize
        return OK

    def cuMemHostUnregister(self, p: int) -> Result:
        return OK if self.registered.pop(p, 0) else (Status.CUDA_ERROR_INVALID_VALUE,)

    def cuMemHostGetDevicePointer(self, p: int, Flags: int) -> Result:
        return (*OK, p) if p in self.registered else (Status.CUDA_ERROR_INVALID_VALUE, None)

    def cuMemsetD8Async(self, dstDevice: int, uc: int, N: int, hStream: Any) -> Result:
        self.find(dstDevice)[1][:N] = uc
        return OK

    def cuMemcpyDtoHAsync(
        self, dstHost: int, srcDevice: int, ByteCount: int, hStream: Any
    ) -> Result:
        data = self.find(srcDevice)[1][:ByteCount]
        if self.faults.get((hStream[0], HOST)) != "drop" or dstHost not in self.registered:
            ctypes.memmove(dstHost, data.tobytes(), ByteCount)
        return OK

    def cuMemcpyHtoDAsync(
        self, dstDevice: int, srcHost: int, ByteCount: int, hStream: Any
    ) -> Result:
        data = np.frombuffer(ctypes.string_at(srcHost, ByteCount), dtype=np.uint8)
        self.find(dstDevice)[1][:ByteCount] = data
        return OK

    def cuMemcpyDtoDAsync(
        self, dstDevice: int, srcDevice: int, ByteCount: int, hStream: Any
    ) -> Result:
        self.find(dstDevice)[1][:ByteCount] = self.find(srcDevice)[1][:ByteCount]
        return OK

    def cuMemcpyPeerAsync(
        self,
        dstDevice: int,
        dstContext: int,
        srcDevice: int,
        srcContext: int,
        ByteCount: int,
        hStream: Any,
    ) -> Result:
        actor = hStream[0]
        assert self.find(dstDevice)[0] == dstContext and self.find(srcDevice)[0] == srcContext
        other = dstContext if actor == srcContext else srcContext
        staged = (actor, other) not in self.access
        try:
            data = self.load(actor, srcDevice, ByteCount, not staged)
            self.store(actor, dstDevice, data, not staged)
        except Denied:
            self.error = Status.CUDA_ERROR_ILLEGAL_ADDRESS
        return OK

    # ---- streams, events, kernels

    def cuStreamCreate(self, Flags: int) -> Result:
        assert Flags == 1
        return (*OK, (self.contexts[-1], next(self._handles)))

    def cuStreamSynchronize(self, hStream: Any) -> Result:
        assert not any(entry[1] == hStream[1] for entry in self.waiting), "a player plays alone"
        return (self.error,)

    def cuStreamDestroy(self, hStream: Any) -> Result:
        return OK

    def cuStreamQuery(self, hStream: Any) -> Result:
        return (Status.CUDA_ERROR_NOT_READY,)

    def cuEventCreate(self, Flags: int) -> Result:
        return (*OK, next(self._handles))

    def cuEventRecord(self, hEvent: int, hStream: Any) -> Result:
        return OK

    def cuEventElapsedTime(self, hStart: int, hEnd: int) -> Result:
        return (*OK, 1.0)

    def cuEventDestroy(self, hEvent: int) -> Result:
        return OK

    def cuLibraryLoadData(self, code: bytes, *rest: Any) -> Result:
        return (*OK, code.decode())

    def cuLibraryGetKernel(self, library: str, name: bytes) -> Result:
        assert library == name.decode()
        return (*OK, NAMES.index(library))

    def cuKernelGetFunction(self, kernel: int) -> Result:
        return (*OK, kernel) if self.contexts else (Status.CUDA_ERROR_INVALID_CONTEXT, None)

    def cuLaunchKernel(self, f: int, *rest: Any) -> Result:
        gridDimX, *others, hStream, kernelParams, extra = rest
        name = NAMES[f]
        assert self.contexts[-1] == hStream[0], "the stream's context must be current"
        assert [*others[:2], *others[3:], extra] == [1, 1, 1, 1, 0, 0]
        assert gridDimX <= MOST_BLOCKS
        self.launches.append(name)
        rank, addresses, scalars = _arguments(kernelParams, *KERNELS[name])
        try:
            if "exchange" in name or "ping" in name:
                self.waiting.append((rank, hStream[1], name, addresses, scalars, gridDimX))
                self.waiting[-1] += (hStream[0],)
                if len(self.waiting) == 2:
                    self._play()
            else:
                getattr(self, name)(hStream[0], addresses, scalars, gridDimX)
        except Denied:
            self.waiting.clear()
            self.error = Status.CUDA_ERROR_ILLEGAL_ADDRESS
        return OK


def _arguments(where: int, addresses: int, scalars: int) -> tuple[int, list[int], list[int]]:
    """Return rank, addresses and scalars of a launch."""
    pointers = (ctypes.c_void_p * (4 + addresses + scalars)).from_address(where)
    control, rank, world_size, _ = (
        kind.from_address(pointer).value
        for kind, pointer in zip(
            (ctypes.c_uint64, ctypes.c_int32, ctypes.c_int32, ctypes.c_uint32),
            pointers,
            strict=False,
        )
    )
    assert (control, world_size) == (0, 2)
    values = [ctypes.c_int64.from_address(pointer).value for pointer in pointers[4:]]
    return rank, values[:addresses], values[addresses:]

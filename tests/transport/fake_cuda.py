"""A host of GPUs that exists only here, for the part of the CUDA driver API that transports use.

Threads take the place of processes: each says whose it is (`FakeProcess.entered`). What matters of
the real driver is modelled: small allocations share a block, an IPC handle names a block and loses
the offset, ordinals follow the process's visible devices, calls need a current context, nothing
is zeroed by itself, and a handle does not open in the process that made it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

BLOCK_NBYTES = 2 << 20
POISON = 0xAA
PINNED = 0x4000_0000_0000  # device view of registered host memory: its host address and this

Result = tuple[Any, ...]


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ALREADY_MAPPED = 208
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704


OK: Result = (Status.CUDA_SUCCESS,)


class Block:
    """Physical memory of one GPU."""

    def __init__(self, owner: FakeProcess, gpu: str, nbytes: int) -> None:
        self.owner = owner
        self.gpu = gpu
        self.data = bytearray([POISON]) * nbytes
        self.used = 0
        self.live = 0


class FakeProcess:
    """Address space, contexts and visible devices of one process."""

    def __init__(self, host: FakeHost, visible: Sequence[str], token: str) -> None:
        self.host = host
        self.visible = list(visible)
        self.token = token
        self.failures: dict[str, Status] = {}
        self.allocations: dict[int, tuple[Block, int]] = {}
        self.opened: Counter[int] = Counter()
        self.registered: dict[int, int] = {}
        self.peer_access: set[tuple[str, str]] = set()
        self._bases: dict[Block, int] = {}
        self._threads = threading.local()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the process of the calling thread."""
        previous = getattr(self.host.here, "process", None)
        self.host.here.process = self
        try:
            yield
        finally:
            self.host.here.process = previous

    @property
    def contexts(self) -> list[str]:
        """The calling thread's context stack: GPUs, the current one last."""
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        stack: list[str] = self._threads.stack
        return stack

    def base_of(self, block: Block) -> int:
        """Where this process sees a block."""
        if block not in self._bases:
            self._bases[block] = next(self.host.addresses)
        return self._bases[block]

    def find(self, address: int) -> tuple[Block, int] | None:
        """Return the block and offset behind an address, if it is mapped here."""
        for block, base in self._bases.items():
            if base <= address < base + len(block.data):
                mapped = self.opened[base] > 0 or (block.owner is self and block.live > 0)
                return (block, address - base) if mapped else None
        return None

    def is_clean(self) -> bool:
        """Tell whether nothing is allocated, opened or registered."""
        return not (self.allocations or +self.opened or self.registered)


class FakeHost:
    """GPUs and processes. Stands in for the module `cuda.bindings.driver`."""

    def __init__(self, gpus: int = 1, *, isolated: Sequence[tuple[int, int]] = ()) -> None:
        self.gpus = [f"{index:x}" * 32 for index in range(1, gpus + 1)]
        self.isolated = {frozenset((self.gpus[a], self.gpus[b])) for a, b in isolated}
        self.lost: set[tuple[str, str, str]] = set()
        """Accesses that do not arrive, though the driver says they may: from GPU, to GPU, what."""
        self.blocks: list[Block] = []
        self.addresses = itertools.count(0x7F00_0000_0000, 1 << 30)
        self.here = threading.local()
        self.lock = threading.RLock()

    def process(self, visible: Sequence[int] | None = None) -> FakeProcess:
        """Start a process that sees these GPUs, in this order; all of them if None."""
        order = range(len(self.gpus)) if visible is None else visible
        serial = next(self.addresses)
        return FakeProcess(self, [self.gpus[index] for index in order], f"process-{serial:x}")

    @property
    def current(self) -> FakeProcess:
        process: FakeProcess = self.here.process
        return process

    def __getattribute__(self, name: str) -> Any:
        """Let a driver function fail where its process says so; one call at a time."""
        found = super().__getattribute__(name)
        if not name.startswith("cuGetError") and name[:2] == "cu" and name[2].isupper():
            failure = self.current.failures.get(name)
            if failure is not None:
                return lambda *args: (failure, None, None)

            def locked(*args: Any) -> Result:
                with self.lock:
                    result: Result = found(*args)
                    return result

            return locked
        return found

    class CUipcMemHandle:
        def __init__(self) -> None:
            self.bytes = ctypes.create_string_buffer(64)

        def getPtr(self) -> int:
            return ctypes.addressof(self.bytes)

    def cuGetErrorName(self, status: Status) -> Result:
        return (*OK, status.name.encode())

    def cuGetErrorString(self, status: Status) -> Result:
        return (*OK, b"as modelled")

    def cuDeviceGetCount(self) -> Result:
        return (*OK, len(self.current.visible))

    def cuDeviceGet(self, index: int) -> Result:
        if not 0 <= index < len(self.current.visible):
            return Status.CUDA_ERROR_INVALID_DEVICE, None
        return (*OK, index)

    def cuDeviceGetUuid(self, device: int) -> Result:
        class Uuid:
            bytes = bytes.fromhex(self.current.visible[device])

        return (*OK, Uuid)

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> Result:
        pair = frozenset((self.current.visible[device], self.current.visible[peer]))
        return (*OK, int(len(pair) == 2 and pair not in self.isolated))

    def cuDevicePrimaryCtxRetain(self, device: int) -> Result:
        return (*OK, self.current.visible[device])

    def cuCtxPushCurrent(self, context: str) -> Result:
        self.current.contexts.append(context)
        return OK

    def cuCtxPopCurrent(self) -> Result:
        return (*OK, self.current.contexts.pop())

    def cuCtxEnablePeerAccess(self, context: str, flags: int) -> Result:
        pair = (self.current.contexts[-1], context)
        if pair in self.current.peer_access:
            return (Status.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,)
        self.current.peer_access.add(pair)
        return OK

    def cuStreamCreate(self, flags: int) -> Result:
        return (*OK, "stream") if self.current.contexts else (Status.CUDA_ERROR_INVALID_CONTEXT, 0)

    def cuStreamSynchronize(self, stream: str) -> Result:
        return OK

    def cuStreamDestroy(self, stream: str) -> Result:
        return OK

    def cuMemAlloc(self, nbytes: int) -> Result:
        process = self.current
        if not process.contexts:
            return Status.CUDA_ERROR_INVALID_CONTEXT, None
        gpu = process.contexts[-1]
        fitting = (
            block
            for block in self.blocks
            if block.owner is process and block.gpu == gpu and block.live
            if block.used + nbytes <= len(block.data)
        )
        block = next(fitting, None) or Block(process, gpu, max(nbytes, BLOCK_NBYTES))
        if block not in self.blocks:
            self.blocks.append(block)
        address = process.base_of(block) + block.used
        process.allocations[address] = block, nbytes
        block.used += -(-nbytes // 512) * 512
        block.live += 1
        return (*OK, address)

    def cuMemFree(self, address: int) -> Result:
        if address not in self.current.allocations:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        block, _ = self.current.allocations.pop(address)
        block.live -= 1
        return OK

    def _copy(self, address: int, nbytes: int, host: int, to_device: bool) -> Result:
        pinned = address - PINNED
        if any(s <= pinned < s + n for s, n in self.current.registered.items()):
            ctypes.memmove(*((pinned, host) if to_device else (host, pinned)), nbytes)
            return OK
        found = self.current.find(address)
        if found is None or not self.current.contexts:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        block, offset = found
        if (self.current.contexts[-1], block.gpu, "write" if to_device else "read") in self.lost:
            if not to_device:
                ctypes.memset(host, 0, nbytes)
        elif to_device:
            block.data[offset : offset + nbytes] = ctypes.string_at(host, nbytes)
        else:
            ctypes.memmove(host, bytes(block.data[offset : offset + nbytes]), nbytes)
        return OK

    def cuMemcpyHtoD(self, address: int, host: int, nbytes: int) -> Result:
        return self._copy(address, nbytes, host, True)

    def cuMemcpyDtoH(self, host: int, address: int, nbytes: int) -> Result:
        return self._copy(address, nbytes, host, False)

    def cuMemcpyHtoDAsync(self, address: int, host: int, nbytes: int, stream: str) -> Result:
        return self._copy(address, nbytes, host, True)

    def cuMemcpyDtoHAsync(self, host: int, address: int, nbytes: int, stream: str) -> Result:
        return self._copy(address, nbytes, host, False)

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: str) -> Result:
        source = ctypes.create_string_buffer(bytes([value]) * nbytes, nbytes)
        return self._copy(address, nbytes, ctypes.addressof(source), True)

    def cuMemGetAddressRange(self, address: int) -> Result:
        block, _ = self.current.allocations[address]
        return (*OK, self.current.base_of(block), len(block.data))

    def cuIpcGetMemHandle(self, address: int) -> Result:
        block, _ = self.current.allocations[address]
        handle = self.CUipcMemHandle()
        handle.bytes.raw = str(self.blocks.index(block)).encode().ljust(64, b"\0")
        return (*OK, handle)

    def cuIpcOpenMemHandle(self, handle: CUipcMemHandle, flags: int) -> Result:
        process = self.current
        name = handle.bytes.raw.rstrip(b"\0")
        block = self.blocks[int(name)] if name.isdigit() else None
        if block is None or not block.live:
            return Status.CUDA_ERROR_INVALID_HANDLE, None
        if block.owner is process or not process.contexts or block.gpu not in process.visible:
            return Status.CUDA_ERROR_INVALID_CONTEXT, None
        base = process.base_of(block)
        process.opened[base] += 1
        return (*OK, base)

    def cuIpcCloseMemHandle(self, address: int) -> Result:
        if self.current.opened[address] == 0:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        self.current.opened[address] -= 1
        return OK

    def cuMemHostRegister(self, host: int, nbytes: int, flags: int) -> Result:
        if host in self.current.registered or flags != 3:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        self.current.registered[host] = nbytes
        return OK

    def cuMemHostUnregister(self, host: int) -> Result:
        return OK if self.current.registered.pop(host, 0) else (Status.CUDA_ERROR_INVALID_VALUE,)

    def cuMemHostGetDevicePointer(self, host: int, flags: int) -> Result:
        if host not in self.current.registered:
            return Status.CUDA_ERROR_INVALID_VALUE, None
        return (*OK, host + PINNED)

"""A cubin becomes a launch: loaded once per process, arguments packed into one buffer.

The argument order is the plugin contract's: LaneArgs, then one 64-bit address per input and output,
then one 64-bit integer per scalar of the plan.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
from collections.abc import Sequence

from .. import driver
from .compile import CompiledKernel

_LANE_FORMAT = "<QiiII"  # the last: bytes sent, the high half of what a kernel that counts reads
_LANE_OFFSETS = (0, 8, 12, 16)
_LANE_NBYTES = struct.calcsize(_LANE_FORMAT)


class Arguments:
    """The packed arguments of one launch, and the pointers to them that the driver wants.

    The driver copies them during the launch call, so they may be kept and used again.

    Args:
        lane: Control block address, rank, world size, signature, bytes sent (for kernels that
            count; else 0).
        addresses: Of inputs, then outputs.
        scalars: Of the plan.
    """

    __slots__ = ("_addresses", "_buffer", "_pointers", "address")

    def __init__(
        self, lane: tuple[int, int, int, int, int], addresses: Sequence[int], scalars: Sequence[int]
    ) -> None:
        layout = f"{_LANE_FORMAT}{len(addresses)}Q{len(scalars)}q"
        packed = struct.pack(layout, *lane, *addresses, *scalars)
        self._buffer = ctypes.create_string_buffer(packed, len(packed))
        base = ctypes.addressof(self._buffer)
        offsets = (*_LANE_OFFSETS, *range(_LANE_NBYTES, len(packed), 8))
        self._pointers = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        self.address = ctypes.addressof(self._pointers)
        self._addresses = struct.Struct(f"<{len(addresses)}Q")

    def point_to(self, addresses: Sequence[int]) -> None:
        """Replace the addresses of inputs and outputs."""
        self._addresses.pack_into(self._buffer, _LANE_NBYTES, *addresses)


class LoadedKernel:
    """A kernel in this process. Its context must be current during construction.

    Args:
        compiled: The kernel.

    Attributes:
        entry_point: `cuLaunchKernel` of the bindings.
        function: What it launches, in any context of the device.
        block: Threads per block.

    Raises:
        CudaError: The driver refuses the cubin.
    """

    def __init__(self, compiled: CompiledKernel) -> None:
        self.compiled = compiled
        self.block = compiled.block
        library = driver.call("cuLibraryLoadData", compiled.cubin, [], [], 0, [], [], 0)
        kernel = driver.call("cuLibraryGetKernel", library, compiled.entry.encode())
        # Loading is lazy by default. Asking for the function of the current context loads it now:
        # a load at first launch could wait for kernels that in turn wait for this one.
        driver.call("cuKernelGetFunction", kernel)
        api = driver.bindings()
        self.entry_point = api.cuLaunchKernel
        self.function = api.CUfunction(int(kernel))

    def launch_overlapping(self, arguments: Arguments, grid: int, stream: int) -> None:
        """Enqueue a launch that may start before its predecessor in the stream has ended.

        The kernel waits for the predecessor itself, before it touches memory (programmatic
        dependent launch), so only the launch latency overlaps. For captures: the call costs more
        than a plain launch. The stream's context must be current.

        Raises:
            CudaError: The launch failed.
        """
        api = driver.bindings()
        attribute = api.CUlaunchAttribute()
        attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block, 1, 1
        config.sharedMemBytes = 0
        config.hStream = api.CUstream(stream)
        config.attrs = [attribute]
        config.numAttrs = 1
        driver.call("cuLaunchKernelEx", config, self.function, arguments.address, 0)

    def blocks_per_unit(self) -> int:
        """Return how many blocks of this kernel a multiprocessor holds at once."""
        return int(
            driver.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", self.function, self.block, 0)
        )


_loaded: dict[tuple[int, str], LoadedKernel] = {}
_loading = threading.Lock()


def load(compiled: CompiledKernel, context: int) -> LoadedKernel:
    """Return the kernel, loaded once per process and context, for as long as the process lives.

    Ranks that share a process share it: the driver may wait for the device while it loads code, so
    a rank that loaded its own copy could wait for a peer's kernel that waits for this rank.

    Args:
        compiled: The kernel.
        context: Handle of the current context.
    """
    key = (context, hashlib.sha256(compiled.cubin).hexdigest())
    with _loading:
        if key not in _loaded:
            _loaded[key] = LoadedKernel(compiled)
        return _loaded[key]


def loaded_kernels() -> list[CompiledKernel]:
    """Return the kernels that this process has loaded so far."""
    with _loading:
        return [kernel.compiled for kernel in _loaded.values()]

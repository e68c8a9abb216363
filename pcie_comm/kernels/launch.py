"""A cubin becomes a launch: loaded once per process, arguments packed into one buffer.

The argument order is the plugin contract's: LaneArgs, then one 64-bit address per input and output,
then one 64-bit integer per scalar of the plan.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from .. import driver
from .compile import CompiledKernel

_LANE_FORMAT = "<QiiIxxxx"
_LANE_OFFSETS = (0, 8, 12, 16)
_LANE_NBYTES = struct.calcsize(_LANE_FORMAT)


class LoadedKernel:
    """A kernel in this process, with its own argument buffer.

    Not thread-safe: a channel owns its loaded kernels and launches under its lock. The driver
    copies the arguments during the launch call, so the buffer is free again when it returns.

    Args:
        compiled: The kernel.
        num_tensors: Inputs and outputs.
        num_scalars: Scalars of the plan.

    Raises:
        CudaError: The driver refuses the cubin.
    """

    def __init__(self, compiled: CompiledKernel, num_tensors: int, num_scalars: int) -> None:
        self.compiled = compiled
        self.block = compiled.block
        library = driver.call("cuLibraryLoadData", compiled.cubin, [], [], 0, [], [], 0)
        self._library = library
        kernel = driver.call("cuLibraryGetKernel", library, compiled.entry.encode())
        # Loading is lazy by default. Asking for the function of the current context loads it now:
        # a load at first launch could wait for kernels that in turn wait for this one.
        driver.call("cuKernelGetFunction", kernel)
        api = driver.bindings()
        self._launch = api.cuLaunchKernel
        self._function = api.CUfunction(int(kernel))
        self._struct = struct.Struct(f"{_LANE_FORMAT}{num_tensors}Q{num_scalars}q")
        self._arguments = ctypes.create_string_buffer(self._struct.size)
        base = ctypes.addressof(self._arguments)
        words = range(_LANE_NBYTES, self._struct.size, 8)
        offsets = (*_LANE_OFFSETS, *words)
        self._pointers = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        self._pointers_address = ctypes.addressof(self._pointers)

    def launch(
        self,
        lane: tuple[int, int, int, int],
        addresses: Sequence[int],
        scalars: Sequence[int],
        grid: int,
        stream: int,
    ) -> None:
        """Enqueue one launch.

        Args:
            lane: Control block address, rank, world size, signature.
            addresses: Of inputs, then outputs.
            scalars: Of the plan.
            grid: Thread blocks.
            stream: CUDA stream handle; its context must be current.

        Raises:
            CudaError: The launch failed.
        """
        self._struct.pack_into(self._arguments, 0, *lane, *addresses, *scalars)
        (status,) = self._launch(
            self._function, grid, 1, 1, self.block, 1, 1, 0, stream, self._pointers_address, 0
        )
        if status:
            driver.check("cuLaunchKernel", (status,))

    def resident_blocks(self, multiprocessors: int) -> int:
        """Return how many blocks of this kernel the device holds at once."""
        per_unit = driver.call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor", self._function, self.block, 0
        )
        return int(per_unit) * multiprocessors

    def unload(self) -> None:
        """Give the code back. Requires: no launch of it is pending."""
        library, self._library = self._library, None
        if library is not None:
            driver.call("cuLibraryUnload", library)




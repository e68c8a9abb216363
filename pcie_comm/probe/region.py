"""Memory that probes use: of a GPU, or pinned memory of the host."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .. import driver
from ..errors import CudaError
from .pattern import Bytes

if TYPE_CHECKING:
    from .gpu import Gpu

_PORTABLE_AND_MAPPED = 3  # CU_MEMHOSTREGISTER_PORTABLE | _DEVICEMAP
_MAPS = Path("/proc/self/numa_maps")


@dataclass(frozen=True, eq=False)
class Region:
    """Memory with an owner.

    Attributes:
        owner: The GPU whose memory it is; None for the host's.
        nbytes: Its size.
        addresses: As each GPU of this process addresses it, by name.
        view: The host's view, where the host owns it.
        host_address: Likewise, else 0.
    """

    owner: Gpu | None
    nbytes: int
    addresses: dict[str, int]
    view: Bytes | None = field(default=None, repr=False)
    host_address: int = 0

    def seen_by(self, gpu: Gpu) -> int:
        """Return its address for a GPU's kernels."""
        return self.addresses[gpu.name]


@contextmanager
def of_gpu(owner: Gpu, nbytes: int, gpus: Sequence[Gpu]) -> Iterator[Region]:
    """Yield memory of a GPU, which is given back in the end. Its content is undefined.

    An address of one process is the same for all of its GPUs.
    """
    with owner.current():
        address = int(driver.call("cuMemAlloc", nbytes))
    try:
        yield Region(owner, nbytes, {gpu.name: address for gpu in gpus})
    finally:
        with suppress(CudaError), owner.current():  # what went wrong before counts
            driver.call("cuMemFree", address)


@contextmanager
def of_host(nbytes: int, gpus: Sequence[Gpu], cpus: Sequence[int] = ()) -> Iterator[Region]:
    """Yield pinned memory of the host that all `gpus` can address; zeroed.

    Args:
        nbytes: Its size.
        gpus: One at least.
        cpus: That touch it first, so that it lies with them; none: whichever this thread runs on.
    """
    memory = mmap.mmap(-1, nbytes)
    view = np.frombuffer(memory, dtype=np.uint8)
    address = int(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    with _on(cpus):
        view[:] = 0
    with gpus[0].current():
        driver.call("cuMemHostRegister", address, nbytes, _PORTABLE_AND_MAPPED)
    try:
        addresses = {}
        for gpu in gpus:
            with gpu.current():
                addresses[gpu.name] = int(driver.call("cuMemHostGetDevicePointer", address, 0))
        yield Region(None, nbytes, addresses, view, address)
    finally:
        with suppress(CudaError), gpus[0].current():
            driver.call("cuMemHostUnregister", address)


@contextmanager
def _on(cpus: Sequence[int]) -> Iterator[None]:
    """Let this thread run on some processors meanwhile; on all of its own where none is given."""
    allowed = os.sched_getaffinity(0)
    if chosen := allowed & set(cpus):
        os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        if chosen:
            os.sched_setaffinity(0, allowed)


def may_run_on(cpus: Sequence[int]) -> bool:
    """Tell whether this process may use one of these processors."""
    return bool(os.sched_getaffinity(0) & set(cpus))


def nodes_of(region: Region, maps: Path = _MAPS) -> dict[int, int] | str:
    """Return on which NUMA nodes a region of the host lies, in pages, or why it cannot be told."""
    try:
        lines = maps.read_text().splitlines()
    except OSError as error:
        return f"{maps} is not readable: {error.strerror}"
    name = f"{region.host_address:08x} "
    line = next((line for line in lines if line.startswith(name)), None)
    if line is None:
        return f"{maps} does not list the memory"
    return {int(node): int(pages) for node, pages in re.findall(r"\bN(\d+)=(\d+)", line)}

"""What is installed here, as facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..topology.model import Reasons, Record

MISSING = ""
"""A version that is known: not installed."""

UNLIMITED = -1
HOST, PRIVATE = "host", "private"


def _reasons() -> Reasons:
    return {}


@dataclass(frozen=True)
class Installation(Record):
    """An installation, as one process sees it. None is unknown and has its reason.

    Attributes:
        package: Version of pcie_comm; likewise python.
        torch: Version, or MISSING; likewise bindings (cuda-bindings) and dsl (CuTe DSL).
        torch_cuda: CUDA version that torch was built with, MISSING for a CPU build.
        toolkit: Version of the CUDA toolkit, or MISSING. Nothing here needs one.
        gpus: NVIDIA GPUs of the host, also those that this process does not see.
        driver: Version of the kernel's part of the driver, or MISSING.
        library: Newest CUDA version that libcuda serves, or MISSING if libcuda does not load.
        start: MISSING if CUDA starts, else the name of its error.
        capabilities: Compute capability of each GPU that CUDA shows to this process.
        prebuilt: Kernels that came with the package, counted by architecture.
        own_kernels: Those of the folder in PCIE_COMM_KERNELS; empty without one.
        slab_nbytes: What one rank keeps in shared memory for one channel, with these settings.
        shm_nbytes: Free space in /dev/shm; -1 if there is none that can be written.
        memlock_nbytes: Most memory a process may lock; UNLIMITED is -1.
        files: Most files a process may have open; UNLIMITED is -1.
        ipc_namespace: HOST or PRIVATE; likewise pid_namespace.
    """

    package: str
    python: str
    torch: str | None = None
    torch_cuda: str | None = None
    bindings: str | None = None
    dsl: str | None = None
    toolkit: str | None = None
    gpus: int | None = None
    driver: str | None = None
    library: str | None = None
    start: str | None = None
    capabilities: tuple[tuple[int, int], ...] | None = None
    prebuilt: Mapping[str, int] | None = None
    own_kernels: Mapping[str, int] | None = None
    slab_nbytes: int | None = None
    shm_nbytes: int | None = None
    memlock_nbytes: int | None = None
    files: int | None = None
    ipc_namespace: str | None = None
    pid_namespace: str | None = None
    unknown: Reasons = field(default_factory=_reasons)

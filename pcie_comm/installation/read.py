"""Reads the facts of the running installation."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import Config, cuda_home
from ..errors import InvalidArgumentError
from ..layout import MAX_WORLD, SlabLayout
from ..topology.model import ANY
from .cuda_probe import probe
from .facts import HOST, MISSING, PRIVATE, UNLIMITED, Installation
from .packages import toolkit, torch_cuda, version_of

PREBUILT_DIR = Path(__file__).parent.parent / "kernels" / "prebuilt"

FIRST_NAMESPACES = {"ipc": 0xEFFFFFFF, "pid": 0xEFFFFFFC}
"""Inode of the namespace that Linux boots with, include/linux/proc_ns.h."""

_KERNEL_FILE = re.compile(r"\.(sm_\d+[af]?)\.json$")
_DRIVER = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)?)\b")


def read(
    gpus: int | None, root: Path = Path("/"), load: Callable[[str], Any] = ctypes.CDLL
) -> Installation:
    """Return the facts of this process's installation.

    Args:
        gpus: NVIDIA GPUs of the host, None if that is unknown.
        root: Has `proc` and `dev`; another one in tests.
        load: Loads libcuda; another one in tests.
    """
    reasons = {
        ANY: "the driver has no answer",
        "torch_cuda": "torch is not installed, or its version.py is not readable",
        "toolkit": "its version.json is not readable",
        "gpus": "the PCI devices of the host are not readable",
        "start": "libcuda does not load",
        "capabilities": "CUDA does not start",
        "ipc_namespace": "/proc/self/ns/ipc is not readable",
        "pid_namespace": "/proc/self/ns/pid is not readable",
        "shm_nbytes": "/dev/shm does not say how much room it has",
    }
    return Installation(
        package=_own_version(),
        python=platform.python_version(),
        torch=version_of("torch"),
        torch_cuda=torch_cuda(),
        bindings=version_of("cuda-bindings"),
        dsl=version_of("nvidia-cutlass-dsl"),
        toolkit=toolkit(cuda_home()),
        gpus=gpus,
        driver=_driver(root),
        prebuilt=count_kernels(PREBUILT_DIR),
        shm_nbytes=_shm(root),
        memlock_nbytes=_limit(resource.RLIMIT_MEMLOCK),
        files=_limit(resource.RLIMIT_NOFILE),
        ipc_namespace=_namespace(root, "ipc"),
        pid_namespace=_namespace(root, "pid"),
        **probe(load),
        **_settings(reasons),
        unknown=reasons,
    )


def _own_version() -> str:
    """Return the version of this package, which is imported, without importing what it offers."""
    return str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])


def _settings(reasons: dict[str, str]) -> dict[str, Any]:
    """Return what follows from the settings; if they are wrong, why it is unknown."""
    try:
        config = Config()
    except InvalidArgumentError as error:
        reasons |= dict.fromkeys(("slab_nbytes", "own_kernels"), f"settings: {error}")
        return {"slab_nbytes": None, "own_kernels": None}
    folder = config.kernels_dir
    return {
        "slab_nbytes": SlabLayout(config.slot_nbytes, MAX_WORLD).nbytes,
        "own_kernels": {} if folder is None else count_kernels(folder),
    }


def count_kernels(folder: Path) -> Mapping[str, int]:
    """Return how many kernels of each architecture a folder holds, by their file names."""
    names = (_KERNEL_FILE.search(path.name) for path in folder.glob("*.json"))
    return dict(Counter(match[1] for match in names if match))


def _driver(root: Path) -> str | None:
    for name in ("sys/module/nvidia/version", "proc/driver/nvidia/version"):
        try:
            match = _DRIVER.search((root / name).read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if match:
            return match[1]
    return MISSING


def _shm(root: Path) -> int | None:
    folder = root / "dev" / "shm"
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return -1
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _namespace(root: Path, kind: str) -> str | None:
    try:
        target = str((root / "proc" / "self" / "ns" / kind).readlink())
    except OSError:
        return None
    match = re.fullmatch(rf"{kind}:\[(\d+)\]", target)
    if match is None:
        return None
    return HOST if int(match[1]) == FIRST_NAMESPACES[kind] else PRIVATE

"""Where figures come from: command, source, machine, clocks, kernels. No serial numbers."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import driver
from ..config import Config, named_revision
from ..errors import CommError
from ..kernels.launch import loaded_kernels
from .measure import spin

QUERY = (
    "name,clocks.sm,clocks.max.sm,clocks.mem,pstate,temperature.gpu,power.draw,"
    "pcie.link.gen.current,pcie.link.width.current"
)
PACKAGE = Path(__file__).resolve().parents[1]


def output_of(*command: str) -> str:
    """Return what a command prints, or that it is not available."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=PACKAGE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not available: {error}"
    return (done.stdout or done.stderr).strip()


def clocks(device: torch.device) -> list[dict[str, str]] | str:
    """Return clocks and link of every GPU while this one works, or why nvidia-smi does not say."""
    if device.type != "cuda":
        return "no GPU takes part"
    spin(device)
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while process.poll() is None:  # it prints a few lines, which its pipe can hold
                spin(device, 0.05)
            text = process.stdout.read().strip() if process.stdout else ""
    except OSError as error:
        return f"not available: {error}"
    names = QUERY.split(",")
    cells = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    if not cells or any(len(row) != len(names) for row in cells):
        return text
    return [dict(zip(names, row, strict=True)) for row in cells]


def source() -> dict[str, str]:
    """Return the revision of the sources, and a hash of this package's Python files."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + file.read_bytes())
    revision = named_revision() or output_of("git", "rev-parse", "HEAD")
    changes = output_of("git", "status", "--porcelain", "--untracked-files=no", ".")
    return {
        "revision": revision,
        "changes": changes if not changes.startswith(("not available", "fatal")) else "unknown",
        "package_sha256": digest.hexdigest(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices(devices: Sequence[torch.device]) -> dict[str, Any]:
    if devices[0].type == "cpu":
        return {"device": "cpu", "processor": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(devices[0])
    try:
        driver_api = driver.call("cuDriverGetVersion")
    except CommError as error:
        driver_api = str(error)
    return {
        "device": properties.name,
        "gpus": len(set(devices)),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_nbytes": getattr(properties, "L2_cache_size", 0),
        "memory_nbytes": properties.total_memory,
        "cuda_driver_api": driver_api,
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def gather(devices: Sequence[torch.device], command: str) -> dict[str, Any]:
    """Return what is known before the run.

    Args:
        devices: Those that ranks use.
        command: That started the run.
    """
    return {
        "command": command,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "source": source(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda or "none",
        "cuda_bindings": _version("cuda-bindings"),
        "dsl": _version("nvidia-cutlass-dsl"),
        "max_blocks": Config().max_blocks,
        **_devices(devices),
        "clocks_before": clocks(devices[0]),
    }


def complete(provenance: dict[str, Any], device: torch.device) -> None:
    """Add what is known after the run."""
    provenance["clocks_after"] = clocks(device)
    provenance["kernels"] = {
        f"{kernel.key}.{kernel.arch}": hashlib.sha256(kernel.cubin).hexdigest()
        for kernel in loaded_kernels()
    }

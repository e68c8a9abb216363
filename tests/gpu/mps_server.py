"""An MPS server of a test's own: kernels of several processes run side by side on one GPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FEW_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""A rank of its own process needs few; with 32 each, the third client of MPS got no context."""


@contextlib.contextmanager
def mps_server(root: Path) -> Iterator[dict[str, str]]:
    """Run a server with directories of its own; yield its clients' environment."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("nvidia-cuda-mps-control is not installed")
    variables = {
        **FEW_QUEUES,
        "CUDA_MPS_PIPE_DIRECTORY": str(root / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(root / "log"),
    }
    for name in ("pipe", "log"):
        (root / name).mkdir()
    environment = {**os.environ, **variables}
    subprocess.run([control, "-d"], env=environment, check=True, timeout=20)
    try:
        yield variables
    finally:
        subprocess.run([control], input=b"quit -t 5\n", env=environment, check=False, timeout=30)
        time.sleep(1)

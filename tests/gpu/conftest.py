"""Fixtures of the GPU tests; what they measure goes into one JSON-lines file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before any context exists


@pytest.fixture
def figures(request):
    """Record a dict of figures under the test's name; tools/gpu_test.py collects them."""
    path = os.environ.get("PCIE_COMM_TEST_FIGURES")

    def record(**values: Any) -> None:
        if path:
            line = json.dumps({"test": request.node.nodeid, **values})
            with Path(path).open("a") as file:
                file.write(line + "\n")
        print(json.dumps(values))

    return record


def pytest_runtest_logreport(report):
    """Print a failure when it happens: a run that is cut short still says what it saw."""
    if report.failed:
        print(f"\n{report.nodeid} {report.when}\n{report.longreprtext[-1500:]}", flush=True)


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    import torch

    if torch.cuda.is_available():
        import harness

        harness.warm_up()

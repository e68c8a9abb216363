"""What the tests of the probes share."""

from __future__ import annotations

import pytest
from fake_gpu import FakeDriver, FakeStore

from pcie_comm import driver
from pcie_comm.kernels import launch
from pcie_comm.probe.lab import Lab


@pytest.fixture
def lab_of(monkeypatch):
    """Return a function that opens a lab on a fake driver."""

    def open_lab(fake: FakeDriver) -> Lab:
        monkeypatch.setattr(driver, "_bindings", fake)
        monkeypatch.setattr(launch, "_loaded", {})
        return Lab({f"GPU{at}": at for at in range(fake.count)}, FakeStore())

    return open_lab

"""Ranges for profilers: around each call where they are asked for, and nothing elsewhere."""

from __future__ import annotations

import pytest
import torch
from test_cuda_engine import Fakes

from pcie_comm import Config, UnsupportedError, local_world, ranges

ROWS = torch.ones(1, 4)


class Nvtx:
    """Stands in for torch.cuda.nvtx, which builds without CUDA do not have."""

    def __init__(self, log: list) -> None:
        self.log = log

    def mark(self, name: str) -> None:
        pass

    def range_push(self, name: str) -> None:
        self.log.append(("push", name))

    def range_pop(self) -> None:
        self.log.append(("pop",))


@pytest.fixture
def log(monkeypatch) -> list:
    found: list = []
    monkeypatch.setattr(ranges, "nvtx", Nvtx(found))
    return found


def test_calls_on_the_cpu_are_ranges(log):
    with local_world(1, "cpu", config=Config(nvtx=True)) as world:
        world.run(lambda group: group.all_gather_pair(ROWS, ROWS))
    assert log == [("push", "pcie_comm.all_gather_pair"), ("pop",)]


def test_a_range_ends_with_an_error(log):
    def fail() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        ranges.marked(fail, "op")()
    assert log == [("push", "pcie_comm.op"), ("pop",)]


@pytest.mark.parametrize("nvtx", [False, True])
def test_launches_are_ranges_only_where_asked_for(nvtx, log, monkeypatch):
    fakes = Fakes(monkeypatch)
    fakes.log = log
    engine = fakes.engine()
    engine.nvtx = nvtx
    kernel_call = fakes.launch(engine, "kernel")
    with fakes.on(fakes.streams[1]):
        kernel_call()
    inside = [(1, "launches", "kernel")]
    assert log == ([("push", "pcie_comm.op"), *inside, ("pop",)] if nvtx else inside)
    assert (kernel_call.__module__ == ranges.__name__) == nvtx, "off: not a frame more"


def test_a_torch_without_nvtx_is_named():
    if torch.version.cuda:
        pytest.skip("this torch has NVTX")
    with (
        pytest.raises(UnsupportedError, match="built with CUDA"),
        local_world(1, "cpu", config=Config(nvtx=True)),
    ):
        pass

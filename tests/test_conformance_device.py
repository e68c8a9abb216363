"""The suite's checks for a GPU, with ranks of the CPU in the place of streams and graphs.

What they draw, poison, compare and look for in slabs is theirs; that CUDA does what they ask for is
shown in gpu/test_example_plugin.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from example_plugin import load_example

from pcie_comm.local import local_world
from pcie_comm.testing import ConformanceError, Subject, on_device

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

EXAMPLE = type(load_example())


@pytest.fixture(autouse=True)
def no_gpu_is_needed(monkeypatch):
    def world(size, device, transport="auto", config=None):
        return local_world(size, "cpu", config=config)

    def everywhere(self, graphs=None):
        self.world.run(lambda group: self.enqueue(group.rank))

    monkeypatch.setattr(on_device, "_need_gpu", lambda subject: None)
    monkeypatch.setattr(on_device, "local_world", world)
    monkeypatch.setattr(on_device.Round, "eager", everywhere)
    monkeypatch.setattr(on_device.Round, "capture", lambda self: [])
    monkeypatch.setattr(on_device.Round, "replay", everywhere)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def subject(plugin=None, **options) -> Subject:
    usual = {"world_sizes": (2,), "rows": (0, 3), "device": "cpu"}
    return Subject(plugin or EXAMPLE(), **{**usual, **options})


def test_what_is_right_passes():
    on_device.runs_on_a_device(subject())
    on_device.stages_what_it_declares(subject())


def test_a_wrong_result_is_found(monkeypatch):
    """Also where it is right in the first call, and of the next ones nothing changes."""
    eager = on_device.Round.eager

    def once(self, graphs=None):
        if graphs is None:
            eager(self)

    monkeypatch.setattr(on_device.Round, "replay", once)
    with pytest.raises(ConformanceError, match=r"wrong on a GPU, replayed, .*rows=3"):
        on_device.runs_on_a_device(subject())
    monkeypatch.setattr(on_device.Round, "eager", lambda self: None)
    with pytest.raises(ConformanceError, match=r"wrong on a GPU, eager, .*protocol=push, rows=3"):
        on_device.runs_on_a_device(subject())


def test_numbers_may_differ_by_the_tolerance_of_the_plugin(monkeypatch):
    eager = on_device.Round.eager

    def roughly(self, graphs=None):
        eager(self)
        for (output,) in self.outputs:
            output.mul_(1.001)

    for name in ("eager", "replay"):
        monkeypatch.setattr(on_device.Round, name, roughly)
    with pytest.raises(ConformanceError, match="eager"):
        on_device.runs_on_a_device(subject())
    on_device.runs_on_a_device(subject(type("Rough", (EXAMPLE,), {"tolerance": 0.01})()))


def test_bytes_beside_the_declared_ones_are_found():
    class Less(EXAMPLE):
        def plan(self, info, *tensors):
            plan = super().plan(info, *tensors)
            return dataclasses.replace(plan, staged_nbytes=plan.staged_nbytes - 4)

    with pytest.raises(ConformanceError, match="byte 80 of a segment, staged_nbytes=80"):
        on_device.stages_what_it_declares(subject(Less()))

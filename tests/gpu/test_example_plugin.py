"""The collective of examples/all_reduce_max on one GPU: exact, eager and captured, timed as ours.

The suite that its own package runs, with less of what a CPU shows. Kernels come from
PCIE_COMM_KERNELS, or are compiled.
"""

from __future__ import annotations

import harness
import pytest
import torch
from example_plugin import load_example

from pcie_comm import Config, PeerTimeoutError, local_world, register
from pcie_comm.bench.contenders import OURS
from pcie_comm.bench.options import VRAM, Options
from pcie_comm.bench.runner import Bench
from pcie_comm.kernels import registry
from pcie_comm.testing import Subject, on_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

WORLDS = (2, 3, 8)
PLUGIN = load_example()


@pytest.mark.parametrize("world_size", WORLDS)
def test_eager_calls_and_replays_are_exact(world_size):
    """By push, pull and where tagged push is asked for; graphs are replayed with fresh inputs."""
    subject = Subject(PLUGIN, world_sizes=(world_size,), rows=(0, 1, 7), device=harness.DEVICE)
    on_device.runs_on_a_device(subject)


def test_it_stages_no_more_than_it_declares():
    on_device.stages_what_it_declares(Subject(PLUGIN, world_sizes=(3,), device=harness.DEVICE))


def test_special_numbers_over_several_blocks():
    """NaN, infinities and zeros of both signs have the bits of the reference."""
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45, 1.0])

    def make(world_size: int, rows: int, seed: int):
        random = torch.Generator().manual_seed(seed)
        return [
            (odd[torch.randint(0, 7, (rows, 999), generator=random)],) for _ in range(world_size)
        ]

    subject = Subject(PLUGIN, make, world_sizes=(3,), rows=(5,), device=harness.DEVICE)
    on_device.runs_on_a_device(subject)


def test_a_rank_whose_peer_does_not_come_is_told():
    """The wait on the device ends, check() names the peer, and a new group works."""
    x = torch.ones(1, 4, device=harness.DEVICE)
    out = torch.empty_like(x)
    with local_world(2, harness.DEVICE, config=Config(timeout_s=0.2)) as world:
        lonely = world.groups[0]
        lonely.prepare(PLUGIN)
        with torch.cuda.stream(world.streams[0]):
            lonely.run(PLUGIN, x, out=out)
        torch.cuda.synchronize()
        with pytest.raises(PeerTimeoutError) as caught:
            lonely.check()
        assert (caught.value.rank, caught.value.peer, caught.value.op) == (0, 1, PLUGIN.name)
    on_device.runs_on_a_device(Subject(PLUGIN, world_sizes=(2,), rows=(1,), device=harness.DEVICE))


def test_it_is_timed_and_right(monkeypatch, figures):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    register(PLUGIN)
    options = Options(
        operations=(PLUGIN.name,),
        ranks=(2,),
        rows=(1,),
        memories=(VRAM,),
        protocols=("push", "pull"),
        samples=3,
        ops=8,
        cold=False,
        device=harness.DEVICE,
    )
    report = Bench(options, "a test").run(lambda name, details: None)
    assert report.correct, [row.faults_after for row in report.rows if not row.correct][:3]
    ours = [row for row in report.rows if row.contender == OURS]
    assert {row.protocol for row in ours} == {"push", "pull"}
    figures(microseconds={row.protocol: row.median_us for row in ours})

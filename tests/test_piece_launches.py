"""A channel's launches of a call that is cut: their order and addresses, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pcie_comm.channel import Channel
from pcie_comm.cuda_engine import BoundLaunch, CudaEngine
from pcie_comm.errors import CompileError
from pcie_comm.kernels.collective import PlanInfo
from pcie_comm.kernels.registry import find
from pcie_comm.piece_launches import PieceLaunches

SEGMENT = 4096


class Noting(CudaEngine):
    """Notes launches, and where their arguments point."""

    def __init__(self) -> None:
        self.broken = (0,)
        self.log: list[tuple[int, list[int]]] = []
        self.cold = False

    def kernel_for(self, collective, plan):
        if self.cold:
            raise CompileError("not loaded")
        return SimpleNamespace(key=plan.kernel)

    def bind(self, kernel, plan, addresses):
        where = list(addresses)

        def point_to(addresses) -> None:
            where[:] = addresses

        def enqueue() -> None:
            self.log.append((plan.scalars[0], list(where)))

        return BoundLaunch(enqueue, SimpleNamespace(point_to=point_to))

    def taken(self) -> list[tuple[int, list[int]]]:
        log, self.log = self.log, []
        return log


@pytest.fixture
def channel() -> Channel:
    info = PlanInfo(0, 2, "auto", SEGMENT, 64, 8)
    return Channel("default", info, torch.device("cpu"), Noting())


def expected(rows: int, local: torch.Tensor, out: torch.Tensor) -> list[tuple[int, list[int]]]:
    most = SEGMENT // (local.shape[1] * local.itemsize)
    return [
        (
            min(most, rows - begin),
            [
                local.data_ptr() + begin * local.stride(0) * local.itemsize,
                out.data_ptr() + begin * out.stride(0) * out.itemsize,
            ],
        )
        for begin in range(0, rows, most)
    ]


@pytest.mark.parametrize("rows", [17, 32, 100])
def test_launches_follow_each_other_over_the_rows(channel, rows):
    gather, local = find("all_gather"), torch.zeros(rows, 64)
    for _ in range(2):
        out = channel.issue(gather, (local,), None)
        assert out.shape == (rows, 128)
        assert channel.engine.taken() == expected(rows, local, out)
    for target in (torch.empty(rows, 128), torch.empty(rows, 128)):
        for _ in range(2):
            assert channel.issue(gather, (local,), target) is target
            assert channel.engine.taken() == expected(rows, local, target)
    assert len(channel._planned) == 1
    assert channel.protocols() == ["push"] if rows == 32 else ["push", "tagged"]


def test_a_call_that_fits_has_no_more_between_it_and_its_launch(channel):
    gather, small, large = find("all_gather"), torch.zeros(4, 64), torch.zeros(400, 64)
    for local in (small, large):
        channel.issue(gather, (local,), None)
    kinds = [type(call.launch) for call in channel._planned.values()]
    assert kinds == [BoundLaunch, PieceLaunches]
    assert [bool(call.pieces) for call in channel._planned.values()] == [False, True]


def test_a_cold_kernel_is_told_before_anything_is_enqueued(channel):
    channel.engine.cold = True
    for rows in (4, 400):
        with pytest.raises(CompileError):
            channel.issue(find("all_gather"), (torch.zeros(rows, 64),), None)
    assert channel.engine.taken() == []


def test_the_channel_says_what_every_launch_got(channel):
    channel.issue(find("all_gather"), (torch.zeros(65, 64),), None)
    reasons = channel.choices("built-in")["all_gather"]
    assert [reason.partition(":")[0] for reason in reasons] == ["push", "tagged"]

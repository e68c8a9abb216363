"""What is checked: a plugin, its inputs, and where it runs."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from ..errors import UnsupportedError
from ..kernels.collective import Collective, Plan, PlanInfo, title
from ..kernels.plan_checks import blaming, make_plan, run_reference
from ..layout import MAX_BLOCKS
from ..tensors import close, dense, meta_of, torch_dtype

Tensors = tuple[torch.Tensor, ...]

InputMaker = Callable[[int, int, int], Sequence[Sequence[torch.Tensor]]]
"""(world_size, rows, seed) -> every rank's inputs, on the CPU; Collective.example_inputs is one."""

SEGMENT_NBYTES = 1 << 24
MAX_ROWS = 4096


class ConformanceError(AssertionError):
    """A plugin does not keep its contract. The message names it and says where."""


@dataclass(frozen=True)
class Subject:
    """A plugin, and what to check it with.

    Attributes:
        plugin: An instance.
        inputs: Makes inputs, called as `Collective.example_inputs`; None: that method does.
        world_sizes: To be tried; those that the plugin does not serve are left out.
        rows: Numbers of rows to be tried; with a 0 among them, calls without rows are checked.
        arch: What its kernels are compiled for.
        device: Where they run, if there is such a GPU: all ranks share it.
    """

    plugin: Collective
    inputs: InputMaker | None = None
    world_sizes: tuple[int, ...] = (1, 2, 3, 8)
    rows: tuple[int, ...] = (1, 5)
    arch: str = "sm_90a"
    device: str = "cuda:0"

    def fail(self, what: str) -> NoReturn:
        """Raise ConformanceError for this plugin."""
        raise ConformanceError(f"{title(self.plugin)}: {what}")

    def served(self, least: int = 1) -> list[int]:
        """Return the world sizes that the plugin serves, `least` and more.

        Raises:
            SkipTest: There is none.
        """
        found = []
        for world_size in self.world_sizes:
            try:
                with blaming(self.plugin, "failed to judge a world size"):
                    self.plugin.check_world_size(world_size)
            except UnsupportedError as error:
                if error.reason == f"plugin {self.plugin.name} failed":
                    self.fail(str(error))
            else:
                found += [world_size] if world_size >= least else []
        if not found:
            raise unittest.SkipTest(f"no world of {least} ranks or more is to be tried")
        return found

    def make(self, world_size: int, rows: int, seed: int = 0) -> list[Tensors]:
        """Return inputs of every rank.

        Raises:
            ConformanceError: The maker gives something else.
        """
        maker = self.inputs or self.plugin.example_inputs
        with blaming(self.plugin, "failed to make example inputs"):
            inputs = [tuple(tensors) for tensors in maker(world_size, rows, seed)]
        counts = [len(tensors) for tensors in inputs]
        if counts != [self.plugin.num_inputs] * world_size:
            self.fail(
                f"inputs for world_size={world_size} have {counts} tensors, expected "
                f"num_inputs={self.plugin.num_inputs} for each rank"
            )
        if any(tensor.device.type != "cpu" for tensors in inputs for tensor in tensors):
            self.fail("inputs are to be made on the CPU")
        return inputs

    def wanted(self, inputs: Sequence[Tensors], rank: int) -> Tensors:
        """Return what the reference says of a rank's call, checked against its plan."""
        plan = self.plan(self.info(rank, len(inputs), "push"), inputs[rank])
        outputs = [torch.empty(one.shape, dtype=torch_dtype(one.dtype)) for one in plan.outputs]
        return tuple(run_reference(self.plugin, rank, inputs, outputs))

    def info(
        self, rank: int, world_size: int, protocol: str, max_blocks: int = MAX_BLOCKS
    ) -> PlanInfo:
        """Return what a plan is told."""
        return PlanInfo(rank, world_size, protocol, SEGMENT_NBYTES, MAX_ROWS, max_blocks)

    def plan(self, info: PlanInfo, tensors: Tensors) -> Plan:
        """Return a plan, checked in its form."""
        return make_plan(self.plugin, info, [meta_of(tensor) for tensor in tensors])

    def cases(self, least: int = 1) -> Iterator[tuple[int, int]]:
        """Yield world sizes and numbers of rows."""
        for world_size in self.served(least):
            for rows in self.rows:
                yield world_size, rows

    def communicating(self) -> tuple[int, list[Tensors]]:
        """Return a world size of 2 or more, and inputs of a call whose ranks exchange something.

        Raises:
            SkipTest: It exchanges nothing.
        """
        world_size = self.served(2)[0]
        inputs = self.make(world_size, max(self.rows))
        if not self.plan(self.info(0, world_size, "push"), inputs[0]).exchanged:
            raise unittest.SkipTest("its ranks exchange nothing")
        return world_size, inputs


def same(got: torch.Tensor, want: torch.Tensor, tolerance: float = 0.0) -> bool:
    """Tell whether an output is right: equal bytes, or numbers within a tolerance."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if tolerance and close(got, want, tolerance):
        return True
    return torch.equal(_bytes(got), _bytes(want))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return dense(tensor.detach().cpu()).reshape(-1).view(torch.uint8)


def empty_like(outputs: Tensors, device: str = "cpu") -> Tensors:
    """Return tensors to write such outputs to: dense, whatever strides the reference gave them."""
    return tuple(torch.empty(one.shape, dtype=one.dtype, device=device) for one in outputs)


def as_tuple(results: torch.Tensor | Sequence[torch.Tensor]) -> Tensors:
    """Return what a call returned as a tuple."""
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)

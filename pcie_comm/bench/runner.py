"""One benchmark run, case by case. A case is an operation, ranks, rows and a memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from ..config import request_hardware_queues
from ..errors import CudaError, PeerAbortedError, UnsupportedError
from ..local import HARDWARE_QUEUES
from ..rank_facts import resolve_device
from . import contenders, provenance, workload, worlds
from .case import blank_row, measure
from .cold import ColdStage, open_eviction
from .measure import GraphStage, Lanes, Stage, ThreadStage
from .options import ROUTER, Options
from .report import Report, Row
from .torch_group import TorchGroups, open_groups
from .workload import Workload
from .worlds import Worlds

Advance = Callable[[str, str], None]
"""Called after each case with its name and what came of it."""


@dataclass(frozen=True)
class Setting:
    """What needs worlds of its own: a world size and a memory; and what is measured there."""

    ranks: int
    memory: str
    operations: tuple[str, ...]

    def name(self, op: str = "", rows: int = 0) -> str:
        """Return the setting, or a case in it, in words."""
        where = f"ranks={self.ranks}, {self.memory}"
        return f"{op}, {where}, rows={rows}" if op else where


def settings(options: Options) -> Iterator[Setting]:
    """Yield the settings of a run. The router, which talks to nobody, is measured on one rank."""
    if ROUTER in options.operations:
        yield Setting(1, options.memories[0], (ROUTER,))
    others = tuple(op for op in options.operations if op != ROUTER)
    if others:
        for memory in options.memories:
            for ranks in options.ranks:
                yield Setting(ranks, memory, others)


@dataclass(frozen=True)
class Place:
    """Where the cases of a setting run.

    Attributes:
        worlds: Of the setting.
        warm: Times with warm caches.
        cold: Times with evicted caches, or None.
        torch_groups: Of torch.distributed, or None.
    """

    worlds: Worlds
    warm: Stage
    cold: ColdStage | None
    torch_groups: TorchGroups | None


METHOD = {
    "unit": "one operation of all ranks; for a chain of launches, the whole chain",
    "order": "sample i starts with contender i mod n of its case; all in one process and one run",
    "outputs": "poisoned, checked after one run before the timing, poisoned and checked after it",
    "inputs": "random, never zeros, the same for all contenders of a case",
    "slots": "of a size that the rows of this run need",
}
GPU_METHOD = {
    "warm": "a replay of one graph that forks into a stream per rank, runs `ops` operations in "
    "each and joins; device time over `ops`",
    "cold": "a replay of a graph of rounds: an addition to a buffer of twice the second-level "
    "cache, a kernel larger than the instruction caches on all multiprocessors, fork, one "
    "operation of each rank, join; minus a replay of the evictions alone, over the rounds",
    "clocks": "small kernels for 0.3 s before each case",
}
CPU_METHOD = {"warm": "eager calls of ranks that are threads; wall time of the slowest over `ops`"}


class Bench:
    """A run.

    Args:
        options: What to measure.
        command: That started the run, for the report.

    Raises:
        InvalidArgumentError, UnsupportedError: The options do not fit this machine.
    """

    def __init__(self, options: Options, command: str) -> None:
        options.check()
        if options.device != "cpu":
            request_hardware_queues(HARDWARE_QUEUES)  # before anything makes a CUDA context
        device = resolve_device(options.device)
        on_gpu = device.type == "cuda"
        self.options = options.settled(on_gpu)
        self.on_gpu = on_gpu
        self.device = "cuda" if options.device == "cuda" else str(device)
        self.devices = [device]
        if self.device == "cuda":
            self.devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        self.report = Report(method={**METHOD, **(GPU_METHOD if on_gpu else CPU_METHOD)})
        plain = {f.name: getattr(self.options, f.name) for f in fields(self.options)}
        self.report.method["options"] = {
            name: str(value) if isinstance(value, Path) else value for name, value in plain.items()
        }
        self.command = command

    def cases(self) -> int:
        """Return the number of cases."""
        return sum(
            len(setting.operations) * len(self.options.rows) for setting in settings(self.options)
        )

    def run(self, advance: Advance) -> Report:
        """Measure everything; the report file is kept up to date after every setting.

        Raises:
            CommError: A call gave up, or nothing could be measured.
        """
        self.report.provenance = provenance.gather(self.devices, self.command)
        for setting in settings(self.options):
            self._run_setting(setting, advance)
            self._write()
        if not self.report.rows:
            why = "; ".join(f"{one.where}: {one.why}" for one in self.report.left_out)
            raise UnsupportedError(f"nothing could be measured: {why}", reason="no case is served")
        if not self.on_gpu:
            self.report.leave_out("floors and cold samples", "everywhere", "no GPU takes part")
        provenance.complete(self.report.provenance, self.devices[0])
        self.report.complete = True
        self._write()
        return self.report

    def _write(self) -> None:
        if self.options.out is not None:
            self.report.write(self.options.out)

    def _run_setting(self, setting: Setting, advance: Advance) -> None:
        with contextlib.ExitStack() as stack:
            try:
                opened = worlds.opened(setting.ranks, setting.memory, self.device, self.options)
                entered = stack.enter_context(opened)
            except (UnsupportedError, CudaError, PeerAbortedError) as error:
                self.report.leave_out("all", setting.name(), str(error))
                for _ in range(len(setting.operations) * len(self.options.rows)):
                    advance(setting.name(), "left out")
                return
            place = self._place(setting, entered)
            for op in setting.operations:
                for rows in self.options.rows:
                    try:
                        work = workload.make(op, rows, entered.devices)
                    except UnsupportedError as error:
                        self.report.leave_out(op, f"ranks={setting.ranks}", error.reason)
                        advance(setting.name(op, rows), "left out")
                        continue
                    found = self._run_case(work, place)
                    self.report.rows += found
                    advance(setting.name(op, rows), _summary(found))

    def _place(self, setting: Setting, entered: Worlds) -> Place:
        """Prepare what the cases of a setting share; note what this machine cannot do."""
        ops = self.options.ops
        torch_groups = None
        if setting.operations != (ROUTER,):
            torch_groups, why = open_groups(entered.devices)
            if why:
                self.report.leave_out("torch.distributed", f"ranks={setting.ranks}", why)
        if not self.on_gpu:
            return Place(entered, ThreadStage(entered.any, ops), None, torch_groups)
        lanes = Lanes(entered.devices)
        eviction, why = open_eviction(entered.any.groups) if self.options.cold else (None, "")
        if why:
            self.report.leave_out("cold samples", f"ranks={setting.ranks}", why)
        cold = ColdStage(lanes, eviction) if eviction else None
        return Place(entered, GraphStage(lanes, ops), cold, torch_groups)

    def _run_case(self, work: Workload, place: Place) -> list[Row]:
        sides = contenders.of_case(work, place.worlds, place.torch_groups)
        if self.on_gpu:
            floors, why = contenders.floors(place.worlds.any, work)
            sides += floors
            if why:
                self.report.leave_out("floors", "everywhere", why)
        if self.options.alone:
            sides = [side for side in sides if side.name in contenders.ALONE]
        samples = self.options.samples
        template = blank_row(work, place.worlds)
        rows = measure(place.warm, work, sides, samples, template)
        if place.cold is not None:
            rows += measure(place.cold, work, sides, samples, template)
        place.worlds.check()
        return rows


def _summary(rows: Sequence[Row]) -> str:
    """Return what came of a case, in a few words."""
    wrong = sum(not row.correct for row in rows)
    best = min((r for r in rows if r.contender == contenders.OURS), key=lambda r: r.median_us)
    verdict = f"{wrong} WRONG" if wrong else "right"
    return f"{best.median_us:.2f} us ({best.protocol}), {verdict}"

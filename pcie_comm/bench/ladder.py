"""`pcie-comm bench --ladder`: one call from a kilobyte to hundreds of megabytes per rank.

Beside it, in the same run and in turns, torch's `copy_` of the bytes that a rank receives: the
floor of any gather on one device. Ranks have groups with the default settings, so the ladder shows
what `auto` chooses, and where a call begins to take several launches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..config import Config
from ..errors import CudaError, PeerAbortedError, UnsupportedError
from ..kernels.pieces import plan_call
from ..kernels.registry import find
from ..local import local_world
from ..tensors import meta_of
from .case import blank_row, measure
from .contenders import NO_PROTOCOL, OURS, Contender, one_launch
from .measure import GraphStage, Lanes, Stage, ThreadStage
from .options import LADDER_OPERATIONS, LADDER_SIZES, TRANSPORTS, VRAM, Options
from .report import COPY, Row
from .runner import Advance, Bench, Setting
from .workload import SEED, Tensors, Workload
from .worlds import Worlds

GATHER, REDUCE = LADDER_OPERATIONS
ROW_NBYTES = 8192
"""Of a rank's row, if the size is no smaller: a model of 4096 columns in bf16."""

GRAPH_NBYTES = 4 << 20
"""A graph repeats an operation until each rank has sent about so much."""

MOST_ON_CPU = 1 << 20
TIMEOUT_S = 20.0


def settle(options: Options) -> Options:
    """Return the options of a ladder with everything chosen that was not given."""
    return replace(
        options,
        operations=options.operations or (GATHER, REDUCE),
        ranks=options.ranks or (4,),
        rows=(1,),
        protocols=options.protocols or ("auto",),
        samples=options.samples or 7,
        ops=options.ops or 64,
        cold=False,
    )


@dataclass(frozen=True)
class LadderWork(Workload):
    """A workload whose outputs are compared where they are: there are too many to move."""

    def faults(self, outputs: Sequence[Tensors], ours: bool) -> list[str]:
        """See Workload."""
        (wanted,) = self.expected
        return [
            f"rank {rank}: the output is wrong"
            for rank, (got,) in enumerate(outputs)
            if not torch.equal(got.view(torch.int16), wanted.to(got.device).view(torch.int16))
        ]


def make(op: str, nbytes: int, devices: Sequence[torch.device]) -> LadderWork:
    """Draw the inputs of an operation of so many bytes per rank."""
    rows = max(1, nbytes // ROW_NBYTES)
    shape = (rows, nbytes // rows // 2)
    inputs = []
    for rank, device in enumerate(devices):
        draw = torch.Generator(device).manual_seed(SEED + rank)
        low, high = -(1 << 15), 1 << 15
        bits = torch.empty(shape, dtype=torch.int16, device=device)
        bits.random_(low, high, generator=draw)
        values = bits.view(torch.bfloat16)
        if op == REDUCE:
            values = bits.to(torch.bfloat16)
        inputs.append((values,))
    together = [(one.to(devices[0]),) for (one,) in inputs]
    return LadderWork(op, rows, inputs, find(op).reference(together))


def copying(work: Workload) -> Contender:
    """What a rank receives, copied by torch: to its place in the output, or side by side."""
    size, (rows, width) = work.world_size, work.inputs[0][0].shape
    gathers = work.op == GATHER
    outputs = work.outputs() if gathers else []
    targets = []
    for rank, device in enumerate(work.devices):
        if gathers:
            places = list(outputs[rank][0].view(rows, size, width).unbind(1))
        else:
            room = torch.empty(size, rows, width, dtype=torch.bfloat16, device=device)
            places = list(room.unbind())
        targets.append(places)

    def enqueue(rank: int) -> None:
        for (shard,), place in zip(work.inputs, targets[rank], strict=True):
            place.copy_(shard, non_blocking=True)

    return Contender(COPY, NO_PROTOCOL, enqueue, outputs, local=enqueue)


def chosen(work: Workload, worlds: Worlds) -> str:
    """Return the protocol of a call, and how many launches it takes if that is more than one."""
    group = worlds.any.groups[0]
    channel = group.channel("default")
    metas = [meta_of(one) for one in work.inputs[0]]
    plan, pieces = plan_call(find(work.op), channel.info, metas)
    if group.device.type == "cpu":
        return channel.protocols()[0]
    plans = [piece.plan for piece in pieces] or [plan]
    names = "+".join(dict.fromkeys(str(one.kernel.variant[0]) for one in plans))
    return f"{names} x{len(plans)}" if pieces else names


class Ladder(Bench):
    """A run; see Bench."""

    def __init__(self, options: Options, command: str) -> None:
        given = settle(options)
        super().__init__(given, command)
        sizes = given.sizes or LADDER_SIZES
        if not self.on_gpu and not given.sizes:
            sizes = tuple(size for size in sizes if size <= MOST_ON_CPU)
        if self.on_gpu and not given.memories:
            self.options = replace(self.options, memories=(VRAM,))
        self.options = replace(self.options, sizes=sizes)
        self.report.method["ladder"] = (
            f"bytes per rank: {list(sizes)}; rows of {ROW_NBYTES} bytes or less, bf16; slots of "
            f"{Config().slot_nbytes} bytes; `{COPY}`: torch copies what a rank receives"
        )

    def cases(self) -> int:
        """Return the number of cases."""
        options = self.options
        settings = len(options.ranks) * len(options.memories)
        return settings * len(options.operations) * len(options.sizes)

    def _run_setting(self, setting: Setting, advance: Advance) -> None:
        config = Config(protocol=self.options.protocols[0], timeout_s=TIMEOUT_S)
        transport = TRANSPORTS[setting.memory]
        with contextlib.ExitStack() as stack:
            try:
                world = stack.enter_context(
                    local_world(setting.ranks, self.device, transport, config)
                )
            except (UnsupportedError, CudaError, PeerAbortedError) as error:
                self.report.leave_out("all", setting.name(), str(error))
                return
            worlds = Worlds(setting.memory, {config.protocol: world})
            lanes = Lanes(worlds.devices) if self.on_gpu else None

            def stage_of(ops: int) -> Stage:
                return GraphStage(lanes, ops) if lanes else ThreadStage(world, ops)

            for op in setting.operations:
                for size in self.options.sizes:
                    found = self._step(op, size, worlds, stage_of)
                    advance(f"{op}, {setting.name()}, {size} bytes", found)

    def _step(self, op: str, size: int, worlds: Worlds, stage_of: Callable[[int], Stage]) -> str:
        """Measure one size; return what came of it, in a few words."""
        try:
            rows = self._measured(op, size, worlds, stage_of)
        except torch.OutOfMemoryError as error:
            self.report.leave_out(op, f"ranks={len(worlds.devices)}, {size} bytes", str(error))
            return "left out"
        finally:
            if self.on_gpu:
                torch.cuda.empty_cache()
        self.report.rows += rows
        ours, copy = rows
        verdict = "right" if ours.correct and copy.correct else "WRONG"
        return f"{ours.median_us:.1f} us, copy {copy.median_us:.1f} us ({ours.protocol}), {verdict}"

    def _measured(
        self, op: str, size: int, worlds: Worlds, stage_of: Callable[[int], Stage]
    ) -> list[Row]:
        work = make(op, size, worlds.devices)
        ours = one_launch(OURS, chosen(work, worlds), worlds.any, work)
        stage = stage_of(max(1, min(self.options.ops, GRAPH_NBYTES // size)))
        template = blank_row(work, worlds)
        rows = measure(stage, work, [ours, copying(work)], self.options.samples, template)
        worlds.check()
        return rows

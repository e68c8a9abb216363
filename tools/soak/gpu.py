"""A soak of ranks as streams of one GPU: eager calls and replays, two channels, nothing waited for.

A lap draws new bytes for all calls, enqueues them on the ranks' streams without synchronising, some
eagerly and the rest as graphs of many calls, with pauses on random ranks' streams and copies beside
it, and then compares every output. The batches are those of tests/gpu/harness.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch

from pcie_comm import CommError, Config, local_world
from pcie_comm.local import LocalWorld

from .tally import Tally

ROWS = (1, 2, 8, 33)
REPLAYED, EAGER = 40, 8
"""Rounds of each batch in a lap."""

GRAPH_CALLS = 32
COPIES, COPY_NBYTES = 64, 4 << 20
LONGEST_PAUSE = 100_000
"""Cycles; 50 µs or so."""

STARTS = (0, 2**31 - 5000, 2**32 - 5000)


@dataclass(frozen=True)
class GpuSoak:
    """One part of a soak.

    Attributes:
        seed: Draws order, bytes and pauses.
        world_size: Number of ranks.
        protocol, overlap: Of the group.
        transport: `cuda_local` for VRAM, `host_pinned` for pinned memory.
        seconds, calls: It ends when one of them is reached; `calls` of all ranks.
        control: Name of the fault that it must find, or empty. It ends once it has.
        kernels: Folder of kernels that kernels.py built; None: the library's own.
    """

    seed: int
    world_size: int
    protocol: str
    transport: str
    seconds: float
    calls: int
    overlap: bool = False
    control: str = ""
    kernels: Path | None = None


@dataclass(frozen=True)
class Call:
    """One call of every rank: round `index` of a batch, on one of the channels."""

    batch: Any
    index: int
    lane: int

    def enqueue(self, lanes: Sequence[Any], rank: int) -> None:
        """Enqueue it on the current stream."""
        inputs, outputs = self.batch.views[self.index][rank]
        self.batch.enqueue(lanes[self.lane], inputs, outputs)


class Traffic:
    """Copies between host and device, on a stream of their own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._host = [torch.empty(COPY_NBYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
        self._device = [torch.empty_like(host, device=harness.DEVICE) for host in self._host]

    def enqueue(self) -> None:
        """Start copies in both directions."""
        with torch.cuda.stream(self._stream):
            for _ in range(COPIES):
                self._device[0].copy_(self._host[0], non_blocking=True)
                self._host[1].copy_(self._device[1], non_blocking=True)


class Driver:
    """Runs laps on an open world.

    Args:
        world: Its groups have loaded their kernels.
        soak: What to run.
    """

    def __init__(self, world: LocalWorld, soak: GpuSoak) -> None:
        self.world, self.soak, self.tally = world, soak, Tally()
        self._dice = random.Random(soak.seed)
        self._lanes = _open_lanes(world, soak.seed)
        self._batches = [
            (harness.make_batch(op, REPLAYED + EAGER, soak.world_size, rows), lane)
            for op in harness.ops_for(soak.world_size)
            for rows in ROWS
            for lane in range(2)
        ]
        calls = [self._calls(range(REPLAYED)), self._calls(range(REPLAYED, REPLAYED + EAGER))]
        self._dice.shuffle(calls[0])
        self._pieces = [
            calls[0][begin : begin + GRAPH_CALLS] for begin in range(0, len(calls[0]), GRAPH_CALLS)
        ]
        torch.cuda.synchronize()
        graphs = [[self._capture(rank, piece) for rank in self._ranks] for piece in self._pieces]
        self._work = [*zip(self._pieces, graphs, strict=True), *(([one], []) for one in calls[1])]
        self._traffic = Traffic()

    @property
    def _ranks(self) -> range:
        return range(self.soak.world_size)

    def _calls(self, rounds: range) -> list[Call]:
        return [Call(batch, index, lane) for batch, lane in self._batches for index in rounds]

    def _capture(self, rank: int, piece: Sequence[Call]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.world.streams[rank]):
            graph.capture_begin(capture_error_mode="thread_local")
            for call in piece:
                call.enqueue(self._lanes[rank], rank)
            graph.capture_end()
        return graph

    def lap(self, number: int) -> None:
        """Make every call once, in a new order; compare every output."""
        for batch, _ in self._batches:
            batch.refresh()
        torch.cuda.synchronize()
        self._dice.shuffle(self._work)
        self._traffic.enqueue()
        for piece, graphs in self._work:
            for rank in self._ranks:
                torch.cuda.set_stream(self.world.streams[rank])
                if self._dice.randrange(8) == 0:
                    _pause(self._dice.randrange(LONGEST_PAUSE))
                if graphs:
                    graphs[rank].replay()
                else:
                    piece[0].enqueue(self._lanes[rank], rank)
        harness.settle(self.world)
        self._compare(number)

    def _compare(self, number: int) -> None:
        order = [call for piece, _ in self._work for call in piece]
        rounds = sum(batch.rounds for batch, _ in self._batches)
        self.tally.calls += rounds * self.soak.world_size
        wrong = [_wrong(batch) for batch, _ in self._batches]
        counts = torch.stack([one.sum() for one in wrong]).tolist()
        if not any(counts):
            return
        bad = {
            id(batch): one.tolist() for (batch, _), one in zip(self._batches, wrong, strict=True)
        }
        for place, call in enumerate(order):
            for rank, is_wrong in enumerate(bad[id(call.batch)][call.index]):
                if is_wrong:
                    what = f"{call.batch.op} rows={call.batch.inputs[0].shape[2]} lane={call.lane}"
                    where = f"seed={self.soak.seed} lap={number} place={place} rank={rank} {what}"
                    self.tally.wrong(number * rounds + place, where)

    def sources(self) -> list[str]:
        """Return where the kernels came from."""
        kernels: Any = self.world.groups[0].describe()["kernels"]
        return sorted(set(kernels.values()))

    def run(self) -> None:
        """Run laps until it is time, or until a control was caught."""
        started, number, tally = time.monotonic(), 0, self.tally
        while tally.seconds < self.soak.seconds and tally.calls < self.soak.calls:
            self.lap(number)
            number += 1
            tally.seconds = time.monotonic() - started
            if self.soak.control and tally.mismatches:
                return


def _open_lanes(world: LocalWorld, seed: int) -> list[list[Any]]:
    """Return the two channels of every rank, with all kernels loaded and counters near a wrap."""
    lanes = world.run(lambda group: [group.channel("default"), group.channel("second")])
    for group in world.groups:
        for op in harness.ops_for(len(world.groups)):
            group.prepare(op)
    for lane in (one for own in lanes for one in own):
        lane.engine.seed_epoch(STARTS[seed % len(STARTS)])
    return lanes


def _wrong(batch: Any) -> torch.Tensor:
    """Return [rounds, world]: whether any byte of an output differs from what it must be."""
    found = torch.zeros(batch.flat_outputs.shape[:2], dtype=torch.bool, device=harness.DEVICE)
    for output, expected in zip(batch.outputs, batch.expected, strict=True):
        want = expected.contiguous().view(torch.uint8).flatten(1)
        got = output.contiguous().view(torch.uint8).flatten(2)
        found |= (got != want[:, None]).any(2)
    return found


def run(soak: GpuSoak) -> tuple[Tally, list[str]]:
    """Run one part; return what it found, and where its kernels came from."""
    config = Config(
        protocol=soak.protocol,
        overlap=soak.overlap,
        timeout_s=2.0 if soak.control else 10.0,
        slot_nbytes=1 << 20,
    )
    if soak.kernels is not None:
        config = replace(config, kernels_dir=soak.kernels)
    tally, sources = Tally(), [""]
    torch.manual_seed(soak.seed)
    try:
        with local_world(soak.world_size, harness.DEVICE, soak.transport, config) as world:
            driver = Driver(world, soak)
            tally = driver.tally
            sources = driver.sources()
            if soak.kernels and not all(one.startswith("ahead of time") for one in sources):
                tally.failure = f"not all kernels are those of {soak.kernels}: {sources}"
                return tally, sources
            driver.run()
    except (CommError, RuntimeError) as error:
        tally.failure = f"{type(error).__name__}: {error}"
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())
    return tally, sources


def warm_up() -> None:
    """Load what runs beside the ranks' kernels: a lazy load would wait for them."""
    harness.warm_up()
    _pause(1)
    torch.cuda.synchronize()


def _pause(cycles: int) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

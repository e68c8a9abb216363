"""A soak of ranks on the CPU, as threads or as processes, over host_shm."""

from __future__ import annotations

import multiprocessing
import multiprocessing.dummy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from pcie_comm import CommError, Config, PcieDcpGroup, local_world

from .engines import installed
from .pool import Pool, ops_for
from .script import draw_lap
from .tally import Tally, add_up

PATIENCE_S = 60.0
STARTS = (0, 2**31 - 700, 2**32 - 700)
"""Epochs to start from: most soaks pass a wrap of the counter."""


@dataclass(frozen=True)
class Soak:
    """One part of a soak.

    Attributes:
        seed: Draws calls, bytes and delays.
        world_size: Number of ranks.
        protocol: Of the group.
        seconds, calls: It ends when one of them is reached; `calls` of all ranks.
        control: Name of the fault that it must find, or empty. It ends once it has.
        processes: Ranks are processes instead of threads.
    """

    seed: int
    world_size: int
    protocol: str
    seconds: float
    calls: int
    control: str = ""
    processes: bool = False

    @property
    def config(self) -> Config:
        """Settings of the group."""
        return Config(
            protocol=self.protocol,
            timeout_s=5.0 if self.control else 20.0,
            setup_timeout_s=PATIENCE_S,
            slot_nbytes=1 << 20,
        )


class Pace:
    """Tells the ranks alike whether there is another lap.

    Rank 0 decides before all meet. It cannot decide again before all have read, since the next lap
    needs every rank.

    Args:
        soak: When to end.
        tools: `multiprocessing.dummy` for threads, or a context for processes.
    """

    def __init__(self, soak: Soak, tools: Any) -> None:
        self._soak = soak
        self._meeting = tools.Barrier(soak.world_size)
        self._over = tools.Value("i", 0)
        self._wrong = tools.Value("i", 0)
        self._deadline = 0.0

    def goes_on(self, rank: int, tally: Tally) -> bool:
        """Meet the other ranks; return whether there is another lap."""
        soak = self._soak
        self._deadline = self._deadline or time.monotonic() + soak.seconds
        if tally.mismatches:
            self._wrong.value = 1
        if rank == 0:
            done = tally.calls * soak.world_size >= soak.calls or time.monotonic() > self._deadline
            self._over.value = int(done or (bool(soak.control) and self._wrong.value))
        self._meeting.wait(PATIENCE_S)
        return not self._over.value

    def give_up(self) -> None:
        """Let nobody wait for this rank."""
        self._meeting.abort()


def soak_rank(group: PcieDcpGroup, soak: Soak, pace: Pace) -> Tally:
    """Make calls on one rank until the pace says that it is over. Collective."""
    tally, pool = Tally(), Pool(soak.seed, soak.world_size)
    lanes: list[Any] = [group.channel("default"), group.channel("second")]
    for lane in lanes:
        lane.engine.seed_epoch(STARTS[soak.seed % len(STARTS)])
    started = time.monotonic()
    try:
        for lap in count():
            for step in draw_lap(soak.seed, lap, ops_for(soak.world_size)):
                if not pool.call(lanes[step.lane], group.rank, step):
                    tally.wrong(step.number, f"seed={soak.seed} rank={group.rank} {step}")
                tally.calls += 1
            if not pace.goes_on(group.rank, tally):
                break
    except Exception as error:
        pace.give_up()
        group.abort()
        tally.failure = f"{type(error).__name__}: {error}"
    tally.seconds = time.monotonic() - started
    return tally


def soak_threads(soak: Soak) -> Tally:
    """Soak with a thread for each rank."""
    pace = Pace(soak, multiprocessing.dummy)
    with (
        installed(soak.control, soak.seed),
        local_world(soak.world_size, "cpu", config=soak.config) as world,
    ):
        return add_up(world.run(lambda group: soak_rank(group, soak, pace)))


def serve(rank: int, soak: Soak, pace: Pace, environment: dict[str, str], pipe: Connection) -> None:
    """Be one rank; send its tally."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        with (
            installed(soak.control, soak.seed),
            PcieDcpGroup(soak.world_size, "cpu", config=soak.config) as group,
        ):
            tally = soak_rank(group, soak, pace)
    except CommError as error:
        tally = Tally(failure=f"{type(error).__name__}: {error}")
    pipe.send(tally)


def soak_processes(soak: Soak) -> Tally:
    """Soak with a process for each rank."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pace, ranks, pipes = Pace(soak, context), [], []
    for rank in range(soak.world_size):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(soak.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_RUN_ID": "soak",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        here, there = context.Pipe()
        ranks.append(
            context.Process(target=serve, args=(rank, soak, pace, environment, there), daemon=True)
        )
        ranks[-1].start()
        there.close()
        pipes.append(here)
    try:
        deadline = time.monotonic() + soak.seconds + 2 * PATIENCE_S
        return add_up([_received(pipe, deadline) for pipe in pipes])
    finally:
        for process in ranks:
            process.join(5)
            process.kill()


def _received(pipe: Connection, deadline: float) -> Tally:
    """Return the tally of one rank."""
    if not wait([pipe], max(deadline - time.monotonic(), 0)):
        return Tally(failure="no tally in time")
    try:
        tally = pipe.recv()
    except EOFError:
        return Tally(failure="the process ended")
    assert isinstance(tally, Tally)
    return tally


def run(soak: Soak) -> Tally:
    """Run one part."""
    runner: Callable[[Soak], Tally] = soak_processes if soak.processes else soak_threads
    return runner(soak)

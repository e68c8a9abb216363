"""Runs one function on several ranks: as processes (`run_ranks`), or as threads (`run_threads`)."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

GRACE_S = 10.0
"""How long the other ranks may go on once one has failed: they have something to report as well."""

Environment = Mapping[str, str]


class RanksFailedError(AssertionError):
    """At least one rank failed, died or did not finish.

    Attributes:
        reports: Rank -> formatted traceback or what became of the process.
    """

    def __init__(self, reports: Mapping[int, str]) -> None:
        self.reports = dict(reports)
        texts = (f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in sorted(reports.items()))
        super().__init__("\n".join(["ranks failed", *texts]))


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    timeout_s: float = 60.0,
    args: Sequence[Any] = (),
    env: Environment | Sequence[Environment] | None = None,
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` in `world_size` new processes; return their results.

    Args:
        fn: A top-level function of an importable module.
        world_size: Number of processes.
        timeout_s: Limit for all of it. No process outlives the call.
        args: More arguments; picklable, like the results.
        env: Variables for every rank, or a list with those of each. RANK, WORLD_SIZE, LOCAL_RANK,
            MASTER_ADDR and MASTER_PORT are set as torchrun sets them.

    Raises:
        RanksFailedError: Holds the traceback of each rank that failed.
    """
    context = multiprocessing.get_context("spawn")
    shared = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    processes, pipes = [], []
    for rank in range(world_size):
        own = (env or {}) if isinstance(env, Mapping) or env is None else env[rank]
        variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **own}
        receiver, sender = context.Pipe(duplex=False)
        target = (fn.__module__, fn.__qualname__, rank, world_size, tuple(args))
        process = context.Process(
            target=_run_rank, args=(sender, variables, timeout_s, target), daemon=True
        )
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        outcomes = _collect(processes, pipes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()
    reports = {rank: text for rank, (succeeded, text) in outcomes.items() if not succeeded}
    if reports:
        raise RanksFailedError(reports)
    return [outcomes[rank][1] for rank in range(world_size)]


def _collect(
    processes: Sequence[BaseProcess], pipes: Sequence[Connection], timeout_s: float
) -> dict[int, tuple[bool, Any]]:
    """Return rank -> (succeeded, result or report), at the latest when time is up."""
    deadline = time.monotonic() + timeout_s
    outcomes: dict[int, tuple[bool, Any]] = {}
    pending = dict(enumerate(pipes))
    while pending:
        ready = wait(list(pending.values()), max(deadline - time.monotonic(), 0))
        if not ready:
            for rank in pending:
                outcomes[rank] = False, "still running when time was up; killed"
            break
        for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
            pipe = pending.pop(rank)
            try:
                outcomes[rank] = pipe.recv()
            except EOFError:
                processes[rank].join(5)
                outcomes[rank] = False, f"died with exit code {processes[rank].exitcode}"
            if not outcomes[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for rank, process in enumerate(processes):
        process.join(max(deadline - time.monotonic(), 0.1))
        if process.exitcode is None and outcomes[rank][0]:
            outcomes[rank] = False, "returned, but its process did not end; killed"
        elif process.exitcode and outcomes[rank][0]:
            outcomes[rank] = False, f"returned, but its process ended with {process.exitcode}"
    return outcomes


def _run_rank(
    sender: Connection,
    variables: Environment,
    timeout_s: float,
    target: tuple[str, str, int, int, tuple[Any, ...]],
) -> None:
    module, name, rank, world_size, args = target
    os.environ.update(variables)  # before torch or CUDA is imported
    faulthandler.dump_traceback_later(0.9 * timeout_s)  # shows where a hanging rank hangs
    try:
        fn = importlib.import_module(module)
        for part in name.split("."):
            fn = getattr(fn, part)
        outcome = True, fn(rank, world_size, *args)  # type: ignore[operator]
    except BaseException:
        outcome = False, traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    try:
        sender.send(outcome)
    except Exception:  # the result cannot be pickled
        sender.send((False, traceback.format_exc()))
    sender.close()


def run_threads(fn: Callable[..., Any], world_size: int, *, timeout_s: float = 60.0) -> list[Any]:
    """Call `fn(rank)` in `world_size` threads at once; return the results in rank order.

    A rank that raised is represented by its exception, so that a test can look at each.
    """
    results: list[Any] = [TimeoutError("thread did not end")] * world_size

    def on_rank(rank: int) -> None:
        try:
            results[rank] = fn(rank)
        except BaseException as error:  # pytest.fail's is no Exception
            results[rank] = error

    threads = [threading.Thread(target=on_rank, args=(r,), daemon=True) for r in range(world_size)]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    return results


def succeeded(results: Sequence[Any]) -> list[Any]:
    """Return results of `run_threads`, or raise the first exception among them."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)

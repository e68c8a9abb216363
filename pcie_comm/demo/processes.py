"""The demo with one process per rank, as torchrun would start them. This process is no rank."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from ..errors import CommError, PeerAbortedError, PeerDiedError, PeerTimeoutError
from ..group import PcieDcpGroup
from .player import DemoOptions, Player, RankReport, play

GRACE_S = 2.0
"""How long the others may still report after a first failure: theirs may be the cause."""

HOST = "127.0.0.1"


def run_processes(options: DemoOptions) -> list[RankReport]:
    """Play with one child process per rank; none of them outlives this call.

    Raises:
        CommError: A rank failed, died or did not finish in time; holds the first rank's reason
            that is not the echo of another's.
    """
    with _started(options) as (processes, pipes):
        texts = _collect(pipes, options.deadline_s)
        for rank in (rank for rank, text in texts.items() if not text):
            processes[rank].join(GRACE_S)  # it closed its pipe and is about to end
        codes = [process.exitcode for process in processes]
    messages = {rank: json.loads(text) for rank, text in texts.items() if text}
    failures = {rank: m for rank, m in messages.items() if "error" in m}
    causes = {rank: m for rank, m in failures.items() if not m["echo"]} or failures
    if causes:
        rank = min(causes)
        raise PeerAbortedError(f"rank {rank} failed: {causes[rank]['error']}")
    died = sorted(texts.keys() - messages.keys())
    if died:
        raise PeerDiedError(
            f"rank {died[0]} ended without a report (exitcode={codes[died[0]]}); "
            "its own output, above, may say why"
        )
    late = sorted(set(range(options.ranks)) - texts.keys())
    if late:
        raise PeerTimeoutError(
            f"ranks {', '.join(map(str, late))} did not finish within "
            f"deadline_s={options.deadline_s:g} and were ended; raise --deadline"
        )
    return [RankReport(**messages[rank]["report"]) for rank in range(options.ranks)]


@contextlib.contextmanager
def _started(options: DemoOptions) -> Iterator[tuple[list[SpawnProcess], list[Connection]]]:
    """Start the ranks; kill on the way out those that are still there."""
    context = multiprocessing.get_context("spawn")  # a fork would share CUDA and torch's threads
    processes: list[SpawnProcess] = []
    pipes: list[Connection] = []
    port = _free_port()
    try:
        for rank in range(options.ranks):
            ours, theirs = context.Pipe(duplex=False)
            pipes.append(ours)
            with theirs:  # closed here, so that the rank's end is the only one
                arguments = (rank, options, port, theirs)
                process = context.Process(target=_rank_main, args=arguments, daemon=True)
                process.start()
                processes.append(process)
        yield processes, pipes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for pipe in pipes:
            pipe.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _collect(pipes: list[Connection], deadline_s: float) -> dict[int, bytes]:
    """Return the message of every rank that sent one in time; empty for one that closed its pipe.

    Waits no longer than GRACE_S after the first rank that failed.
    """
    texts: dict[int, bytes] = {}
    deadline = time.monotonic() + deadline_s
    while len(texts) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in texts]
        ready = wait(open_pipes, max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        for rank in (rank for rank, pipe in enumerate(pipes) if pipe in ready):
            try:
                texts[rank] = pipes[rank].recv_bytes()
            except (EOFError, OSError):
                texts[rank] = b""
            if not texts[rank] or b'"error"' in texts[rank]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return texts


def _rank_main(rank: int, options: DemoOptions, port: int, pipe: Connection) -> None:
    """Be one rank: report through the pipe, as JSON."""
    launch = {"RANK": rank, "WORLD_SIZE": options.ranks, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in launch.items()})
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port))
    try:
        message: dict[str, object] = {"report": asdict(_play_rank(rank, options))}
    except CommError as error:
        text = f"{type(error).__name__}: {error}"
        message = {"error": text, "echo": isinstance(error, PeerAbortedError)}
    pipe.send_bytes(json.dumps(message).encode())


def _play_rank(rank: int, options: DemoOptions) -> RankReport:
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":  # the visible GPUs in turn, as local_world deals them
        device = f"cuda:{rank % max(torch.cuda.device_count(), 1)}"
    if device == "cpu":
        torch.set_num_threads(1)  # the ranks are the parallelism
    with PcieDcpGroup(options.ranks, device, transport=options.transport) as group:
        player = Player(group, options)

        def alone(step: Callable[[Player], None]) -> None:
            step(player)

        return play([player], alone, options.rounds)[0]

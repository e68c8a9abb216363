"""Lets ranks die, stop, exit, disagree and abort, at random, and checks what the others make of it.

Every round builds a group of processes, lets one fault happen to one rank, and demands of every
other rank: the right error with the right rank, in time; nothing left behind; a next group, of the
ranks that remain and in the same processes, that works. Every wait here has a deadline.

Usage: python tools/faults.py --count 200 --seed 1 --out build/faults.json
       python tools/faults.py --count 60 --device cuda --transport cuda_ipc --mps \
           --setup-timeout 20 --limit 60
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from fault_judge import Outcome, judge, summary, table  # noqa: E402
from fault_rank import Round, serve  # noqa: E402

STAGES = {
    "kill": ("setup", "call", "idle", "replay", "close"),
    "exit": ("setup", "call", "idle", "replay", "close"),
    "stop": ("call", "replay"),
    "mismatch": ("call",),
    "abort": ("call", "idle", "replay", "close"),
}


def draw_round(number: int, dice: random.Random, options: argparse.Namespace) -> Round:
    """Draw a fault."""
    kinds = options.kinds
    kind = kinds[number % len(kinds)] if kinds else dice.choice(list(STAGES))
    stage = dice.choice(STAGES[kind])
    world = dice.randint(2, options.world)
    members = tuple(dice.sample(range(options.world), world))
    count = dice.randint(1, world - 1) if kind == "kill" and stage != "setup" else 1
    victims = tuple(dice.sample(members, count))
    lost = kind in ("kill", "exit", "stop")
    return Round(
        number=number,
        kind=kind,
        stage=stage,
        members=members,
        victims=victims,
        survivors=tuple(rank for rank in members if not lost or rank not in victims),
        timeout_s=options.timeout,
        setup_timeout_s=options.setup_timeout,
        device=options.device,
        transport=options.transport,
        exit_code=dice.choice((0, 1, 3, 77)),
        orderly=dice.random() < 0.5,
        step=dice.randint(1, 5) if stage == "setup" else 0,
        ballast_nbytes=options.ballast << 20,
    )


class Ranks:
    """The processes. A rank that was lost is replaced before its next round."""

    def __init__(self, options: argparse.Namespace, port: int) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "pcie_comm", "fault_rank"])
        self._world, self._port = options.world, port
        self._processes: dict[int, BaseProcess] = {}
        self.pipes: dict[int, Connection] = {}

    def start(self, rank: int) -> None:
        """Start a rank, unless it runs."""
        if rank in self._processes:
            return
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_RUN_ID": "faults",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        here, there = self._context.Pipe()
        process = self._context.Process(target=serve, args=(rank, environment, there), daemon=True)
        process.start()
        there.close()
        self._processes[rank], self.pipes[rank] = process, here

    def pid(self, rank: int) -> int:
        """Return a rank's pid."""
        return self._processes[rank].pid or 0

    def remove(self, rank: int) -> None:
        """End a rank for good."""
        process = self._processes.pop(rank)
        process.kill()
        process.join(10)
        self.pipes.pop(rank).close()

    def close(self) -> None:
        """End all ranks."""
        for rank in list(self._processes):
            self.remove(rank)


def play_round(ranks: Ranks, plan: Round, limit_s: float) -> Outcome:
    """Play a round; return what came of it."""
    outcome = Outcome(plan)
    Path(plan.clock).write_text("")
    for rank in plan.members:
        ranks.start(rank)
    for rank in plan.members:
        ranks.pipes[rank].send(plan)
    lost = plan.kind in ("kill", "exit", "stop")
    expected = [rank for rank in plan.members if not lost or rank not in plan.victims]
    collect(ranks, expected, limit_s, outcome)
    if plan.kind == "stop":
        resume(ranks, plan, limit_s, outcome)
    elif lost:
        for rank in plan.victims:
            ranks.remove(rank)
    for rank in outcome.hung:
        ranks.remove(rank)
    judge(outcome)
    if any(report.lost for report in outcome.reports):
        ranks.close()  # a server of MPS that failed takes new clients once the old ones are gone
    return outcome


def collect(ranks: Ranks, expected: Sequence[int], limit_s: float, outcome: Outcome) -> None:
    """Wait for the reports of ranks; who does not report in time hangs."""
    pending, deadline = set(expected), time.monotonic() + limit_s
    while pending:
        ready = wait([ranks.pipes[rank] for rank in pending], max(deadline - time.monotonic(), 0))
        if not ready:
            break
        for rank in [rank for rank in pending if ranks.pipes[rank] in ready]:
            pending.remove(rank)
            try:
                outcome.reports.append(ranks.pipes[rank].recv())
            except EOFError:
                outcome.faults.append(f"rank {rank} ended on its own")
                ranks.remove(rank)
    outcome.hung += sorted(pending)


def resume(ranks: Ranks, plan: Round, limit_s: float, outcome: Outcome) -> None:
    """Let a stopped rank go on: it ends, with or without having missed the others."""
    if plan.exit_code == 77:  # in a quarter of these rounds it does not
        ranks.remove(plan.victims[0])
        return
    os.kill(ranks.pid(plan.victims[0]), signal.SIGCONT)
    before = len(outcome.reports)
    collect(ranks, plan.victims, limit_s, outcome)
    for report in outcome.reports[before:]:
        if report.error not in ("", "PeerAbortedError", "PeerTimeoutError"):
            outcome.faults.append(f"the resumed rank {report.rank} reports {report.error!r}")


def run(options: argparse.Namespace) -> list[Outcome]:
    """Play all rounds."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store, end = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), math.inf
    if options.seconds:
        end = time.monotonic() + options.seconds
    own = [*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(own)  # for the fork server
    ranks, dice, outcomes = Ranks(options, store.port), random.Random(options.seed), []
    with tempfile.NamedTemporaryFile() as clock, mps_server(options.mps):
        try:
            for number in range(options.count):
                if time.monotonic() > end:
                    break
                plan = draw_round(number, dice, options)
                plan = Round(**{**asdict(plan), "clock": clock.name})
                outcome = play_round(ranks, plan, options.limit)
                outcomes.append(outcome)
                for fault in outcome.faults:
                    print(f"round {number}, {plan.kind} in {plan.stage}: {fault}", flush=True)
        finally:
            ranks.close()
    return outcomes


@contextlib.contextmanager
def mps_server(wanted: bool) -> Iterator[None]:
    """Run an MPS server, so that the kernels of all processes run side by side on one GPU."""
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        for name in ("PIPE", "LOG"):
            os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = str(Path(root, name))
            Path(root, name).mkdir()
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # with 32, a third client gets no context
        control = "nvidia-cuda-mps-control"
        subprocess.run([control, "-d"], check=True, timeout=20)
        try:
            yield
        finally:
            subprocess.run([control], input=b"quit -t 5\n", check=False, timeout=30)


def files_left() -> list[str]:
    """Return the names that slabs and roll calls have left in /dev/shm."""
    from pcie_comm.transport.shared_memory import remove_stale_files

    remove_stale_files()  # as the next group on this host does
    return [path.name for path in Path("/dev/shm").glob("pcie_comm.*")]


def revision() -> str:
    """Return the revision of the tree, where git knows it."""
    command = ["git", "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()
    return ""


def brief(outcome: Outcome) -> dict[str, object]:
    """Return a round without what is the same in all of them."""
    told = asdict(outcome)
    for name in ("clock", "device", "transport", "timeout_s", "setup_timeout_s", "ballast_nbytes"):
        del told["plan"][name]
    told["reports"] = [
        {name: value for name, value in report.items() if value not in ("", None, 0, {})}
        for report in told["reports"]
    ]
    return told


def kinds_of(text: str) -> tuple[str, ...]:
    """Read a list of faults."""
    kinds = tuple(text.split(","))
    if unknown := set(kinds) - set(STAGES):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)} are none of {list(STAGES)}")
    return kinds


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="rounds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", type=kinds_of, default=(), help="in turn, with commas; all")
    parser.add_argument("--seconds", type=float, default=0.0, help="after which no round starts")
    parser.add_argument("--world", type=int, default=4, help="most ranks of a group")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--mps", action="store_true", help="with an MPS server for the run")
    parser.add_argument("--timeout", type=float, default=1.0, help="seconds, of a call")
    parser.add_argument("--setup-timeout", type=float, default=5.0, help="seconds")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds, of a round")
    parser.add_argument("--ballast", type=int, default=0, help="MiB that each rank touches")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Play, print the table, write JSON; return 1 if a round did not go as it must."""
    options, started = parse(argv), time.monotonic()
    outcomes = run(options)
    facts = {**summary(outcomes), "seconds": round(time.monotonic() - started, 1)}
    facts["files_left"] = files_left()
    print(table(outcomes))
    print(json.dumps(facts))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        told = {key: str(value) for key, value in vars(options).items() if key != "out"}
        told["revision"] = revision()
        lines = [json.dumps(brief(outcome)) for outcome in outcomes]
        head = json.dumps({"options": told, **facts})[:-1]
        options.out.write_text(head + ', "rounds": [\n' + ",\n".join(lines) + "\n]}\n")
    return 0 if facts["good"] == len(outcomes) and not facts["files_left"] else 1


if __name__ == "__main__":
    sys.exit(main())

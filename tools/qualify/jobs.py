"""Which jobs a qualification has, in their order, and which are left out and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from .runner import OUT

LIMIT, MOST_OF_LIMIT = "LIMIT", "MOST_OF_LIMIT"
"""In a command: the seconds that a job has, and those after which it should come to its end."""

PROCESSES, THREADS, TOPOLOGY, LATENCY, FAULTS = (
    "processes",
    "threads",
    "topology",
    "latency",
    "faults",
)
STEPS = (PROCESSES, THREADS, TOPOLOGY, LATENCY, FAULTS)
"""Most important first."""

LIMITS_S = {PROCESSES: 120.0, THREADS: 120.0, TOPOLOGY: 180.0, LATENCY: 150.0, FAULTS: 150.0}
CALLS = {"cuda": 100_000, "shared": 4_000, "cpu": 4_000}
FAULT_ROUNDS = {"cuda": 9, "shared": 6, "cpu": 3}
FAULT_KINDS = "kill,stop,mismatch"
MOST_RANKS = 16
CONTROLS = ("wrong_byte", "fail", "hang")

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""NVLink multicast stays off everywhere."""


@dataclass(frozen=True)
class Job:
    """One child process.

    Attributes:
        step: One of STEPS.
        command: OUT in it stands for the file that it writes its figures to.
        ranks: Of the world; 0 for a job without one.
        limit_s: Seconds after which it is ended.
        left_out: Why it is not run, or empty.
        environment: Variables of its own.
        prints: Its figures are what it prints, and not the file.
    """

    step: str
    command: tuple[str, ...] = ()
    ranks: int = 0
    limit_s: float = 60.0
    left_out: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    prints: bool = False

    def within(self, left_s: float) -> Job:
        """Return the job with no more time than is left, and its command complete."""
        limit_s = min(self.limit_s, left_s)
        seconds = {LIMIT: f"{limit_s:.0f}", MOST_OF_LIMIT: f"{limit_s * 0.6:.0f}"}
        command = tuple(seconds.get(part, part) for part in self.command)
        return replace(self, limit_s=limit_s, command=command)


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes:
        device: `cuda` or `cpu`.
        ranks: World sizes.
        gpus: GPUs that this process sees.
        share: More ranks than GPUs may share them.
        rounds: Of each case; 0: as many as CALLS calls need.
        only: Steps; empty: all.
        alone: Nothing of torch's stands beside this library in `latency`.
        control: Breaks jobs on purpose, from CONTROLS.
        has_typer: `pcie-comm` can run.
        limit_s: Seconds for a job, where that is less than LIMITS_S.
    """

    device: str
    ranks: tuple[int, ...]
    gpus: int = 0
    share: bool = False
    rounds: int = 0
    only: tuple[str, ...] = ()
    alone: bool = False
    control: str = ""
    has_typer: bool = True
    limit_s: float = 600.0

    def shares(self, ranks: int) -> bool:
        """Tell whether some of so many ranks share a GPU."""
        return self.device == "cuda" and ranks > self.gpus

    def fits(self, ranks: int) -> bool:
        """Tell whether so many ranks, as processes, may run."""
        return self.share or not self.shares(ranks)

    def kind(self, ranks: int) -> str:
        """Return `cuda`, `cpu`, or `shared` for ranks that share a GPU."""
        return "shared" if self.shares(ranks) else self.device


def _child(request: Request, step: str, ranks: int) -> Job:
    """Return a job of child.py."""
    limit_s = min(LIMITS_S[step], request.limit_s)
    command = ["python", "tools/qualify/child.py", step, "--world", str(ranks)]
    command += ["--device", request.device, "--limit", LIMIT]
    if step == LATENCY:
        command += ["--shared"] if request.shares(ranks) else []
        command += ["--alone"] if request.alone else []
    else:  # ranks that are threads take no turns on a GPU that they share
        kind = request.device if step == THREADS else request.kind(ranks)
        command += ["--rounds", str(request.rounds), "--calls", str(CALLS[kind])]
    if request.control:
        command += ["--control", request.control]
    queues = {QUEUES: "32" if step == THREADS else "8"}
    return Job(step, (*command, "--out", OUT), ranks, limit_s, environment=queues)


def _of_processes(request: Request, step: str) -> Iterator[Job]:
    for ranks in request.ranks:
        if request.fits(ranks):
            yield _child(request, step, ranks)
        else:
            why = f"{ranks} ranks want {ranks} GPUs, found {request.gpus}; --share lets them share"
            yield Job(step, ranks=ranks, left_out=why)


def _of_threads(request: Request) -> Iterator[Job]:
    """All GPUs with a rank each, and as many ranks as there can be."""
    fitting = [ranks for ranks in request.ranks if request.fits(ranks)]
    worlds = {max(fitting, default=2)}
    if request.device == "cuda":
        worlds = {min(request.gpus, MOST_RANKS), MOST_RANKS}
        if request.share or request.gpus == 1:
            worlds = {max(fitting, default=2)}
    for ranks in sorted(worlds):
        yield _child(request, THREADS, ranks)


def _topology(request: Request) -> Iterator[Job]:
    levels = ("--capability", "--verify", "--measure", "--quick")
    limit_s = min(LIMITS_S[TOPOLOGY], request.limit_s)
    if request.has_typer:
        wanted = levels if request.device == "cuda" else ()
        command: tuple[str, ...] = (
            "python",
            "-m",
            "pcie_comm",
            "topo",
            "--json",
            "--redact",
            *wanted,
        )
        yield Job(TOPOLOGY, command, limit_s=limit_s, prints=True)
    elif request.device == "cuda":
        probe = ("python", "tools/probe_topology.py", "--quick", "--redact", "--json", OUT)
        yield Job(TOPOLOGY, probe, limit_s=limit_s)
    else:
        yield Job(TOPOLOGY, left_out="typer is not installed, which pcie-comm needs")


def _faults(request: Request) -> Iterator[Job]:
    fitting = [ranks for ranks in request.ranks if request.fits(ranks)]
    if not fitting:
        yield Job(FAULTS, left_out=f"no world of {request.ranks} fits {request.gpus} GPUs")
        return
    ranks = max(fitting)
    limit_s = min(LIMITS_S[FAULTS], request.limit_s)
    command = ["python", "tools/faults.py", "--device", request.device, "--world", str(ranks)]
    command += ["--kinds", FAULT_KINDS, "--count", str(FAULT_ROUNDS[request.kind(ranks)])]
    command += ["--seconds", MOST_OF_LIMIT, "--out", OUT]
    if request.device == "cuda":
        command += ["--transport", "cuda_ipc", "--setup-timeout", "20", "--limit", "60"]
    yield Job(FAULTS, tuple(command), ranks, limit_s, environment={QUEUES: "8"})


def jobs(request: Request) -> list[Job]:
    """Return all jobs in their order."""
    found: list[Job] = []
    for step in STEPS:
        if request.only and step not in request.only:
            found.append(Job(step, left_out="--only names others"))
        elif step in (PROCESSES, LATENCY):
            found += _of_processes(request, step)
        elif step == THREADS:
            found += _of_threads(request)
        else:
            found += _topology(request) if step == TOPOLOGY else _faults(request)
    return found


def ranks_of(text: str) -> tuple[int, ...]:
    """Read a list of world sizes.

    Raises:
        ValueError: It is none.
    """
    found = tuple(int(part) for part in text.split(","))
    if not all(2 <= ranks <= MOST_RANKS for ranks in found):
        raise ValueError(f"give world sizes from 2 to {MOST_RANKS}")
    return found


def steps_of(text: str) -> tuple[str, ...]:
    """Read a list of steps.

    Raises:
        ValueError: There is no such step.
    """
    found = tuple(text.split(","))
    unknown: Sequence[str] = [step for step in found if step not in STEPS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(STEPS)}")
    return found

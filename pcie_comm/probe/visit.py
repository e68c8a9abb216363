"""Two processes address each other's slabs, as ranks of a group do: CUDA IPC, or shared memory.

Both run `attend`. Nothing here needs both kernels at once, so no MPS is needed: every step is
complete before the other process goes on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any

from ..errors import CommError
from ..topology.probed import HANG, HOST, NO_ACCESS, Check, worst
from ..transport import load
from ..transport.base import PeerMap, TransportInfo
from .gpu import Gpu
from .judge import Verdict, of_reads, of_writes
from .lab import Lab
from .pattern import Counts
from .region import Region
from .task import Answer, Task

PART_NBYTES = 1 << 20
FIRST = 4096
"""Where the first part of a slab begins, behind its header: it is read. The second is written."""

SLAB_NBYTES = FIRST + 2 * PART_NBYTES
PATIENCE_S, GRACE_S = 30.0, 5.0
SEEDS = ((11, 12, 13), (21, 22, 23))
"""Of each rank: what lies in its slab to be read, what did before, and what it writes."""


class VisitError(CommError):
    """The other process failed, or did not come.

    Attributes:
        verdict: What that makes of the check.
    """

    def __init__(self, message: str, verdict: str) -> None:
        super().__init__(message)
        self.verdict = verdict


class Company:
    """The other process, step by step."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def trade(self, value: Any) -> Any:
        """Give a value and return the other's; both have come this far then.

        Raises:
            VisitError: The other one failed, ended, or did not come in time.
        """
        try:
            self._pipe.send(("value", value))
            if not self._pipe.poll(PATIENCE_S):
                raise VisitError(f"the other process gave no answer in {PATIENCE_S:g} s", HANG)
            kind, found = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise VisitError("the other process ended", NO_ACCESS) from error
        if kind != "value":
            raise VisitError(f"in the other process: {found}", NO_ACCESS)
        return found

    def fail(self, reason: str, *, first: bool) -> None:
        """Tell the other one that this one failed; if it is the first to, wait until it knows.

        So it does not stumble over memory that is given back next.
        """
        with suppress(EOFError, OSError):
            self._pipe.send(("error", reason))
            if first and self._pipe.poll(GRACE_S):
                self._pipe.recv()


def transport_for(check: Check) -> str:
    """Return the transport that moves what a check is about."""
    return "host_pinned" if check.target == HOST else "cuda_ipc"


def attend(lab: Lab, task: Task, rank: int, company: Company) -> Mapping[str, Counts]:
    """Be one of the two processes; return what this one saw.

    Raises:
        CommError: A slab cannot be allocated or addressed, or the other process failed.
    """
    check = task.blanks[0]
    assert isinstance(check, Check)
    gpu = lab.gpu(check.source if rank == 0 or check.target == HOST else check.target)
    name = transport_for(check)
    transport = load(name)(TransportInfo(rank, 2, gpu.device.index))
    try:
        record = transport.allocate(SLAB_NBYTES)
        other = company.trade(record)
        peers = transport.map([record, other] if rank == 0 else [other, record])
        company.trade("mapped")
        transport.seal()
        found = _look(gpu, peers, rank, company)
        company.trade("looked")
        transport.unmap()
        company.trade("unmapped")
    except Exception as error:
        first = not isinstance(error, VisitError)
        company.fail(f"{type(error).__name__}: {error}", first=first)
        raise
    finally:
        with suppress(CommError):
            transport.free()
    return found


def _look(gpu: Gpu, peers: PeerMap, rank: int, company: Company) -> Mapping[str, Counts]:
    own, other = peers.addresses[rank], peers.addresses[1 - rank]
    (read, stale, _), (there, _, written) = SEEDS[rank], SEEDS[1 - rank]
    gpu.fill(_part(gpu, own, 0), read)
    gpu.fill(_part(gpu, own, 1), stale)
    gpu.synchronize()
    company.trade("filled")
    gpu.fill(_part(gpu, other, 1), SEEDS[rank][2])
    reader = gpu.count(_part(gpu, other, 0), there, 0)
    writer = gpu.count(_part(gpu, other, 1), SEEDS[rank][2], SEEDS[1 - rank][1])
    company.trade("stored")
    owner = gpu.count(_part(gpu, own, 1), written, stale)
    return {"reader": reader, "writer": writer, "owner": owner}


def _part(gpu: Gpu, slab: int, number: int) -> Region:
    return Region(gpu, PART_NBYTES, {gpu.name: slab + FIRST + number * PART_NBYTES})


def meet(lab: Lab, task: Task, pipe: Connection) -> Answer:
    """Be the first process: judge what both saw."""
    started = time.monotonic()
    company = Company(pipe)
    mine = attend(lab, task, 0, company)
    told = company.trade("done")
    theirs = {name: Counts(**counts) for name, counts in told.items()}
    verdicts = [_verdict(mine, theirs), _verdict(theirs, mine)]
    if len(task.blanks) == 1:
        name = worst([verdict for verdict, _ in verdicts])
        verdicts = [next(one for one in verdicts if one[0] == name)]
    elapsed_s = round(time.monotonic() - started, 3)
    checks = [blank for blank in task.blanks if isinstance(blank, Check)]
    return Answer(
        tuple(
            replace(check, verdict=verdict, detail=detail, elapsed_s=elapsed_s)
            for check, (verdict, detail) in zip(checks, verdicts, strict=True)
        )
    )


def _verdict(actor: Mapping[str, Counts], owner: Mapping[str, Counts]) -> Verdict:
    """Judge what one process did with the other's slab."""
    found = [of_writes(owner["owner"], actor["writer"]), of_reads(actor["reader"], None)]
    name = worst([verdict for verdict, _ in found])
    return next(one for one in found if one[0] == name)


def visit(lab: Lab, task: Task, pipe: Connection) -> None:
    """Be the second process: tell the first one what it saw."""
    company = Company(pipe)
    try:
        seen = attend(lab, task, 1, company)
        company.trade({name: asdict(counts) for name, counts in seen.items()})
    except CommError:
        return  # the first process was told, or is gone

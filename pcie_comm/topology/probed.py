"""Records of what was verified and measured on a machine. See probe/ for how, docs/topology.md.

A place is the name of a GPU, or `host`: pinned host memory. `source` is the GPU that acts, `target`
the place whose memory it is. A GPU with itself stands for two ranks that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from .record import Link, Reasons, Record, no_reasons

HOST = "host"
VRAM, PINNED = "vram", "pinned"
MEMORIES = (VRAM, PINNED)

OK = "OK"
NO_ACCESS = "NO-ACCESS"
DROPPED = "DROPPED"
MIRRORED = "MIRRORED"
CORRUPT = "CORRUPT"
HANG = "HANG"
SKIPPED = "SKIPPED"
VERDICTS = (OK, SKIPPED, NO_ACCESS, DROPPED, MIRRORED, CORRUPT, HANG)
"""From good to bad."""

FAULTS = (DROPPED, MIRRORED, CORRUPT, HANG)
"""What no group must rely on."""

SM, COPY_ENGINE = "SM", "copy engine"


@dataclass(frozen=True)
class Check(Record):
    """One way of moving bytes, tried and looked at from the owner's side.

    Attributes:
        source: Who acts.
        target: Whose memory it is.
        name: Of the check.
        verdict: One of VERDICTS. MIRRORED: only the writer sees what it wrote.
        detail: The evidence, or why it was skipped; empty if all is well.
        rounds: How often, for checks that repeat; else 0.
        elapsed_s: Seconds that it took.
    """

    source: str
    target: str
    name: str
    verdict: str
    detail: str = ""
    rounds: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class Gap(Record):
    """Why a cell of a matrix is empty."""

    row: str
    column: str
    reason: str


@dataclass(frozen=True)
class ExchangePoint(Record):
    """Microseconds that two ranks take to exchange, by protocol.

    Attributes:
        nbytes: That a rank receives in all, its own included, as Limits count.
        pull_us, push_us, tagged_us: One exchange, between resident kernels.
    """

    nbytes: int
    pull_us: float | None = None
    push_us: float | None = None
    tagged_us: float | None = None
    unknown: Reasons = field(default_factory=no_reasons)


@dataclass(frozen=True)
class Exchange(Record):
    """Times of the three protocols between two ranks.

    Attributes:
        source, target: GPUs of the ranks; equal if they share one.
        memory: Where the slabs lie: `vram` or `pinned`.
        points: By size.
    """

    source: str
    target: str
    memory: str
    points: tuple[ExchangePoint, ...] | None = None
    unknown: Reasons = field(default_factory=no_reasons)


@dataclass(frozen=True)
class LadderPoint(Record):
    """Microseconds of one transfer of a size, its launch included."""

    nbytes: int
    us: float


@dataclass(frozen=True)
class Ladder(Record):
    """Time of a transfer by its size.

    Attributes:
        engine: `copy engine` or `SM`.
        access: `read` or `write`, as the source does it.
    """

    source: str
    target: str
    engine: str
    access: str
    points: tuple[LadderPoint, ...] | None = None
    unknown: Reasons = field(default_factory=no_reasons)


@dataclass(frozen=True)
class Flow(Record):
    """One of several transfers at once.

    Attributes:
        gbps: GB/s while the others run.
        alone_gbps: GB/s of the same transfer alone.
    """

    source: str
    target: str
    gbps: float | None = None
    alone_gbps: float | None = None
    unknown: Reasons = field(default_factory=no_reasons)


@dataclass(frozen=True)
class Pattern(Record):
    """Several transfers at once, by the GPUs themselves.

    Attributes:
        name: Of the pattern.
        place: Which of several: the address of an uplink, or nothing.
        access: `write` or `read`.
        flows: The transfers.
        gbps: GB/s of all together, from the first start to the last end.
    """

    name: str
    place: str
    access: str
    flows: tuple[Flow, ...] | None = None
    gbps: float | None = None
    unknown: Reasons = field(default_factory=no_reasons)


@dataclass(frozen=True)
class LinkLoad(Record):
    """A GPU's link while it carried traffic, and what was counted from before until after.

    Attributes:
        gpu: Its name.
        driver: As NVML reported it.
        sysfs: As sysfs did.
        replays: Growth of NVML's PCIe replay counter.
        errors: Growth of AER counters of the devices from the GPU up to its root, those that grew,
            as `ADDRESS KIND NAME`.
    """

    gpu: str
    driver: Link | None = None
    sysfs: Link | None = None
    replays: int | None = None
    errors: Mapping[str, int] | None = None
    unknown: Reasons = field(default_factory=no_reasons)


UPLINK = "all sources of one uplink at once"
TWO_ROOTS = "two sources of one switch to two roots"
ONE_ROOT = "control: two sources of one switch to one root"
TWO_SWITCHES = "control: two sources of two switches to two roots"
"""Names of patterns that rules look at; the controls tell the one cause from the other."""

NAMES = ("source", "target", "gpu", "row", "column")

R = TypeVar("R", bound=Record)


def renamed(record: R, new: Callable[[str], str]) -> R:
    """Return a record of this module with other names of GPUs in it."""
    changed: dict[str, Any] = {}
    for item in fields(record):
        value = getattr(record, item.name)
        if item.name in NAMES:
            changed[item.name] = new(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Record):
            changed[item.name] = tuple(renamed(one, new) for one in value)
    return replace(record, **changed)


def best_us(exchange: Exchange) -> float | None:
    """Return the microseconds of the fastest protocol at the smallest size; None if unknown."""
    first = exchange.points[0] if exchange.points else None
    if first is None:
        return None
    times = (first.pull_us, first.push_us, first.tagged_us)
    return min((us for us in times if us is not None), default=None)


def worst(verdicts: list[str]) -> str:
    """Return the worst of some verdicts."""
    return max(verdicts, key=VERDICTS.index)

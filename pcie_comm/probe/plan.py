"""Which tasks verify and measure a host. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..topology.model import Host, expand_ranges
from ..topology.probed import (
    COPY_ENGINE,
    HOST,
    MEMORIES,
    PINNED,
    SM,
    Check,
    Exchange,
    Ladder,
    LinkLoad,
    Pattern,
)
from .kernels import PROTOCOLS
from .pattern_plan import plans
from .task import Figure, Task, blank_check, missing

LITMUS_DEADLINE_S = 90.0
COLLECTIVE_DEADLINE_S = 180.0
COPY_NBYTES = {"copy 8 B": 8, "copy 64 MiB": 64 << 20}
PAIR_KINDS = ("ce-write", "ce-read", "ce-both", "sm-write", "sm-read", "sm-both")
HOST_KINDS = tuple(f"host-{kind}" for kind in PAIR_KINDS)


@dataclass(frozen=True)
class Scale:
    """How thoroughly.

    Attributes:
        litmus_rounds, flag_rounds, exchange_rounds: Of kernels that play with each other.
        budget_s: Seconds of a timed transfer.
        nbytes: Of one.
    """

    litmus_rounds: int = 100_000
    flag_rounds: int = 10_000
    exchange_rounds: int = 1000
    budget_s: float = 0.1
    nbytes: int = 64 << 20

    @property
    def transfer(self) -> dict[str, Any]:
        """Options of a timed transfer."""
        return {"nbytes": self.nbytes, "budget_s": self.budget_s}


FULL = Scale()
QUICK = Scale(10_000, 2000, 200, 0.02, 16 << 20)

Names = Mapping[str, int]
"""GPUs and their CUDA ordinals, in the order of ranks."""


def verify(names: Names, scale: Scale) -> list[Task]:
    """Return the tasks of level 3."""
    pairs = [*itertools.combinations_with_replacement(names, 2), *((name, HOST) for name in names)]
    tasks = [task for pair in pairs for task in _ways(names, pair, scale)]
    tasks += [_visit(names, pair) for pair in pairs]
    ends = [*itertools.permutations(names, 2)] or [(name, name) for name in names]
    blanks = [blank_check(*pair, "all at once") for pair in (*ends, *((n, HOST) for n in names))]
    tasks.append(Task("all at once", names, tuple(blanks), seconds=1.0 + 0.1 * len(blanks)))
    return tasks + [_collective(names, pair) for pair in pairs]


def _directions(pair: tuple[str, str]) -> list[tuple[str, str]]:
    """Return both directions of a pair of GPUs; one for a GPU with itself, or with the host."""
    return [pair] if pair[0] == pair[1] or pair[1] == HOST else [pair, pair[::-1]]


def _ways(names: Names, pair: tuple[str, str], scale: Scale) -> Iterator[Task]:
    for ends in _directions(pair):
        for work in ("store", "load"):
            yield Task(work, names, (blank_check(*ends, work),))
        for name, nbytes in COPY_NBYTES.items():
            yield Task("copy", names, (blank_check(*ends, name),), {"nbytes": nbytes})
    for protocol in PROTOCOLS:
        blanks = tuple(blank_check(*ends, f"litmus {protocol}") for ends in _directions(pair))
        options = {"protocol": protocol, "rounds": scale.litmus_rounds}
        seconds = 0.2 + 5e-6 * scale.litmus_rounds
        yield Task("litmus", names, blanks, options, seconds, LITMUS_DEADLINE_S)


def _visit(names: Names, pair: tuple[str, str]) -> Task:
    blanks = tuple(blank_check(*ends, "ipc") for ends in _directions(pair))
    return Task("visit", names, blanks, seconds=2.0, visitor=True)


def _collective(names: Names, pair: tuple[str, str]) -> Task:
    blanks = tuple(blank_check(*pair, f"collective {how}") for how in ("eager", "captured"))
    return Task("collective", names, blanks, {}, 3.0, COLLECTIVE_DEADLINE_S, "torch")


def measure(host: Host, names: Names, scale: Scale) -> list[Task]:
    """Return the tasks of level 4. Copies without peer access come first, before it is enabled."""
    others = [*itertools.permutations(names, 2)]
    pairs = [*((name, name) for name in names), *others]
    unordered = [*itertools.combinations_with_replacement(names, 2)]
    tasks = [_figure(names, "ce-staged", pair, scale) for pair in others]
    tasks += [_figure(names, kind, pair, scale) for pair in pairs for kind in PAIR_KINDS]
    for name in names:
        tasks += _of_host(host, names, name, scale)
    tasks += [Task("chase", names, (Figure("chase", *pair, unknown=_OPEN),)) for pair in pairs]
    tasks += [_flag(names, pair, scale) for pair in unordered]
    tasks += [
        _exchange(names, Exchange(*pair, memory, unknown=_OPEN), scale)
        for pair in unordered
        for memory in MEMORIES
    ]
    tasks += _ladders(names, scale)
    tasks += _patterns(host, names, scale)
    tasks.append(_links(host, names))
    return [replace(task, group="measure") for task in tasks]


_OPEN = {"*": "it was not run"}


def _figure(names: Names, kind: str, pair: tuple[str, str], scale: Scale) -> Task:
    blank = Figure(kind, *pair, unknown=_OPEN)
    return Task("bandwidth", names, (blank,), scale.transfer, 0.1 + 2 * scale.budget_s)


def _of_host(host: Host, names: Names, name: str, scale: Scale) -> Iterator[Task]:
    """Yield a GPU's figures with the host's memory: of any NUMA node, and of each of several."""
    nodes: list[tuple[str, dict[str, Any]]] = [(HOST, {})]
    known = [node for node in host.system.numa or () if node.cpus]
    if len(known) > 1:
        nodes += [
            (f"node{node.index}", {"node": node.index, "cpus": expand_ranges(node.cpus or "")})
            for node in known
        ]
    for column, options in nodes:
        for kind in HOST_KINDS:
            blank = Figure(kind, name, column, unknown=_OPEN)
            facts = {**scale.transfer, **options}
            yield Task("host bandwidth", names, (blank,), facts, 0.4 + 2 * scale.budget_s)
    yield Task("chase", names, (Figure("host-chase", name, HOST, unknown=_OPEN),))
    blank = Figure("host-flag", name, HOST, unknown=_OPEN)
    yield Task("flag", names, (blank,), {"rounds": scale.flag_rounds})


def _flag(names: Names, pair: tuple[str, str], scale: Scale) -> Task:
    blanks = tuple(Figure("flag", *ends, unknown=_OPEN) for ends in _directions(pair))
    return Task("flag", names, blanks, {"rounds": scale.flag_rounds})


def _exchange(names: Names, blank: Exchange, scale: Scale) -> Task:
    slow = 3 if blank.memory == PINNED else 1
    seconds = 0.3 + 3e-4 * slow * scale.exchange_rounds
    title = f"exchange in {blank.memory} {blank.source} - {blank.target}"
    options = {"rounds": scale.exchange_rounds, "title": title}
    return Task("exchanges", names, (blank,), options, seconds, 200.0)


def _ladders(names: Names, scale: Scale) -> Iterator[Task]:
    """Yield ladders of the first GPU: with itself, with the others, with the host."""
    first = next(iter(names))
    for target in (*names, HOST):
        for engine, access in itertools.product((SM, COPY_ENGINE), ("write", "read")):
            blank = Ladder(first, target, engine, access, unknown=_OPEN)
            title = f"sizes, {engine} {access} {first} -> {target}"
            options = {"budget_s": scale.budget_s / 5, "title": title}
            yield Task("ladder", names, (blank,), options, 0.3 + scale.budget_s)


def _patterns(host: Host, names: Names, scale: Scale) -> Iterator[Task]:
    for plan in plans(host, list(names)):
        for access in ("write", "read"):
            reason = plan.reason or _OPEN["*"]
            blank = missing(Pattern, plan.name, plan.place, access, reason=reason)
            title = f"{plan.name}, {access}"
            options = {**scale.transfer, "flows": plan.flows, "title": title}
            work = "pattern" if plan.flows is not None else ""
            seconds = 0.5 + 6 * scale.budget_s if work else 0.0
            yield Task(work, names, (blank,), options, seconds, 120.0)


def _links(host: Host, names: Names) -> Task:
    known = {gpu.name: (gpu.address, gpu.uuid) for gpu in host.gpus or ()}
    blanks = tuple(LinkLoad(name, unknown=_OPEN) for name in names)
    options = {"gpus": {name: known[name] for name in names}, "title": "links under load"}
    return Task("links", names, blanks, options, 1.5)


def pairs_of(task: Task) -> set[tuple[str, str]]:
    """Return the pairs of places that a task lets act on each other."""
    found = set()
    for blank in task.blanks:
        if isinstance(blank, Figure):
            column = HOST if blank.kind.startswith("host-") else blank.column
            found.add((blank.row, column))
        elif isinstance(blank, (Check, Exchange, Ladder)):
            pinned = isinstance(blank, Exchange) and blank.memory == PINNED
            found |= {(blank.source, HOST)} if pinned else {(blank.source, blank.target)}
        elif isinstance(blank, Pattern):
            found |= set(task.options["flows"] or ())
    return found

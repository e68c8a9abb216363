"""A kernel as a graph of instructions, from PTX or SASS. The rules of order: order_rules.py.

What an instruction is to the protocol is its role, so the rules exist once, for both kinds of code.
PTX is checked for more: `ptx_code` knows which addresses a kernel read out of memory. `sass_code`
knows how ptxas spells release and acquire.

Ways that no execution takes are left out, as far as constants show it: a loop that does something
in its first turn only compares its counter with 0, and the counter starts at 0.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "kernel_report.py"
SILENT_OPS = {"kimi_topk16", "router_topk"}


def _load(file: Path):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


report = _load(TOOL)


def caught(what: str, findings: Collection[str]) -> bool:
    """Whether a finding matches; the others are shown if not."""
    assert any(re.search(what, one) for one in findings), findings
    return True


@dataclass(frozen=True)
class Kind:
    """Which rules a kernel is under.

    Attributes:
        communicates: It has peers.
        tagged: They exchange tagged units.
        overlaps: It may be dispatched before its predecessor has ended.
        counts: It writes down how long it waited.
    """

    communicates: bool
    tagged: bool
    overlaps: bool
    counts: bool = False

    @classmethod
    def of(cls, key: str, arch: str) -> Kind:
        op, *variant = key.split("-")
        generation = int(re.match(r"sm_(\d+)", arch)[1])
        counts = "stats" in variant
        return cls(op not in SILENT_OPS, "tagged" in variant, generation >= 90, counts)


class Role(Enum):
    """What an instruction is to the protocol."""

    OTHER = "other"
    BARRIER = "barrier of the whole block"
    STORE = "weak store to this rank's memory"
    STAGE = "weak store through an address out of memory"
    RELEASE = "release of a flag, 64 bits"
    STATUS = "release of the status code, 32 bits"
    ACQUIRE = "acquire of a flag"
    RELAXED = "relaxed load at system scope"
    ANNOUNCE = "announcement of a flag, 64 bits"
    RELAY = "announcement to this rank's other blocks"
    UNIT_STORE = "store of a unit"
    UNIT_LOAD = "load of a unit"
    CLAIM = "claim of the poison word"
    BEGIN = "note that the launch has begun"
    COUNT = "reduction of a counter"
    PREDECESSOR = "wait for the predecessor"
    SUCCESSOR = "permission for the successor"


@dataclass(frozen=True)
class Instruction:
    """One instruction, as far as the order rules need it."""

    text: str
    role: Role
    touches: bool = False
    """Whether it accesses global memory, or orders such accesses."""


State = dict[str, int]
"""Registers and the constants they hold."""

Follow = Callable[[int, State], tuple[State, Collection[int]]]
"""From a place and the state before it, return the state behind it and the places that may be next.

The less is known, the more places there are.
"""


def explore(
    follow: Follow, walls: Collection[int] = ()
) -> tuple[dict[int, State], dict[int, Collection[int]]]:
    """Return what is known at each place that execution may reach, and the places next to it.

    A register is known where every way from the entry leaves the same constant in it. At a wall
    execution ends.
    """
    known: dict[int, State] = {0: {}}
    successors: dict[int, Collection[int]] = {}
    waiting = [0]
    while waiting:
        place = waiting.pop()
        state, followers = follow(place, known[place])
        successors[place] = () if place in walls else followers
        for follower in successors[place]:
            before = known.get(follower)
            if before is None:
                known[follower] = state
            else:
                common = {name: one for name, one in before.items() if state.get(name) == one}
                if len(common) == len(before):
                    continue
                known[follower] = common
            waiting.append(follower)
    return known, successors


@dataclass(frozen=True)
class Program:
    """A kernel: its instructions as they stand, and how execution goes on from each of them."""

    instructions: Sequence[Instruction]
    follow: Follow
    walls: frozenset[int] = frozenset()

    @cached_property
    def successors(self) -> dict[int, Collection[int]]:
        return explore(self.follow, self.walls)[1]

    def places(self, *roles: Role) -> set[int]:
        return {place for place, one in enumerate(self.instructions) if one.role in roles}

    def until(self, walls: Iterable[int]) -> Program:
        """Return the part that runs before `walls`."""
        return replace(self, walls=frozenset(walls))

    def after(self, places: Iterable[int]) -> set[int]:
        return {follower for place in places for follower in self.successors.get(place, ())}

    def reach(self, starts: Iterable[int], stops: Collection[int] = ()) -> set[int]:
        """Return what execution may reach from `starts`, them included, up to the next stop."""
        seen: set[int] = set()
        waiting = list(starts)
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen.add(place)
                if place not in stops:
                    waiting.extend(self.successors.get(place, ()))
        return seen

    def leading_to(self, places: Iterable[int], goals: Collection[int]) -> set[int]:
        """Return those of `places` from which one of `goals` may follow."""
        return {place for place in places if not self.reach(self.after([place])).isdisjoint(goals)}

    def named(self, findings: dict[str, Collection[int]]) -> list[str]:
        """Return findings as text, one for each place."""
        return [
            f"{what}: {self.instructions[place].text}"
            for what, places in findings.items()
            for place in sorted(places)
        ]


def forbidden(
    opcodes: Iterable[str], memory: re.Pattern[str], allowed: re.Pattern[str]
) -> list[str]:
    """Return the memory instructions among `opcodes` that no kernel of this kind may have."""
    bad = {one for one in opcodes if memory.match(one) and not allowed.fullmatch(one)}
    return [f"forbidden instruction: {one}" for one in sorted(bad)]

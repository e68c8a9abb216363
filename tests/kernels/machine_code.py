"""A kernel as a graph of instructions, from PTX or SASS, and the order that the protocol needs.

Checks return their findings as text; none means that the code is right. What an instruction is to
the protocol is its role, so the rules of order exist once, for both kinds of code. PTX is checked
for more: `ptx_code` knows which addresses a kernel read out of memory. `sass_code` knows how ptxas
spells release and acquire.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "kernel_report.py"


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


class Role(Enum):
    """What an instruction is to the protocol."""

    OTHER = "other"
    BARRIER = "barrier of the whole block"
    STAGE = "weak store through an address out of memory"
    RELEASE = "release of a flag, 64 bits"
    STATUS = "release of the status code, 32 bits"
    ACQUIRE = "acquire of a flag"
    RELAXED = "relaxed load at system scope"


@dataclass(frozen=True)
class Instruction:
    """One instruction, as far as the order rules need it."""

    text: str
    role: Role


@dataclass(frozen=True)
class Program:
    """A kernel: its instructions as they stand, and for each the places that may be next."""

    instructions: Sequence[Instruction]
    successors: Sequence[Collection[int]]

    def places(self, role: Role) -> list[int]:
        return [place for place, one in enumerate(self.instructions) if one.role is role]

    def after(self, places: Iterable[int]) -> set[int]:
        return {follower for place in places for follower in self.successors[place]}

    def reach(self, starts: Iterable[int], *, through_barriers: bool = False) -> set[int]:
        """Return what execution may reach from `starts`, them included, up to the next barrier."""
        seen: set[int] = set()
        waiting = list(starts)
        while waiting:
            place = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            if through_barriers or self.instructions[place].role is not Role.BARRIER:
                waiting.extend(self.successors[place])
        return seen

    def watched(self) -> set[int]:
        """Return the relaxed loads inside the wait: those from which an acquire may follow."""
        acquires = set(self.places(Role.ACQUIRE))
        return {
            place
            for place in self.places(Role.RELAXED)
            if self.reach([place], through_barriers=True) & acquires
        }

    def first_two_phases(self) -> tuple[set[int], set[int]]:
        """Return what runs before the first barrier, and what may run before the second."""
        first = self.reach([0])
        barriers = [p for p in first if self.instructions[p].role is Role.BARRIER]
        return first, self.reach(self.after(barriers))


def order_findings(program: Program) -> list[str]:
    """Check docs/protocol.md, steps 2 to 8: stage, barrier, release, acquire, barrier, collect."""
    findings = [
        f"no {role.value}"
        for role in (Role.RELEASE, Role.STATUS, Role.ACQUIRE)
        if not program.places(role)
    ]
    watched = program.watched()
    collected = set(program.places(Role.RELAXED)) - watched
    if not collected:
        findings.append("nothing is collected by relaxed loads at system scope")
    if len(watched) != 2:
        findings.append(f"a wait watches abort and poison word, here {len(watched)} words")
    first, second = program.first_two_phases()
    release = set(program.places(Role.RELEASE))
    staged = program.after(program.places(Role.STAGE))
    acquired = program.after(program.places(Role.ACQUIRE))
    rules = {
        "release before the first barrier": first & release,
        "acquire before the first barrier": first & set(program.places(Role.ACQUIRE)),
        "no barrier between staging and release": program.reach(staged) & release,
        "no barrier between acquire and collecting": program.reach(acquired) & collected,
        "collecting before the second barrier": (first | second) & collected,
    }
    return findings + [
        f"{rule}: {program.instructions[place].text}"
        for rule, places in rules.items()
        for place in sorted(places)
    ]


def forbidden(
    opcodes: Iterable[str], memory: re.Pattern[str], allowed: re.Pattern[str]
) -> list[str]:
    """Return the memory instructions among `opcodes` that no kernel may have."""
    bad = {one for one in opcodes if memory.match(one) and not allowed.fullmatch(one)}
    return [f"forbidden instruction: {one}" for one in sorted(bad)]

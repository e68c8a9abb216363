"""A warp that a wait has parted must be together again before a branch with a barrier in it.

A loop that spins yields; lanes that wait for it at its end (BSYNC) may go on without the others.
WARPSYNC brings them together. But a branch that begins before (BSSY) notes only the lanes that are
there; behind a barrier inside of it the warp parts for good, and arrives at the next barrier twice.
Seen on an H200: the launch never ended. docs/protocol.md has the story.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

MEETING = re.compile(r"WARPSYNC(\.ALL| 0xffffffff)|BRA\.CONV ~URZ.*")
"""BRA.CONV, up to sm_89, leaves out a WARPSYNC where the whole warp is there already."""

STRONG = re.compile(r"LDG\..*STRONG\.SYS")


def meeting_findings(code: Sequence, followers: Callable[[int], set[int]]) -> list[str]:
    """Return the branches with a barrier in them that a parted warp may enter.

    Args:
        code: Instructions.
        followers: What may come behind a place.
    """
    place_of = {one.address: place for place, one in enumerate(code)}
    findings = set()
    waiting = list(_ends_of_waits(code, place_of))
    seen: set[int] = set()
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        one = code[place]
        if _is_meeting(one):
            continue
        if one.opcode.startswith("BSSY") and _has_barrier(code, place, place_of):
            findings.add(f"a parted warp enters a branch with a barrier: {one.address:#06x}")
        waiting.extend(followers(place))
    return sorted(findings)


def _target(one: object) -> int:
    return int(one.operands[-1], 16)  # type: ignore[attr-defined]


def _ends_of_waits(code: Sequence, place_of: dict[int, int]) -> set[int]:
    """Return the places behind the loops that spin on a word of another rank."""
    ends = set()
    for place, one in enumerate(code):
        if not one.opcode.startswith("BRA") or place_of.get(_target(one), place + 1) > place:
            continue
        body = code[place_of[_target(one)] : place]
        opcodes = [member.opcode for member in body]
        polls = "YIELD" in opcodes and any(map(STRONG.fullmatch, opcodes))
        if polls and not any(_is_meeting(member) or member.opcode[:3] == "BAR" for member in body):
            ends.add(place + 1)
    return ends


def _is_meeting(one: object) -> bool:
    text = " ".join([one.opcode, *one.operands])  # type: ignore[attr-defined]
    return not one.guard and bool(MEETING.fullmatch(text.strip()))  # type: ignore[attr-defined]


def _has_barrier(code: Sequence, place: int, place_of: dict[int, int]) -> bool:
    end = place_of[_target(code[place])]
    return any(one.opcode.startswith("BAR.") for one in code[place:end])

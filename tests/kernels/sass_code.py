"""What ptxas may make of a kernel. See machine_code.py.

From sm_80 to sm_120a, ptxas 13.4 spells a release as MEMBAR.ALL.SYS, ERRBAR (from Hopper on
CGAERRBAR too), STG.STRONG.SYS, and an acquire as LDG.STRONG.SYS, CCTL.IVALL, which drops the lines
of the first-level cache. Arithmetic may stand between them, access to memory may not. A wait for
the predecessor is ACQBULK, the permission for the successor PREEXIT.

A warp that is split may meet a barrier in a helper behind BRA.DIV. There the number of the barrier
is in a register, in the low bits, threads above them; 0 is the whole block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from machine_code import Instruction, Kind, Program, Role, State, explore, forbidden
from meeting_rules import meeting_findings
from order_rules import order_findings
from sass_values import behind, condition, constant, written

MEMORY = re.compile(
    r"U?LD|U?ST|U?ATOM|U?RED(?!UX)|SU(LD|ST|ATOM|RED)|CCTL|MEMBAR|FENCE|ERRBAR|CGAERRBAR|U?TMA|"
    r"UBLK|SYNCS|TEX|TLD|TXD|TMML|QSPC|MULTIMEM|ACQ|PREEXIT|LTC|DEPBAR|ARRIVES|PREFETCH"
)
LOCAL = re.compile(r"(LDL|STL)\b.*")
CLAIM = "ATOMG.E.CAS.STRONG.GPU"
BEGIN = "ATOMG.E.EXCH.STRONG.GPU"
FENCE = "MEMBAR.ALL.SYS"
INVALIDATE = "CCTL.IVALL"
SILENT = r"(LDG|STG)\.E(\.U8|\.U16|\.64|\.128)?|(LDS|STS)(\.64|\.128)?|(U?LDC|LDCU)(\.64|\.128)?"
STAGED = rf"{SILENT}|LDG\.E(\.U8|\.U16|\.64|\.128)?\.STRONG\.SYS|STG\.E(\.64)?\.STRONG\.SYS"
STAGED += rf"|{re.escape(CLAIM)}|{re.escape(BEGIN)}"
STAGED += rf"|{re.escape(FENCE)}|ERRBAR|CGAERRBAR|{re.escape(INVALIDATE)}"
TAGGED = rf"{STAGED}|STG\.E\.128\.STRONG\.SYS"
COUNTING = r"REDG?\.E\.(ADD|MAX)\.64\.STRONG\.GPU"
OVERLAPPING = "ACQBULK|PREEXIT"
ROLES = {
    "ACQBULK": Role.PREDECESSOR,
    "PREEXIT": Role.SUCCESSOR,
    CLAIM: Role.CLAIM,
    BEGIN: Role.BEGIN,
}
MOST_REGISTERS = 255
MOST_SHARED_NBYTES = 48 * 1024  # static, on every architecture
BARRIER = re.compile(r"BAR\.(SYNC|RED)\b.*")
BESIDE_A_FENCE = re.compile(r"ERRBAR|CGAERRBAR|U?LDC.*")
"""What ptxas may put between a fence and its access: nothing that touches global memory."""

NOT_GLOBAL = re.compile(r"(LDS|STS|U?LDC|LDCU|ERRBAR|CGAERRBAR|ACQBULK|PREEXIT)\b.*")
BRANCH = re.compile(r"BRA\b.*|CALL\.REL\b.*")
END = re.compile(r"EXIT|RET\b.*|KILL")
COLLECTIVE = "WARPSYNC.COLLECTIVE"
UNKNOWN_JUMP = re.compile(r"(BRX|JMX|JMP|CALL(?!\.REL\b)|BREAK|RTT|BPT)\b.*")


def allowed(kind: Kind) -> re.Pattern[str]:
    """Return the instructions for memory that a kernel of this kind may have."""
    text = (TAGGED if kind.tagged else STAGED) if kind.communicates else SILENT
    text += f"|{COUNTING}" if kind.counts else ""
    return re.compile(f"{text}|{OVERLAPPING}" if kind.overlaps else text)


def usage_findings(usage: Mapping[str, int]) -> list[str]:
    """Check what `cuobjdump -res-usage` prints of a kernel."""
    findings = [
        f"{name}:{usage[name]}, spills or local arrays"
        for name in ("STACK", "LOCAL")
        if usage[name]
    ]
    if not 0 < usage["REG"] <= MOST_REGISTERS:
        findings.append(f"REG:{usage['REG']}")
    if usage["SHARED"] > MOST_SHARED_NBYTES:
        findings.append(f"SHARED:{usage['SHARED']}")
    return findings


def _address(one) -> int:
    return int(one.operands[-1], 16)


CLONE = 1 << 32
"""Distance of a function's copies: more than there is code."""


def apart(code: Sequence) -> list:
    """Give every call a copy of its function, so that a return leads to its own caller.

    Or ways through a function that several callers share would lead from one to another.
    """
    place = {one.address: index for index, one in enumerate(code)}
    result, called = list(code), set()
    for index, one in enumerate(code):
        if not one.opcode.startswith("CALL.REL"):
            continue
        start = _address(one)
        if start in called:
            shift = CLONE * len(result)
            result[index] = _moved(one, shift)
            begin = place[start]
            end = next(i for i in range(begin, len(code)) if code[i].opcode.startswith("RET"))
            for copied in code[begin : end + 1]:
                inside = BRANCH.fullmatch(copied.opcode) and begin <= place[_address(copied)] <= end
                moved = _moved(copied, shift) if inside else copied
                result.append(replace(moved, address=copied.address + shift))
        called.add(start)
    return result


def _moved(jump, shift: int):
    """Return a jump whose target is `shift` further on."""
    return replace(jump, operands=(*jump.operands[:-1], hex(_address(jump) + shift)))


class Sass:
    """The machine code of one kernel; `code` are the instructions of tools/kernel_report.py."""

    def __init__(self, code: Sequence, kind: Kind) -> None:
        self.code = code = apart(code)
        self.kind = kind
        self._place = {one.address: place for place, one in enumerate(code)}
        self._returns = self._find_returns()
        self._known, _ = explore(self.follow)

    def _next_to_a_fence(self, place: int, step: int, fence: str) -> bool:
        """Whether `fence` is the nearest access to memory in that direction, without a jump.

        It may depend on the same predicate as the access at `place`.
        """
        guard = self.code[place].guard
        place += step
        while 0 <= place < len(self.code):
            one = self.code[place]
            if one.opcode == fence:
                return one.guard in ("", guard)
            touches = MEMORY.match(one.opcode) and not BESIDE_A_FENCE.fullmatch(one.opcode)
            if touches or BRANCH.fullmatch(one.opcode) or END.fullmatch(one.opcode):
                return False
            if guard and guard.lstrip("!") in written(one):
                return False
            place += step
        return False

    def _is_barrier(self, place: int) -> bool:
        """Whether all threads of the block meet here: no guard, barrier 0, no number of threads."""
        one = self.code[place]
        if not BARRIER.fullmatch(one.opcode) or one.guard:
            return False
        numbers = [part for part in one.operands if not re.fullmatch(r"!?U?P[T\d]", part)]
        state = self._known.get(place, {})
        return all(constant(part, state) == 0 for part in numbers)

    def role(self, place: int) -> Role:
        one = self.code[place]
        if self._is_barrier(place):
            return Role.BARRIER
        if one.opcode in ROLES:
            return Role.OTHER if one.guard else ROLES[one.opcode]
        if re.fullmatch(r"STG\..*STRONG\.SYS", one.opcode):
            return self._strong_store(place)
        if re.fullmatch(r"LDG\..*STRONG\.SYS", one.opcode):
            if self._next_to_a_fence(place, 1, INVALIDATE):
                return Role.ACQUIRE
            unit = self.kind.tagged and one.opcode == "LDG.E.128.STRONG.SYS"
            return Role.UNIT_LOAD if unit else Role.RELAXED
        if re.fullmatch(COUNTING, one.opcode):
            return Role.COUNT
        return Role.STORE if one.opcode.startswith("STG.") else Role.OTHER

    def _strong_store(self, place: int) -> Role:
        fenced = self._next_to_a_fence(place, -1, FENCE)
        if fenced:
            sizes = {"STG.E.64.STRONG.SYS": Role.RELEASE, "STG.E.STRONG.SYS": Role.STATUS}
        else:
            sizes = {"STG.E.64.STRONG.SYS": Role.ANNOUNCE, "STG.E.128.STRONG.SYS": Role.UNIT_STORE}
        return sizes.get(self.code[place].opcode, Role.OTHER)

    def _find_returns(self) -> dict[int, set[int]]:
        """Return, for each RET, where it may lead: behind the calls of the functions it is in."""
        calls: dict[int, list[int]] = {}
        for place, one in enumerate(self.code):
            if one.opcode.startswith("CALL.REL"):
                calls.setdefault(self._place[_address(one)], []).append(place)
        returns: dict[int, set[int]] = {}
        for start, callers in calls.items():
            seen: set[int] = set()
            waiting = [start]
            while waiting:
                place = waiting.pop()
                if place in seen:
                    continue
                seen.add(place)
                if self.code[place].opcode.startswith("RET"):
                    returns.setdefault(place, set()).update(caller + 1 for caller in callers)
                taken = condition(self.code[place], {})
                called = self.code[place].opcode.startswith("CALL")
                waiting.extend({place + 1} if called else self._followers(place, taken, {}))
        return returns

    def _followers(self, place: int, taken: bool | None, returns: dict[int, set[int]]) -> set[int]:
        """Return what may be next if a branch is taken, is not, or may be either."""
        one = self.code[place]
        falls = {place + 1} if place + 1 < len(self.code) else set()
        if UNKNOWN_JUMP.fullmatch(one.opcode):
            raise ValueError(f"not followed: {one}")
        if one.opcode.startswith(COLLECTIVE):
            end = self._place[_address(one)]
            if self.code[end - 1].opcode != "ENDCOLLECTIVE":
                raise ValueError(f"not followed: {one}")
        if BRANCH.fullmatch(one.opcode):
            jumps = {self._place[_address(one)]}
        elif END.fullmatch(one.opcode):
            jumps = returns.get(place, set())
        else:
            return falls
        return {None: jumps | falls, True: jumps, False: falls}[taken]

    def _ways(self, place: int) -> set[int]:
        """Return what may be next, whatever the registers hold."""
        return self._followers(place, condition(self.code[place], {}), self._returns)

    def follow(self, place: int, state: State) -> tuple[State, set[int]]:
        """See machine_code.Follow."""
        one = self.code[place]
        return behind(one, state), self._followers(place, condition(one, state), self._returns)

    @cached_property
    def program(self) -> Program:
        """The graph. A flag that is announced only behind a wait for flags is a relay.

        That its address is not a peer's, ptx_code sees.
        """
        found = Program([self._instruction(place) for place in range(len(self.code))], self.follow)
        waiting = found.reach(found.after(found.places(Role.ACQUIRE)))
        late = found.places(Role.ANNOUNCE) & waiting
        instructions = [
            replace(one, role=Role.RELAY) if place in late else one
            for place, one in enumerate(found.instructions)
        ]
        return replace(found, instructions=instructions)

    def _instruction(self, place: int) -> Instruction:
        one = self.code[place]
        return Instruction(
            f"{one.address:#06x} {one.opcode} {', '.join(one.operands)}",
            self.role(place),
            touches=bool(MEMORY.match(one.opcode)) and not NOT_GLOBAL.match(one.opcode),
        )

    def findings(self) -> list[str]:
        """Return everything that is wrong."""
        opcodes = [one.opcode for one in self.code]
        findings = forbidden(opcodes, MEMORY, allowed(self.kind))
        if any(LOCAL.fullmatch(one) for one in opcodes):
            findings.append("local memory is used")
        known = {Role.RELEASE, Role.STATUS}
        if self.kind.tagged:
            known |= {Role.ANNOUNCE, Role.RELAY, Role.UNIT_STORE}
        strong = sum(bool(re.fullmatch(r"STG\..*STRONG.*", one)) for one in opcodes)
        if strong != len(self.program.places(*known)):
            lost = strong - len(self.program.places(*known))
            findings.append(f"{lost} strong stores without a fence before them")
        findings += meeting_findings(self.code, self._ways)
        return findings + order_findings(self.program, self.kind)

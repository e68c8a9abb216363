"""What ptxas may make of a kernel. See machine_code.py.

From sm_80 to sm_120a, ptxas 13.4 spells a release as MEMBAR.ALL.SYS, ERRBAR (from Hopper on
CGAERRBAR too), STG.STRONG.SYS, and an acquire as LDG.STRONG.SYS, CCTL.IVALL, which drops the lines
of the first-level cache. Arithmetic may stand between them, access to memory may not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from machine_code import Instruction, Program, Role, forbidden, order_findings

MEMORY = re.compile(
    r"U?LD|U?ST|U?ATOM|U?RED(?!UX)|SU(LD|ST|ATOM|RED)|CCTL|MEMBAR|FENCE|ERRBAR|CGAERRBAR|U?TMA|"
    r"UBLK|SYNCS|TEX|TLD|TXD|TMML|QSPC|MULTIMEM|ACQ|LTC|DEPBAR|ARRIVES|PREFETCH"
)
LOCAL = re.compile(r"(LDL|STL)\b.*")
WEAK = r"(LDG|STG)\.E(\.U8|\.64|\.128)?|(LDS|STS)(\.64|\.128)?|(U?LDC|LDCU)(\.64|\.128)?"
SILENT = re.compile(WEAK)
CLAIM = "ATOMG.E.CAS.STRONG.GPU"
FENCE = "MEMBAR.ALL.SYS"
INVALIDATE = "CCTL.IVALL"
COMMUNICATING = re.compile(
    rf"{WEAK}|LDG\.E(\.U8|\.64|\.128)?\.STRONG\.SYS|STG\.E(\.64)?\.STRONG\.SYS"
    rf"|{re.escape(CLAIM)}|{re.escape(FENCE)}|ERRBAR|CGAERRBAR|{re.escape(INVALIDATE)}"
)
MOST_CLAIMS = 2
MOST_REGISTERS = 255
MOST_SHARED_NBYTES = 48 * 1024  # static, on every architecture
BARRIER = re.compile(r"BAR\.(SYNC|RED)\b.*")
BESIDE_A_FENCE = re.compile(r"ERRBAR|CGAERRBAR|U?LDC.*")
"""What ptxas may put between a fence and its access: nothing that touches global memory."""

BRANCH = re.compile(r"BRA\b.*|CALL\.REL\b.*")
END = re.compile(r"EXIT|RET\b.*|KILL")
UNKNOWN_JUMP = re.compile(r"(BRX|JMX|JMP|CALL(?!\.REL\b)|BREAK|WARPSYNC\.COLLECTIVE|RTT|BPT)\b.*")


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


class Sass:
    """The machine code of one kernel; `code` are the instructions of tools/kernel_report.py."""

    def __init__(self, code: Sequence) -> None:
        self.code = code
        self._place = {one.address: place for place, one in enumerate(code)}

    def _next_to_a_fence(self, place: int, step: int, fence: str) -> bool:
        """Whether `fence` is the nearest access to memory in that direction, without a jump."""
        place += step
        while 0 <= place < len(self.code):
            one = self.code[place]
            if one.opcode == fence:
                return not one.guard
            touches = MEMORY.match(one.opcode) and not BESIDE_A_FENCE.fullmatch(one.opcode)
            if touches or BRANCH.fullmatch(one.opcode) or END.fullmatch(one.opcode):
                return False
            place += step
        return False

    def role(self, place: int) -> Role:
        one = self.code[place]
        if BARRIER.fullmatch(one.opcode) and not one.guard and one.operands[0] == "0x0":
            return Role.BARRIER
        if one.opcode.startswith("STG.") and self._next_to_a_fence(place, -1, FENCE):
            sizes = {"STG.E.64.STRONG.SYS": Role.RELEASE, "STG.E.STRONG.SYS": Role.STATUS}
            return sizes.get(one.opcode, Role.OTHER)
        if re.fullmatch(r"LDG\..*STRONG\.SYS", one.opcode):
            acquires = self._next_to_a_fence(place, 1, INVALIDATE)
            return Role.ACQUIRE if acquires else Role.RELAXED
        return Role.OTHER

    def _returns(self) -> dict[int, set[int]]:
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
                waiting.extend(self._followers(place, {}, into_calls=False))
        return returns

    def _followers(self, place: int, returns: dict[int, set[int]], *, into_calls: bool) -> set[int]:
        one = self.code[place]
        falls = {place + 1} if place + 1 < len(self.code) else set()
        if UNKNOWN_JUMP.fullmatch(one.opcode):
            raise ValueError(f"not followed: {one}")
        if one.opcode.startswith("CALL") and not into_calls:
            return falls
        if BRANCH.fullmatch(one.opcode):
            always = not one.guard and len(one.operands) == 1
            return {self._place[_address(one)]} | (set() if always else falls)
        if END.fullmatch(one.opcode):
            return returns.get(place, set()) | (falls if one.guard else set())
        return falls

    def program(self) -> Program:
        returns = self._returns()
        return Program(
            [
                Instruction(
                    f"{one.address:#06x} {one.opcode} {', '.join(one.operands)}", self.role(i)
                )
                for i, one in enumerate(self.code)
            ],
            [self._followers(i, returns, into_calls=True) for i in range(len(self.code))],
        )

    def findings(self, *, communicates: bool) -> list[str]:
        """Return everything that is wrong."""
        opcodes = [one.opcode for one in self.code]
        findings = forbidden(opcodes, MEMORY, COMMUNICATING if communicates else SILENT)
        if any(LOCAL.fullmatch(one) for one in opcodes):
            findings.append("local memory is used")
        if not communicates:
            return findings
        if not 1 <= opcodes.count(CLAIM) <= MOST_CLAIMS:
            findings.append(f"{opcodes.count(CLAIM)} claims of the poison word")
        program = self.program()
        strong = sum(bool(re.fullmatch(r"STG\..*STRONG.*", one)) for one in opcodes)
        released = len(program.places(Role.RELEASE)) + len(program.places(Role.STATUS))
        if strong != released:
            findings.append(f"{strong - released} strong stores without a fence before them")
        return findings + order_findings(program)

"""What the PTX of a kernel may do to memory. See machine_code.py.

Addresses that a kernel has read out of memory lead to slabs, the host's words and the status
record: `foreign` here. They are told from tensors and the control block, whose addresses are
arithmetic on kernel parameters, by following every value that was ever loaded from memory. So a
weak load of a peer's bytes, or an atomic on them, is found whatever its type is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from machine_code import Instruction, Kind, Program, Role, State, forbidden
from order_rules import order_findings

MEMORY = re.compile(
    r"(ld|ldu|st|atom|red|fence|membar|cp|prefetch\w*|multimem|mbarrier|tex|tld4|suld|sust|sured|"
    r"discard|applypriority|createpolicy|griddepcontrol|wgmma|tcgen05|ldmatrix|stmatrix|async)"
    r"(\.|$)"
)
ANNOUNCE = "st.relaxed.sys.global.u64"
CLAIM = "atom.relaxed.gpu.global.cas.b32"
BEGIN = "atom.relaxed.gpu.global.exch.b32"
UNIT_STORE, UNIT_LOAD = "st.relaxed.sys.global.v2.b64", "ld.relaxed.sys.global.v2.b64"
SILENT = r"(ld|st)\.global\.(v4\.u32|v2\.u32|u64|u32|u16|u8)|ld\.global\.f32|ld\.param\.\w+"
SILENT += r"|ld\.shared\.(v2\.u64|v4\.u32|u64|u32)|st\.shared\.(u64|u32)"
WAITING = rf"{SILENT}|ld\.acquire\.sys\.global\.u64|st\.release\.sys\.global\.u32"
WAITING += rf"|{re.escape(CLAIM)}|{re.escape(BEGIN)}"
STAGED = rf"{WAITING}|ld\.relaxed\.sys\.global\.(v4\.u32|u64|u32|u16|u8)"
STAGED += r"|st\.release\.sys\.global\.u64"
TAGGED = rf"{WAITING}|ld\.relaxed\.sys\.global\.u32|st\.relaxed\.sys\.global\.u64"
TAGGED += rf"|{re.escape(UNIT_STORE)}|{re.escape(UNIT_LOAD)}"
COUNTING = r"red\.relaxed\.gpu\.global\.(add|max)\.u64"
OVERLAPPING = r"griddepcontrol\.(wait|launch_dependents)"

ROLES = {
    "st.release.sys.global.u64": Role.RELEASE,
    "st.release.sys.global.u32": Role.STATUS,
    "ld.acquire.sys.global.u64": Role.ACQUIRE,
    ANNOUNCE: Role.ANNOUNCE,
    UNIT_STORE: Role.UNIT_STORE,
    UNIT_LOAD: Role.UNIT_LOAD,
    "griddepcontrol.wait": Role.PREDECESSOR,
    "griddepcontrol.launch_dependents": Role.SUCCESSOR,
    CLAIM: Role.CLAIM,
    BEGIN: Role.BEGIN,
}
REGISTER = re.compile(r"%(?!p\d)\w+")
"""Not predicates: what a value decides is not part of what is followed."""


def allowed(kind: Kind) -> re.Pattern[str]:
    """Return the instructions for memory that a kernel of this kind may have."""
    text = (TAGGED if kind.tagged else STAGED) if kind.communicates else SILENT
    text += f"|{COUNTING}" if kind.counts else ""
    return re.compile(f"{text}|{OVERLAPPING}" if kind.overlaps else text)


@dataclass(frozen=True)
class Statement:
    """One instruction; `operands` are split at commas outside of braces."""

    text: str
    guard: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def kind(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def is_global(self) -> bool:
        """Whether it accesses global memory, or generic memory, which may be global."""
        return self.kind in ("ld", "ldu", "st", "atom", "red") and not re.search(
            r"\.(param|shared|const)\b", self.opcode
        )

    @property
    def address(self) -> str:
        return next(one for one in self.operands if one.startswith("["))

    @property
    def is_barrier(self) -> bool:
        """Whether all threads of the block meet here."""
        if re.match(r"(bar|barrier)(\.cta)?\.sync\b", self.opcode):
            return self.operands == ("0",) and not self.guard
        reduces = re.match(r"(bar|barrier)(\.cta)?\.red\b", self.opcode)
        whole = len(self.operands) == 3 and self.operands[1] == "0"
        return bool(reduces) and whole and not self.guard


_INLINE = re.compile(r"// begin inline asm(.*?)// end inline asm", re.S)
_LOCAL = re.compile(r"\.reg \.(\w+) (\w+);")
_LABEL = re.compile(r"(\$?\w+):")
_STATEMENT = re.compile(r"(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,][^,]*")


def name_local_registers(text: str) -> str:
    """Give the registers of each piece of inline code names of their own, spelt like others."""
    pieces = _INLINE.split(text)
    for index in range(1, len(pieces), 2):
        for width, name in _LOCAL.findall(pieces[index]):
            kind = "p" if width == "pred" else "l"
            pieces[index] = re.sub(rf"(?<![\w.%]){name}\b", f"%{kind}{index}_{name}", pieces[index])
    return "".join(pieces)


def parse(text: str) -> tuple[list[Statement], dict[str, int]]:
    """Return the statements of a kernel, and where its labels point.

    Raises:
        ValueError: There is not one kernel, or a function besides it.
    """
    if text.count(".visible .entry") != 1 or ".func" in text:
        raise ValueError("expected one kernel and no function")
    body = name_local_registers(text.split(".visible .entry")[1])
    body = re.sub(r"//[^\n]*", "", body).split("\n{", 1)[1]
    statements: list[Statement] = []
    labels: dict[str, int] = {}
    for piece in re.split(r"[;\n]", body):
        line = piece.strip("{} \t")
        if label := _LABEL.fullmatch(line):
            labels[label[1]] = len(statements)
        elif line and not line.startswith("."):
            guard, opcode, rest = _STATEMENT.fullmatch(piece.lstrip("{ \t").rstrip()).groups()
            operands = tuple(one.strip() for one in _OPERAND.findall(rest))
            statements.append(Statement(line, guard or "", opcode, operands))
    return statements, labels


def loaded_before(statements: Sequence[Statement], labels: dict[str, int]) -> list[set[str]]:
    """Return, for each statement, the registers that may then hold a value out of memory.

    Or one computed from such a value. A register is written again and again, so this follows the
    ways through the kernel.
    """
    before: list[set[str]] = [set() for _ in statements]
    waiting = list(range(len(statements)))
    while waiting:
        place = waiting.pop()
        one = statements[place]
        behind = _loaded_behind(one, before[place])
        followers = [] if one.kind in ("ret", "exit", "trap") and not one.guard else [place + 1]
        if one.kind == "bra":
            followers = [labels[one.operands[0]], *([place + 1] if one.guard else [])]
        for follower in followers:
            if follower < len(statements) and not behind <= before[follower]:
                before[follower] |= behind
                waiting.append(follower)
    return before


def _loaded_behind(one: Statement, before: set[str]) -> set[str]:
    if one.kind in ("st", "red", "bra", "ret") or not one.operands:
        return before
    sources = REGISTER.findall(" ".join(one.operands[1:]))
    reads = one.kind in ("ld", "ldu", "atom") and not one.opcode.startswith("ld.param")
    written = set(REGISTER.findall(one.operands[0]))
    if reads or not before.isdisjoint(sources):
        return before | written
    return before if one.guard else before - written


def constant(operand: str, state: State) -> int | None:
    """Return what an operand is known to be, a predicate as 0 or 1; None if it is not."""
    negated = operand.startswith("!")
    name = operand.lstrip("!")
    value = int(name) if re.fullmatch(r"-?\d+", name) else state.get(name)
    return value if value is None or not negated else 1 - value


def result(one: Statement, state: State) -> int | None:
    """Return the value that a statement computes, if that is known."""
    if not one.operands or re.search(r"[{|]", one.operands[0]):
        return None
    values = [constant(operand, state) for operand in one.operands[1:]]
    if one.opcode == "mov.pred":
        return None if values[0] is None else int(values[0] != 0)
    if one.kind == "mov" and len(values) == 1:
        return values[0]
    if re.fullmatch(r"setp\.(eq|ne)\.\w+", one.opcode) and None not in values:
        return int((values[0] == values[1]) == (".eq." in one.opcode))
    return None


class Ptx:
    """The PTX of one kernel, ready to be checked."""

    def __init__(self, text: str, kind: Kind) -> None:
        self.kind = kind
        self.statements, self.labels = parse(text)
        self._loaded = loaded_before(self.statements, self.labels)

    def is_foreign(self, place: int) -> bool:
        """Whether a global access goes through an address that was read out of memory."""
        return not self._loaded[place].isdisjoint(REGISTER.findall(self.statements[place].address))

    def role(self, place: int) -> Role:
        one = self.statements[place]
        if one.is_barrier:
            return Role.BARRIER
        if one.kind == "griddepcontrol" and one.guard:
            return Role.OTHER
        if one.opcode == ANNOUNCE and not self.is_foreign(place):
            return Role.RELAY
        if one.opcode in ROLES:
            return ROLES[one.opcode]
        if one.opcode.startswith("ld.relaxed.sys."):
            return Role.RELAXED
        if re.fullmatch(COUNTING, one.opcode):
            return Role.COUNT
        if one.opcode.startswith("st.global."):
            return Role.STAGE if self.is_foreign(place) else Role.STORE
        return Role.OTHER

    def follow(self, place: int, state: State) -> tuple[State, list[int]]:
        """See machine_code.Follow."""
        one = self.statements[place]
        falls = [place + 1] if place + 1 < len(self.statements) else []
        if one.kind in ("brx", "call"):
            raise ValueError(f"not followed: {one.text}")
        if one.kind in ("bra", "ret", "exit", "trap"):
            goes = [self.labels[one.operands[0]]] if one.kind == "bra" else []
            taken = constant(one.guard, state) if one.guard else 1
            return state, falls if taken == 0 else goes if taken else goes + falls
        if one.kind in ("st", "red", "bar", "barrier") and ".red" not in one.opcode:
            return state, falls
        behind = dict(state)
        value = result(one, state)
        for name in re.findall(r"%\w+", one.operands[0]) if one.operands else ():
            if not (one.guard and value is not None and state.get(name) == value):
                behind.pop(name, None)
            if value is not None and not one.guard:
                behind[name] = value
        return behind, falls

    @cached_property
    def program(self) -> Program:
        instructions = [
            Instruction(one.text, self.role(place), touches=one.is_global)
            for place, one in enumerate(self.statements)
        ]
        return Program(instructions, self.follow)

    def address_findings(self) -> list[str]:
        """Check that foreign memory is loaded strongly, stored plainly, and never claimed."""
        good = re.compile(r"ld\.(relaxed|acquire)\.sys\.|st\.((release|relaxed)\.sys\.)?global\.")
        return [
            f"not for memory of others: {one.text}"
            for place, one in enumerate(self.statements)
            if one.is_global and self.is_foreign(place) and not good.match(one.opcode)
        ]

    def _halves(self, unit: Statement, vector: str) -> list[list[str]]:
        """Return the registers that the two halves of a unit are packed from, or split into."""
        own, other = (1, 0) if vector == unit.operands[1] else (0, 1)
        return [
            REGISTER.findall(one.operands[own])
            for half in REGISTER.findall(vector)
            for one in self.statements
            if one.opcode == "mov.b64" and one.operands[other] == half
        ]

    def unit_findings(self) -> list[str]:
        """Check that both halves of a unit are data and tag, and that both tags are looked at."""
        findings = []
        used = {name for one in self.statements for name in REGISTER.findall(str(one.operands[1:]))}
        for one in self.statements:
            if one.opcode == UNIT_STORE:
                halves = self._halves(one, one.operands[1])
                tags = {tuple(half[1:]) for half in halves}
                whole = len(halves) == 2 and all(len(half) == 2 for half in halves)
                if not whole or len(tags) != 1 or any(half[0] in half[1:] for half in halves):
                    findings.append(f"data without its tag: {one.text}")
            if one.opcode == UNIT_LOAD:
                halves = self._halves(one, one.operands[0])
                seen = [half for half in halves if len(half) == 2 and half[1] in used]
                if len(seen) != 2:
                    findings.append(f"a tag is not looked at: {one.text}")
        return findings

    def findings(self) -> list[str]:
        """Return everything that is wrong."""
        opcodes = [one.opcode for one in self.statements]
        findings = forbidden(opcodes, MEMORY, allowed(self.kind)) + self.address_findings()
        if self.kind.tagged:
            findings += self.unit_findings()
        return findings + order_findings(self.program, self.kind)

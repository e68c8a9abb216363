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

from machine_code import Instruction, Program, Role, forbidden, order_findings

MEMORY = re.compile(
    r"(ld|ldu|st|atom|red|fence|membar|cp|prefetch\w*|multimem|mbarrier|tex|tld4|suld|sust|sured|"
    r"discard|applypriority|createpolicy|griddepcontrol|wgmma|tcgen05|ldmatrix|stmatrix|async)"
    r"(\.|$)"
)
TYPES = r"(v4\.u32|u64|u32|u8)"
WEAK = rf"(ld|st)\.global\.{TYPES}|ld\.param\.\w+|ld\.shared\.(v2\.u64|v4\.u32|u64|u32)"
WEAK += r"|st\.shared\.(u64|u32)"
SILENT = re.compile(WEAK)
CLAIM = "atom.relaxed.gpu.global.cas.b32"
COMMUNICATING = re.compile(
    rf"{WEAK}|ld\.relaxed\.sys\.global\.{TYPES}|ld\.acquire\.sys\.global\.u64"
    rf"|st\.release\.sys\.global\.(u64|u32)|{re.escape(CLAIM)}"
)
MOST_CLAIMS = 2

ROLES = {
    "st.release.sys.global.u64": Role.RELEASE,
    "st.release.sys.global.u32": Role.STATUS,
    "ld.acquire.sys.global.u64": Role.ACQUIRE,
}
REGISTER = re.compile(r"%(?!p\d)\w+")


@dataclass(frozen=True)
class Statement:
    """One instruction; `operands` are split at commas outside of braces."""

    text: str
    guarded: bool
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
            return self.operands == ("0",) and not self.guarded
        reduces = re.match(r"(bar|barrier)(\.cta)?\.red\b", self.opcode)
        whole = len(self.operands) == 3 and self.operands[1] == "0"
        return bool(reduces) and whole and not self.guarded


_LABEL = re.compile(r"(\$?\w+):")
_STATEMENT = re.compile(r"(@!?%?\w+\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,][^,]*")


def parse(text: str) -> tuple[list[Statement], dict[str, int]]:
    """Return the statements of a kernel, and where its labels point.

    Raises:
        ValueError: There is not one kernel, or a function besides it.
    """
    if text.count(".visible .entry") != 1 or ".func" in text:
        raise ValueError("expected one kernel and no function")
    body = re.sub(r"//[^\n]*", "", text.split(".visible .entry")[1]).split("\n{", 1)[1]
    statements: list[Statement] = []
    labels: dict[str, int] = {}
    for piece in re.split(r"[;\n]", body):
        line = piece.strip("{} \t")
        if label := _LABEL.fullmatch(line):
            labels[label[1]] = len(statements)
        elif line and not line.startswith("."):
            guard, opcode, rest = _STATEMENT.fullmatch(piece.lstrip("{ \t").rstrip()).groups()
            operands = tuple(one.strip() for one in _OPERAND.findall(rest))
            statements.append(Statement(line, bool(guard), opcode, operands))
    return statements, labels


def loaded_registers(statements: Sequence[Statement]) -> set[str]:
    """Return every register that may hold a value out of memory, or one computed from such."""
    loaded: set[str] = set()
    before = -1
    while before < len(loaded):
        before = len(loaded)
        for one in statements:
            if one.kind in ("st", "red", "bra", "ret") or not one.operands:
                continue
            sources = REGISTER.findall(" ".join(one.operands[1:]))
            reads = one.kind in ("ld", "ldu", "atom") and not one.opcode.startswith("ld.param")
            if reads or not loaded.isdisjoint(sources):
                loaded.update(REGISTER.findall(one.operands[0]))
    return loaded


class Ptx:
    """The PTX of one kernel, ready to be checked."""

    def __init__(self, text: str) -> None:
        self.statements, self.labels = parse(text)
        self._loaded = loaded_registers(self.statements)

    def is_foreign(self, statement: Statement) -> bool:
        """Whether a global access goes through an address that was read out of memory."""
        return not self._loaded.isdisjoint(REGISTER.findall(statement.address))

    def role(self, statement: Statement) -> Role:
        if statement.is_barrier:
            return Role.BARRIER
        if statement.opcode.startswith("ld.relaxed.sys."):
            return Role.RELAXED
        if statement.opcode.startswith("st.global.") and self.is_foreign(statement):
            return Role.STAGE
        return ROLES.get(statement.opcode, Role.OTHER)

    def program(self) -> Program:
        followers = []
        for place, one in enumerate(self.statements):
            falls = [place + 1] if place + 1 < len(self.statements) else []
            if one.kind == "bra":
                followers.append([self.labels[one.operands[0]], *(falls if one.guarded else [])])
            elif one.kind in ("ret", "exit", "trap"):
                followers.append(falls if one.guarded else [])
            elif one.kind in ("brx", "call"):
                raise ValueError(f"not followed: {one.text}")
            else:
                followers.append(falls)
        return Program(
            [Instruction(one.text, self.role(one)) for one in self.statements], followers
        )

    def address_findings(self) -> list[str]:
        """Check that foreign memory is loaded strongly, stored plainly, and never claimed."""
        allowed = re.compile(r"ld\.(relaxed|acquire)\.sys\.|st\.(release\.sys\.)?global\.")
        return [
            f"not for memory of others: {one.text}"
            for one in self.statements
            if one.is_global and self.is_foreign(one) and not allowed.match(one.opcode)
        ]

    def findings(self, *, communicates: bool) -> list[str]:
        """Return everything that is wrong."""
        opcodes = [one.opcode for one in self.statements]
        findings = forbidden(opcodes, MEMORY, COMMUNICATING if communicates else SILENT)
        findings += self.address_findings()
        if not communicates:
            return findings
        if not 1 <= opcodes.count(CLAIM) <= MOST_CLAIMS:
            findings.append(f"{opcodes.count(CLAIM)} claims of the poison word")
        return findings + order_findings(self.program())

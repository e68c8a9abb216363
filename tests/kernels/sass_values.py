"""Which constants an instruction of SASS leaves in registers. See machine_code.explore.

Only what ptxas uses for zeros, copies and comparisons is computed. Whatever else an instruction may
write is unknown behind it, so an instruction that is not understood makes a check stricter.
"""

from __future__ import annotations

import re

from machine_code import State

PREDICATE = re.compile(r"U?P[T\d]")
REGISTER = re.compile(r"U?R(Z|\d+)")
ZEROS = {"RZ", "URZ", "SRZ"}
WRITES_NONE = re.compile(r"(BAR|ST|STG|STS|STL|RED|REDG|BRA|CALL|RET|EXIT|WARPSYNC|BSYNC|BSSY)\b.*")
MASK = 0xFFFF_FFFF


def constant(operand: str, state: State) -> int | None:
    """Return what an operand is known to be, a predicate as 0 or 1; None if it is not."""
    name = operand.removeprefix("!").removesuffix(".reuse")
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", name):
        return int(name, 0) & MASK
    if name in ZEROS:
        return 0
    value = 1 if name in ("PT", "UPT") else state.get(name)
    return 1 - value if value is not None and operand.startswith("!") else value


def condition(one, state: State) -> bool | None:
    """Return whether an instruction is executed, a branch taken; None if that is not known."""
    conditions = [one.guard] if one.guard else []
    if re.fullmatch(r"(BRA|CALL)\b.*", one.opcode):
        conditions += one.operands[:-1]
    values = [
        constant(each, state) if PREDICATE.fullmatch(each.removeprefix("!")) else None
        for each in conditions
    ]
    if 0 in values:
        return False
    return None if None in values else True


def written(one) -> list[str]:
    """Return the registers and predicates that an instruction may write."""
    if WRITES_NONE.fullmatch(one.opcode):
        return []
    if one.opcode.split(".")[0] in ("R2P", "UR2UP"):
        return [f"{kind}{number}" for kind in ("P", "UP") for number in range(8)]
    if re.fullmatch(r"U?(\w*SETP|PLOP3)\b.*", one.opcode):
        return list(one.operands[:2])
    found: list[str] = []
    for operand in one.operands:
        if PREDICATE.fullmatch(operand):
            found.append(operand)
        elif REGISTER.fullmatch(operand) and not any("R" in each for each in found):
            found += _neighbours(operand, _width(one.opcode))
        else:
            break
    return found


def _width(opcode: str) -> int:
    """Return the number of registers in a result."""
    name, *parts = opcode.split(".")
    for part, count in (("256", 8), ("128", 4), ("64", 2), ("WIDE", 2), ("F64", 2)):
        if part in parts:
            return count
    pairs = r"CS2R|D[A-Z]+|F(ADD|MUL|FMA)2|[FI]2[FI]"
    return 2 if re.fullmatch(pairs, name) and "32" not in parts else 1


def _neighbours(register: str, count: int) -> list[str]:
    kind, number = re.fullmatch(r"(U?R)(Z|\d+)", register).groups()
    return [register] if number == "Z" else [f"{kind}{int(number) + i}" for i in range(count)]


def _value(one, state: State) -> int | None:
    """Return what an instruction leaves in each register or predicate that it writes, if known."""
    name = one.opcode.split(".")[0]
    values = [constant(operand, state) for operand in one.operands[1:]]
    if name in ("MOV", "UMOV", "CS2R"):
        wide = _width(one.opcode) > 1 and one.operands[1] not in ZEROS
        return None if wide else values[0]
    if name == "HFMA2" and one.operands[1:] == ("-RZ", "RZ", "0", "0"):
        return 0
    if re.fullmatch(r"IMAD\.(MOV\.)?U32", one.opcode) and one.operands[1:3] == ("RZ", "RZ"):
        return values[2]
    if one.opcode == "SHF.L.U32" and one.operands[3:] == ("RZ",) and None not in values:
        return values[0] << values[1] & MASK
    if one.opcode == "LOP3.LUT" and len(values) == 5 and None not in values[:4]:
        first, second, third, table = values[:4]
        return sum(
            (table >> ((first >> i & 1) * 4 + (second >> i & 1) * 2 + (third >> i & 1)) & 1) << i
            for i in range(32)
        )
    return None


def _comparison(one, state: State) -> int | None:
    """Return the outcome of an integer comparison with EQ or NE, if known."""
    found = re.fullmatch(r"U?ISETP\.(EQ|NE)\.(U32\.)?AND", one.opcode)
    if not found or one.operands[1] not in ("PT", "UPT") or one.operands[4] not in ("PT", "UPT"):
        return None
    left, right = (constant(operand, state) for operand in one.operands[2:4])
    return None if left is None or right is None else int((left == right) == (found[1] == "EQ"))


def behind(one, state: State) -> State:
    """Return what is known behind an instruction."""
    names = written(one)
    executed = condition(one, state)
    if not names or executed is False:
        return state
    compares = one.opcode.split(".")[0] in ("ISETP", "UISETP")
    value = _comparison(one, state) if compares else _value(one, state)
    after = dict(state)
    for name in names:
        after.pop(name, None)
        if value is not None and (executed or state.get(name) == value):
            after[name] = value
    for name in ("PT", "UPT", *ZEROS):
        after.pop(name, None)
    return after

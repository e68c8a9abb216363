"""Runs the PTX of kernels on the CPU, thread by thread: values, bounds and waits without a GPU.

What it is: every thread is a coroutine that runs up to its next barrier, shuffle, vote or poll;
all threads of all blocks of all ranks share one memory, in which an access outside of an
allocation is an error, and so is a barrier that not all reach. What it is not: the memory model.
Stores arrive at once and in order, so nothing here shows a missing release or acquire; the rules of
`order_rules` do that. Approximate instructions are rounded correctly here, so scores may differ
from a device's in the last bit.
"""

from __future__ import annotations

import bisect
import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ptx_floats
from ptx_code import Statement, parse
from ptx_races import Races

WARP = 32
MASKS = {16: 0xFFFF, 32: 0xFFFF_FFFF, 64: 0xFFFF_FFFF_FFFF_FFFF}
COMPARES = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
SPECIALS = {
    "%tid.x": "T.index",
    "%ctaid.x": "T.block.index",
    "%nctaid.x": "T.block.launch.grid",
    "%ntid.x": "len(T.block.threads)",
    "%laneid": "(T.index & 31)",
    "%globaltimer": "T.block.launch.machine.now()",
}
SHARED_BASE = 64
OPERATORS = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}


class Memory:
    """Global memory: allocations with nothing between them."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.parts: list[tuple[int, bytearray, str]] = []
        self.next = 1 << 20

    def allocate(self, nbytes: int, label: str, offset: int = 0) -> int:
        """Return the address of zeroed memory, `offset` bytes behind a 256-byte boundary."""
        start = self.next + offset
        self.next = (start + nbytes + 4096) & ~255
        self.starts.append(start)
        self.parts.append((start, bytearray(nbytes), label))
        return start

    def place(self, address: int, nbytes: int) -> tuple[bytearray, int]:
        index = bisect.bisect_right(self.starts, address) - 1
        if index >= 0:
            start, data, _ = self.parts[index]
            if address + nbytes <= start + len(data):
                return data, address - start
        near = self.parts[index][2] if index >= 0 else "nothing"
        raise IndexError(f"{nbytes} bytes at {address:#x} are outside of memory, behind {near}")

    def load(self, address: int, nbytes: int) -> int:
        if address % nbytes:
            raise IndexError(f"{address:#x} is no multiple of {nbytes}")
        data, at = self.place(address, nbytes)
        return int.from_bytes(data[at : at + nbytes], "little")

    def store(self, address: int, nbytes: int, value: int) -> None:
        if address % nbytes:
            raise IndexError(f"{address:#x} is no multiple of {nbytes}")
        data, at = self.place(address, nbytes)
        data[at : at + nbytes] = value.to_bytes(nbytes, "little")


@dataclass
class Thread:
    block: Block
    index: int
    registers: list[int]
    at: int = 0
    wait: tuple[Any, ...] = ()


@dataclass
class Launch:
    """A kernel with its arguments; `machine` is told when it runs."""

    program: Program
    params: Sequence[int]
    grid: int
    machine: Machine = None  # type: ignore[assignment]


class Block:
    def __init__(self, launch: Launch, index: int, threads: int) -> None:
        self.launch, self.index = launch, index
        count = len(launch.program.names)
        self.threads = [Thread(self, i, [0] * count) for i in range(threads)]
        self.shared = bytearray(random.Random(index).randbytes(SHARED_BASE + launch.program.shared))
        self.barriers: dict[tuple[int, int], list[Thread]] = {}
        self.warps: list[list[Thread]] = [[] for _ in range(-(-threads // WARP))]
        self.running = 0
        self.races = Races(threads) if launch.machine.finds_races else None

    def load(self, address: int, nbytes: int) -> int:
        assert SHARED_BASE <= address <= len(self.shared) - nbytes and address % nbytes == 0, (
            address
        )
        if self.races:
            self.races.touch(self.running, address, nbytes, False)
        return int.from_bytes(self.shared[address : address + nbytes], "little")

    def store(self, address: int, nbytes: int, value: int) -> None:
        assert SHARED_BASE <= address <= len(self.shared) - nbytes and address % nbytes == 0, (
            address
        )
        if self.races:
            self.races.touch(self.running, address, nbytes, True)
        self.shared[address : address + nbytes] = value.to_bytes(nbytes, "little")

    def meet(self, threads: Sequence[Thread]) -> None:
        if self.races:
            self.races.meet([thread.index for thread in threads])


@dataclass
class Program:
    """PTX as Python functions, one for each stretch without a jump or a wait."""

    text: str
    names: dict[str, int] = field(default_factory=dict)
    shared: int = 0

    def __post_init__(self) -> None:
        self.statements, self.labels = parse(self.text)
        self.symbols: dict[str, int] = {}
        for name, nbytes in re.findall(r"\.shared \.align \d+ \.b8 (\w+)\[(\d+)\];", self.text):
            self.symbols[name] = SHARED_BASE + self.shared
            self.shared += -(-int(nbytes) // 16) * 16
        starts = {0, *self.labels.values()}
        for place, one in enumerate(self.statements):
            if one.kind == "bra" or waits(one):
                starts.add(place + 1)
        self.functions: dict[int, Callable[..., int]] = {}
        ordered = sorted(start for start in starts if start < len(self.statements))
        for start, end in zip(ordered, [*ordered[1:], len(self.statements)], strict=True):
            self.functions[start] = self._function(start, end)

    def _function(self, start: int, end: int) -> Callable[..., int]:
        lines = ["def run(R, T, G, S):"]
        for place in range(start, end):
            one = self.statements[place]
            body = self._translate(one, place)
            if one.guard:
                name = one.guard.lstrip("!")
                negated = "not " if one.guard.startswith("!") else ""
                body = [f"if {negated}{self._value(name, 32)}:", *(f" {line}" for line in body)]
            lines += [f" {line}" for line in body]
        lines.append(f" return {end}")
        scope = {"F": ptx_floats, "floats": ptx_floats}
        exec("\n".join(lines), scope)
        return scope["run"]  # type: ignore[return-value]

    def _register(self, name: str) -> str:
        return f"R[{self.names.setdefault(name, len(self.names))}]"

    def _value(self, operand: str, width: int, signed: bool = False) -> str:
        if operand in SPECIALS:
            return SPECIALS[operand]
        if operand.startswith("%"):
            text = self._register(operand)
        elif operand.startswith("0f"):
            return str(int(operand[2:], 16))
        elif operand in self.symbols:
            return str(self.symbols[operand])
        else:
            text = str(int(operand, 0) & MASKS[width])
        sign = 1 << (width - 1)
        return f"(({text} ^ {sign}) - {sign})" if signed else text

    def _address(self, operand: str) -> str:
        base, _, offset = operand.strip("[]").partition("+")
        return f"{self._value(base, 64)} + {int(offset or 0)}"

    def _vector(self, operand: str) -> list[str]:
        return [one.strip() for one in operand.strip("{} ").split(",")]

    def _translate(self, one: Statement, place: int) -> list[str]:
        parts = one.opcode.split(".")
        kind, kinds = parts[0], parts[1:]
        operands = one.operands
        if kind in ("griddepcontrol", "bra", "ret", "exit"):
            jump = {"bra": lambda: self.labels[operands[0]], "ret": lambda: -1, "exit": lambda: -1}
            return [f"return {jump[kind]()}"] if kind in jump else ["pass"]
        if kind in ("bar", "barrier", "shfl", "vote"):
            return self._rendezvous(one, kind, kinds, place)
        if kind == "red":
            return self._reduction(kinds, operands)
        if kind in ("ld", "st", "atom"):
            return self._access(one, kind, kinds, place)
        if kind == "mov" and any("{" in operand for operand in operands):
            return self._pack(operands, int(kinds[0][1:]))
        target = operands[0]
        return [f"{self._register(target)} = {self._result(kind, kinds, operands[1:])}"]

    def _pack(self, operands: Sequence[str], width: int) -> list[str]:
        half = width // 2
        if "{" in operands[0]:
            low, high = self._vector(operands[0])
            return [
                f"V = {self._value(operands[1], width)}",
                f"{self._register(low)} = V & {MASKS[half]}",
                f"{self._register(high)} = V >> {half}",
            ]
        low, high = (self._value(one, half) for one in self._vector(operands[1]))
        return [f"{self._register(operands[0])} = {low} | ({high} << {half})"]

    def _result(self, kind: str, kinds: list[str], sources: Sequence[str]) -> str:
        last = kinds[-1]
        if kind == "setp":
            return self._compare(kinds[0], last, sources)
        if kind == "selp":
            a, b = (self._value(s, int(last[1:])) for s in sources[:2])
            return f"{a} if {self._value(sources[2], 32)} else {b}"
        if last == "pred":
            values = [self._value(s, 32) for s in sources]
            if kind in ("mov", "not"):
                return f"int({values[0]} != 0)" if kind == "mov" else f"1 - {values[0]}"
            return f"{values[0]} {OPERATORS[kind]} {values[1]}"
        if kind == "cvt":
            return self._convert(kinds, sources)
        if last.startswith(("f", "bf")):
            values = ", ".join(self._value(s, 32) for s in sources)
            return values if kind == "mov" else f"F.{'_'.join([kind, *kinds])}({values})"
        return self._integer(kind, kinds, int(last[1:]), last[0] == "s", sources)

    def _integer(
        self, kind: str, kinds: list[str], width: int, signed: bool, sources: Sequence[str]
    ) -> str:
        mask = MASKS[width]
        a, *rest = (self._value(s, width) for s in sources)
        wide = [self._value(s, width, signed) for s in sources]
        if kind in OPERATORS:
            return f"({a} {OPERATORS[kind]} {rest[0]}) & {mask}"
        if kind in ("mul", "mad"):
            if kinds[0] == "lo":
                extra = f" + {rest[1]}" if kind == "mad" else ""
                return f"({a} * {rest[0]}{extra}) & {mask}"
            assert kinds[0] == "wide", kinds
            extra = f" + {self._value(sources[2], 2 * width)}" if kind == "mad" else ""
            return f"({wide[0]} * {wide[1]}{extra}) & {MASKS[2 * width]}"
        simple = {
            "mov": a,
            "not": f"{a} ^ {mask}",
            "neg": f"(-{a}) & {mask}",
            "bfind": f"({a}.bit_length() - 1) & {mask}",
            "shl": f"(({a} << {rest[0]}) & {mask} if {rest[0]} < {width} else 0)" if rest else "",
            "shr": f"({wide[0]} >> min({rest[0]}, {width - 1 if signed else width})) & {mask}"
            if rest
            else "",
            "min": f"min({', '.join(wide)}) & {mask}",
            "max": f"max({', '.join(wide)}) & {mask}",
        }
        return simple[kind]

    def _compare(self, how: str, kind: str, sources: Sequence[str]) -> str:
        if kind.startswith("f"):
            values = ", ".join(self._value(s, 32) for s in sources)
            return f"F.compare('{how}', {values})"
        a, b = (self._value(s, int(kind[1:]), kind[0] == "s") for s in sources)
        return f"int({a} {COMPARES[how]} {b})"

    def _convert(self, kinds: list[str], sources: Sequence[str]) -> str:
        to, of = kinds[-2:]
        if "f" in to or "f" in of:
            values = ", ".join(self._value(s, 32) for s in sources)
            return f"F.cvt_{'_'.join(kinds)}({values})"
        value = self._value(sources[0], int(of[1:]), of[0] == "s")
        return f"{value} & {MASKS[int(to[1:])]}"

    def _access(self, one: Statement, kind: str, kinds: list[str], place: int) -> list[str]:
        width = int(re.search(r"\d+$", one.opcode)[0])
        nbytes = width // 8
        if kinds[0] == "param":
            number = int(re.search(r"_param_(\d+)\]$", one.operands[1])[1])
            value = f"T.block.launch.params[{number}] & {MASKS[width]}"
            return [f"{self._register(one.operands[0])} = {value}"]
        unit = "S" if "shared" in kinds else "G"
        if kind == "atom":
            target, address, *values = one.operands
            a = self._address(address)
            old = self._register(target)
            new = self._value(values[-1], 32)
            store = f"{unit}.store({a}, 4, {new})"
            if "cas" in kinds:
                store = f"if {old} == {self._value(values[0], 32)}: {store}"
            return [f"{old} = {unit}.load({a}, 4)", store]
        address = self._address(one.address)
        count = next((int(part[1]) for part in kinds if part in ("v2", "v4")), 1)
        lines = [f"A = {address}", f"assert A % {nbytes * count} == 0, hex(A)"]
        values = self._vector(one.operands[0 if kind == "ld" else 1])
        for i, value in enumerate(values):
            where = f"A + {i * nbytes}, {nbytes}"
            if kind == "ld":
                lines.append(f"{self._register(value)} = {unit}.load({where})")
            else:
                lines.append(
                    f"{unit}.store({where}, {self._value(value, 64)} & {(1 << width) - 1})"
                )
        if waits(one):
            lines.append(f"T.wait = ('poll',); return {place + 1}")
        return lines

    def _reduction(self, kinds: list[str], operands: Sequence[str]) -> list[str]:
        how, width = kinds[-2], int(kinds[-1][1:])
        old, new = f"G.load(A, {width // 8})", self._value(operands[1], width)
        found = {"add": f"({old} + {new}) & {MASKS[width]}", "max": f"max({old}, {new})"}[how]
        return [f"A = {self._address(operands[0])}", f"G.store(A, {width // 8}, {found})"]

    def _rendezvous(self, one: Statement, kind: str, kinds: list[str], place: int) -> list[str]:
        assert not one.guard, one.text
        operands = one.operands
        if kind == "shfl":
            target = self.names.setdefault(operands[0].split("|")[0], len(self.names))
            values = ", ".join(self._value(operand, 32) for operand in operands[1:3])
            what = f"('shfl', {place}, {target}, '{kinds[1]}', {values})"
        elif kind == "vote":
            target = self.names.setdefault(operands[0], len(self.names))
            what = f"('vote', {place}, {target}, {self._value(operands[1], 32)})"
        elif "warp" in kinds:
            what = f"('warp', {place})"
        elif "red" in kinds:
            target = self.names.setdefault(operands[0], len(self.names))
            what = f"('bar', 0, 0, {target}, {self._value(operands[2], 32)})"
        else:
            count = self._value(operands[1], 32) if len(operands) > 1 else "0"
            what = f"('bar', {self._value(operands[0], 32)}, {count}, None, 1)"
        return [f"T.wait = {what}; return {place + 1}"]


def waits(one: Statement) -> bool:
    """Whether a thread stops here: for others of its block or warp, or to let others run."""
    polls = one.opcode.startswith(("ld.acquire", "ld.relaxed.sys.global.v2.b64"))
    return polls or one.kind in ("bar", "barrier", "shfl", "vote")


class Machine:
    """One memory, and launches that run in it side by side.

    Args:
        order: Seed of the order in which threads run, or None: as they are numbered.
        finds_races: Whether an access to shared memory that nothing orders is an error.
    """

    def __init__(self, order: int | None = None, finds_races: bool = False) -> None:
        self.memory = Memory()
        self.finds_races = finds_races
        self.order = order
        self.time = 0

    def now(self) -> int:
        self.time += 1000
        return self.time

    def run(self, launches: Sequence[Launch], threads: int, most: int = 3_000_000) -> None:
        """Run launches at the same time, until all have ended.

        Raises:
            RuntimeError: Threads wait for one another for ever, or took too many turns.
        """
        blocks = []
        for launch in launches:
            launch.machine = self
            blocks += [Block(launch, i, threads) for i in range(launch.grid)]
        every = [thread for block in blocks for thread in block.threads]
        if self.order is not None:
            random.Random(self.order).shuffle(every)
        ready, left = deque(every), len(every)
        while ready:
            thread = ready.popleft()
            most -= 1
            if most < 0:
                raise RuntimeError("too many turns: a wait that does not end")
            if not self._advance(thread):
                left -= 1
            ready.extend(self._resolve(thread))
        if left:
            stuck = [t for t in every if t.at >= 0]
            facts = [(t.block.index, t.index, t.wait[:3]) for t in stuck[:5]]
            raise RuntimeError(f"{left} threads wait for ever, among them {facts}")
        found = sorted(text for block in blocks if block.races for text in block.races.found)
        if found:
            raise RuntimeError(f"{len(found)} races in shared memory, among them {found[:3]}")

    def _advance(self, thread: Thread) -> bool:
        """Run a thread up to its next wait; return False at its end."""
        thread.wait = ()
        thread.block.running = thread.index
        functions = thread.block.launch.program.functions
        while thread.at >= 0 and not thread.wait:
            thread.at = functions[thread.at](thread.registers, thread, self.memory, thread.block)
        return thread.at >= 0

    def _resolve(self, thread: Thread) -> list[Thread]:
        """Return the threads that may go on because of where this one stopped."""
        if not thread.wait:
            return []
        kind, block = thread.wait[0], thread.block
        if kind == "poll":
            return [thread]
        if kind == "bar":
            number, count = thread.wait[1], thread.wait[2] or len(block.threads)
            arrived = block.barriers.setdefault((number, count), [])
            arrived.append(thread)
            if len(arrived) < count:
                return []
            del block.barriers[number, count]
            block.meet(arrived)
            value = int(all(t.wait[4] for t in arrived))
            for t in arrived:
                if t.wait[3] is not None:
                    t.registers[t.wait[3]] = value
            return arrived
        warp = block.warps[thread.index // WARP]
        warp.append(thread)
        if len(warp) < WARP:
            return []
        if len({t.wait[:2] for t in warp}) != 1:
            raise RuntimeError(f"a warp meets at several places: {thread.wait[:2]}")
        self._exchange(warp)
        if thread.wait[0] == "warp":
            block.meet(warp)
        arrived, block.warps[thread.index // WARP] = warp, []
        return arrived

    @staticmethod
    def _exchange(warp: list[Thread]) -> None:
        if warp[0].wait[0] == "vote":
            value = int(all(t.wait[3] for t in warp))
            for t in warp:
                t.registers[t.wait[2]] = value
        elif warp[0].wait[0] == "shfl":
            values = {t.index % WARP: t.wait[4] for t in warp}
            for t in warp:
                lane, operand = t.index % WARP, t.wait[5]
                source = operand % WARP if t.wait[3] == "idx" else lane ^ operand
                t.registers[t.wait[2]] = values[source]

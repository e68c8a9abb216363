"""Registers, memory and size of every kernel of this package, read from its machine code.

Compiles each variant of each collective for each architecture and asks cuobjdump. Needs the CuTe
DSL and cuobjdump, no GPU. The record has one line per kernel; `columns` names the numbers, and
instructions are counted without NOP.

Usage: python tools/kernel_report.py [--arch sm_90a ...] [--out docs/evidence/kernels.json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from pcie_comm import build  # noqa: E402 - a script: it finds the package first
from pcie_comm.errors import CommError  # noqa: E402
from pcie_comm.kernels import compile as compiler  # noqa: E402
from pcie_comm.kernels.uneven import UNEVEN  # noqa: E402

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
DECODE_OPS = ("all_gather_pair", "all_gather_heads", "all_gather_pair_kimi_topk", "kimi_topk16")
OTHER_ARCHS = ("sm_120a",)
"""Of the operations beside those of a decode step, of uneven shards, and of kernels that count: so
that CI compiles for minutes, not for ten."""

USAGE = {
    "registers": "REG",
    "stack_nbytes": "STACK",
    "local_nbytes": "LOCAL",
    "shared_nbytes": "SHARED",
}
COLUMNS = (*USAGE, "sass_nbytes", "instructions")
INSTRUCTION_NBYTES = 16
DUMP_TIMEOUT_S = 60.0

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);", re.M)


@dataclass(frozen=True)
class Sass:
    """One instruction of the machine code.

    Attributes:
        address: Byte in the function.
        guard: Predicate it depends on, with `!` if negated, or empty.
        opcode: With its modifiers, for example `LDG.E.64.STRONG.SYS`.
        operands: As printed, split at commas.
    """

    address: int
    guard: str
    opcode: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class MachineCode:
    """A kernel and what cuobjdump says of it."""

    kernel: compiler.CompiledKernel
    dump: str

    @cached_property
    def code(self) -> list[Sass]:
        """The instructions, as they stand in memory."""
        return instructions(self.dump)

    @property
    def sass_nbytes(self) -> int:
        """Size of the instructions."""
        return self.code[-1].address + INSTRUCTION_NBYTES

    def numbers(self) -> list[int]:
        """Return what COLUMNS names."""
        usage = resources(self.dump)
        count = sum(one.opcode != "NOP" for one in self.code)
        return [*(usage[name] for name in USAGE.values()), self.sass_nbytes, count]


def usual_jobs() -> list[build.Job]:
    """Return what CI compiles."""
    usual = [
        job
        for job in build.own_jobs(ARCHS)
        if (job.key.op in DECODE_OPS and UNEVEN not in job.key.variant)
        or (job.arch in OTHER_ARCHS and not _is_copy(job))
    ]
    counting = [job for job in build.jobs(OTHER_ARCHS, DECODE_OPS, stats=True) if job.key.stats]
    return usual + counting


def _is_copy(job: build.Job) -> bool:
    """Tell whether a kernel is that of all_gather_heads under another name."""
    return job.key.op == "all_gather" and UNEVEN in job.key.variant


def cuobjdump() -> str | None:
    """Return the program's path: from its wheel, else from PATH; None if it is not there."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    found = [path for place in places or () for path in Path(place).glob("*/bin/cuobjdump")]
    return str(sorted(found)[-1]) if found else shutil.which("cuobjdump")


def dump(cubin: bytes, program: str) -> str:
    """Return resource usage and disassembly of a cubin.

    Raises:
        RuntimeError: cuobjdump refuses it.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [program, "-res-usage", "-sass", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_TIMEOUT_S)
    if done.returncode != 0 or "Function :" not in done.stdout:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stdout[-500:]}{done.stderr[-500:]}")
    return done.stdout


def resources(text: str) -> dict[str, int]:
    """Return what `cuobjdump -res-usage` prints of the one function of a cubin.

    Raises:
        ValueError: It is not one function.
    """
    lines = re.findall(r"^ *REG:.*$", text, re.M)
    if len(lines) != 1:
        raise ValueError(f"expected one function, found {len(lines)}")
    return {name: int(value) for name, value in re.findall(r"([A-Z]+)(?:\[\d\])?:(\d+)", lines[0])}


def instructions(text: str) -> list[Sass]:
    """Return the instructions that `cuobjdump -sass` printed, as they stand in memory.

    Raises:
        ValueError: There are none, or a line between them was not understood.
    """
    code = [
        Sass(
            address=int(address, 16),
            guard=guard,
            opcode=opcode,
            operands=tuple(part.strip() for part in operands.split(",") if part.strip()),
        )
        for address, guard, opcode, operands in _LINE.findall(text)
    ]
    if not code or [one.address for one in code] != list(
        range(0, len(code) * INSTRUCTION_NBYTES, INSTRUCTION_NBYTES)
    ):
        raise ValueError(f"the {len(code)} instructions that were read leave gaps")
    return code


def compile_all(todo: Sequence[build.Job], workers: int, program: str) -> list[MachineCode]:
    """Compile every job and disassemble it, in `workers` processes.

    Raises:
        CompileError: A kernel does not compile.
        RuntimeError: cuobjdump refuses one.
    """
    context = multiprocessing.get_context("spawn")  # no copy of a DSL that is at work
    with ProcessPoolExecutor(workers, context) as pool, ThreadPoolExecutor(workers) as threads:
        built = [pool.submit(compiler.build, job.plugin(), job.key, job.arch) for job in todo]
        try:
            dumps = [threads.submit(lambda f: dump(f.result().cubin, program), f) for f in built]
            return [
                MachineCode(kernel.result(), text.result())
                for kernel, text in zip(built, dumps, strict=True)
            ]
        finally:
            pool.shutdown(cancel_futures=True)
            threads.shutdown(cancel_futures=True)


def tool_chain(ptx: str) -> str:
    """Return the release of NVIDIA's compiler that a PTX text names, or an empty string."""
    found = re.search(r"^// Cuda compilation tools, (.+)$", ptx, re.M)
    return found[1] if found else ""


def record(codes: Iterable[MachineCode]) -> dict[str, Any]:
    """Return the numbers of all kernels, with the versions they hold for."""
    kernels: dict[str, dict[str, list[int]]] = {}
    versions = set()
    for code in codes:
        versions.add((code.kernel.dsl, tool_chain(code.kernel.ptx)))
        kernels.setdefault(code.kernel.key, {})[code.kernel.arch] = code.numbers()
    ((dsl, tools),) = versions
    head = {"dsl": dsl, "compiler": tools, "columns": list(COLUMNS)}
    return {**head, "kernels": dict(sorted(kernels.items()))}


def text_of(content: dict[str, Any]) -> str:
    """Return a record as JSON with one line per kernel."""
    kernels = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(archs)}" for name, archs in content["kernels"].items()
    )
    head = "".join(
        f" {json.dumps(name)}: {json.dumps(value)},\n"
        for name, value in content.items()
        if name != "kernels"
    )
    return f'{{\n{head} "kernels": {{\n{kernels}\n }}\n}}\n'


def main(argv: Sequence[str] | None = None) -> int:
    """Write the record, or print it. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", help="repeatable; default: those CI compiles")
    parser.add_argument("--out", type=Path, help="default: standard output")
    parser.add_argument("--jobs", type=int, default=build.default_workers(), help="processes")
    options = parser.parse_args(argv)
    program = cuobjdump()
    if program is None:
        print("kernel_report: cuobjdump is missing; pip install nvidia-cuda-cuobjdump")
        return 1
    try:
        jobs = usual_jobs()
        if options.arch:
            jobs = build.own_jobs(build.resolve_archs(options.arch))
        text = text_of(record(compile_all(jobs, options.jobs, program)))
    except CommError as error:
        print(f"kernel_report: {error}")
        return 1
    if options.out is None:
        print(text, end="")
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

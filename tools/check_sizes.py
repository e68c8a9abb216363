"""Check that files, functions and parameter lists stay small enough to read.

Every size has a hard limit, and some have a target below it. Beyond a limit the check fails; beyond
a target it only says so. Lines count as they stand in the file, blank lines, comments and
docstrings included; a function counts from its `def`, without its decorators.

Usage: python tools/check_sizes.py [--root DIR]
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("pcie_comm", "tools", "tests")
KERNEL_DECORATORS = ("cute.kernel", "cute.jit")
COMMAND_DECORATORS = ("command", "callback")


@dataclass(frozen=True)
class Limit:
    """What one kind of size may reach: `target` is the aim, `hard` the end."""

    target: int
    hard: int


FILE_LINES = Limit(250, 450)
HOST_LINES = Limit(40, 55)
TEST_LINES = Limit(55, 80)
KERNEL_LINES = Limit(120, 120)
HOST_PARAMETERS = Limit(7, 7)
KERNEL_PARAMETERS = Limit(12, 12)


@dataclass(frozen=True)
class Allowance:
    """A limit raised for one place, and why nothing smaller would read better."""

    hard: int
    reason: str


# Keys as printed by the check, for example "tools/example.py::main lines". An entry whose size is
# back within the general limit, or whose place is gone, fails the check: remove it then.
ALLOWED: dict[str, Allowance] = {}


@dataclass(frozen=True)
class Size:
    """One measured size: `key` names the place and the kind."""

    key: str
    line: int
    value: int
    limit: Limit


def dotted(node: ast.expr) -> str:
    """The dotted name of a decorator, whether it is called or not; empty for anything else."""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether CuTe DSL compiles this function."""
    return any(dotted(node) in KERNEL_DECORATORS for node in function.decorator_list)


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether typer makes a console command of this function: each option is a parameter then."""
    calls = (node for node in function.decorator_list if isinstance(node, ast.Call))
    return any(
        isinstance(call.func, ast.Attribute) and call.func.attr in COMMAND_DECORATORS
        for call in calls
    )


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef, in_class: bool) -> int:
    """Parameters of every kind, without the self or cls of a method."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    static = any(dotted(node) == "staticmethod" for node in function.decorator_list)
    bound = 1 if in_class and positional and not static else 0
    variadic = sum(extra is not None for extra in (spec.vararg, spec.kwarg))
    return len(positional) - bound + len(spec.kwonlyargs) + variadic


def functions(
    node: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Every function below `node`: its qualified name, itself, whether a class holds it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + child.name, child, isinstance(node, ast.ClassDef)
        scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        below = f"{prefix}{child.name}." if isinstance(child, scope) else prefix
        yield from functions(child, below)


def measure(path: Path, name: str) -> Iterator[Size]:
    """Measure one file. Raises SyntaxError where it is no Python."""
    text = path.read_text(encoding="utf-8")
    yield Size(f"{name} lines", 1, len(text.splitlines()), FILE_LINES)
    host_lines = TEST_LINES if name.startswith("tests/") else HOST_LINES
    for qualname, function, in_class in functions(ast.parse(text, filename=name)):
        kernel = is_kernel(function)
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        place = f"{name}::{qualname}"
        yield Size(f"{place} lines", function.lineno, lines, KERNEL_LINES if kernel else host_lines)
        if not is_command(function):
            count = parameter_count(function, in_class)
            limit = KERNEL_PARAMETERS if kernel else HOST_PARAMETERS
            yield Size(f"{place} parameters", function.lineno, count, limit)


def measure_tree(root: Path) -> list[Size]:
    """Measure every Python file of the project below `root`."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return [size for path in paths for size in measure(path, path.relative_to(root).as_posix())]


def judge(sizes: list[Size], allowed: Mapping[str, Allowance]) -> tuple[list[str], list[str]]:
    """Compare sizes with their limits.

    Returns:
        The offences, stale allowances among them, and the notes on missed targets.
    """
    offences, notes, needed = [], [], set()
    for size in sizes:
        allowance = allowed.get(size.key)
        if allowance and size.value > size.limit.hard:
            needed.add(size.key)
        hard = max(size.limit.hard, allowance.hard) if allowance else size.limit.hard
        bounds = f"line {size.line}, target {size.limit.target}, limit {hard}"
        fact = f"{size.key}: {size.value} ({bounds})"
        if size.value > hard:
            offences.append(fact)
        elif size.value > size.limit.target:
            notes.append(fact)
    offences += [f"{key}: allowance no longer needed, remove it" for key in allowed.keys() - needed]
    offences += [f"{key}: allowance without a reason" for key, a in allowed.items() if not a.reason]
    return sorted(offences), sorted(notes)


def summary(sizes: list[Size]) -> str:
    """One line: how many files and functions, median and 95th percentile of their lines."""
    parts = []
    for what, chosen in (
        ("files", [s.value for s in sizes if "::" not in s.key]),
        ("functions", [s.value for s in sizes if "::" in s.key and s.key.endswith(" lines")]),
    ):
        spread = statistics.quantiles(chosen, n=20)[-1] if len(chosen) > 1 else sum(chosen)
        median = statistics.median(chosen) if chosen else 0
        parts.append(f"{len(chosen)} {what}, lines median {median:.0f}, p95 {spread:.0f}")
    return "; ".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Check the tree and report. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args(argv).root
    try:
        sizes = measure_tree(root)
    except SyntaxError as error:
        print(f"check_sizes: {error.filename}:{error.lineno}: no valid Python: {error.msg}")
        return 1
    if not sizes:
        print(f"check_sizes: no Python file below root={root} in {', '.join(FOLDERS)}")
        return 1
    offences, notes = judge(sizes, ALLOWED)
    for note in notes:
        print(f"above target: {note}")
    for offence in offences:
        print(f"ABOVE LIMIT: {offence}")
    print(f"check_sizes: {summary(sizes)}; {len(offences)} above limit, {len(notes)} above target")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())

"""What a benchmark run measures: the options, their checks, and the command line that sets them.

Light: `pcie-comm bench --help` loads nothing but this. argparse and not typer, so that
`python -m pcie_comm.bench` runs where typer is not installed; both are the same program.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..errors import InvalidArgumentError, UnsupportedError
from ..layout import MAX_WORLD, STAGED_ALIGNMENT

FUSED, PAIR, HEADS, ROUTER = (
    "all_gather_pair_kimi_topk",
    "all_gather_pair",
    "all_gather_heads",
    "kimi_topk16",
)
OPERATIONS = (FUSED, PAIR, HEADS, ROUTER)
LADDER_OPERATIONS = ("all_gather", "all_reduce")
LADDER_SIZES = tuple(1 << shift for shift in range(10, 29, 2))
"""Bytes per rank: 1 KiB to 256 MiB."""

VRAM, PINNED, SHARED = "VRAM", "pinned host", "shared memory"
TRANSPORTS = {VRAM: "cuda_local", PINNED: "host_pinned", SHARED: "host_shm"}
"""Transport by the memory that slabs lie in; shared memory is that of ranks without a GPU."""

MEMORIES = {"vram": VRAM, "pinned": PINNED}
PROTOCOLS = ("tagged", "push", "pull", "auto")
MOST_ROWS, MOST_TIMES, MOST_NBYTES = 4096, 10_000, 1 << 32

Item = TypeVar("Item", str, int)


@dataclass(frozen=True)
class Options:
    """What to measure. What is empty, 0 or None becomes what suits the device: `settled`.

    Attributes:
        operations: Names from OPERATIONS, or of other collectives, which are measured with their
            `example_inputs`.
        ranks: World sizes, 1 to 16.
        rows: Rows of a call.
        memories: Where slabs lie, VRAM or PINNED; for ranks on GPUs.
        protocols: From PROTOCOLS.
        samples: Timed replays of each contender.
        ops: Operations of each rank in one replay.
        cold: Also measure with evicted caches.
        device: `cpu`, `cuda:N`, `cuda` for all GPUs in turn, or None: a GPU if there is one.
        out: JSON report to write, or None.
        plot: Picture to write, or None.
        short: What is not given becomes less.
        alone: Measure this library's single launches, and floors, and nothing beside them.
        read: Report to show instead of measuring, or None.
        ladder: Measure LADDER_OPERATIONS at many sizes instead; see ladder.py.
        sizes: Of the ladder, in bytes per rank.
    """

    operations: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    memories: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()
    samples: int = 0
    ops: int = 0
    cold: bool | None = None
    device: str | None = None
    out: Path | None = None
    plot: Path | None = None
    short: bool = False
    alone: bool = False
    read: Path | None = None
    ladder: bool = False
    sizes: tuple[int, ...] = ()

    def check(self) -> None:
        """Check every option that can be checked before anything runs.

        Raises:
            InvalidArgumentError: An option is out of range, or a file cannot be written.
            UnsupportedError: `plot` without matplotlib.
        """
        for op in self.operations:
            if self.ladder and op not in LADDER_OPERATIONS:
                raise InvalidArgumentError(
                    f"operation={op!r} has no ladder; choose from {', '.join(LADDER_OPERATIONS)}"
                )
            if op not in (*OPERATIONS, *LADDER_OPERATIONS):
                _check_registered(op)
        for protocol in self.protocols:
            if protocol not in PROTOCOLS:
                raise InvalidArgumentError(
                    f"protocol={protocol!r} is unknown; choose from {', '.join(PROTOCOLS)}"
                )
        for name, values, most in (
            ("ranks", self.ranks, MAX_WORLD),
            ("rows", self.rows, MOST_ROWS),
            ("samples", (self.samples or 1,), MOST_TIMES),
            ("ops", (self.ops or 1,), MOST_TIMES),
            ("sizes", self.sizes, MOST_NBYTES),
        ):
            for value in values:
                if not 1 <= value <= most:
                    raise InvalidArgumentError(f"{name}={value} is out of range; give 1 to {most}")
        for name, path in (("out", self.out), ("plot", self.plot)):
            if path is not None:
                _check_writable(name, path)
        self._check_ladder()
        if self.plot is not None and find_spec("matplotlib") is None:
            raise UnsupportedError(
                "a plot needs matplotlib; pip install 'pcie_comm[plot]', or leave --plot out",
                reason="matplotlib is not installed",
            )

    def _check_ladder(self) -> None:
        if self.sizes and not self.ladder:
            raise InvalidArgumentError("sizes are for --ladder; leave one out, or give both")
        if any(size % STAGED_ALIGNMENT for size in self.sizes):
            raise InvalidArgumentError(
                f"sizes={self.sizes} are out of range; give multiples of {STAGED_ALIGNMENT} bytes"
            )

    def settled(self, on_gpu: bool) -> Options:
        """Return the options with everything chosen that was not given, to suit the device.

        Raises:
            InvalidArgumentError: An option is for GPUs and there is none.
        """
        if not on_gpu and (self.memories or self.cold or "tagged" in self.protocols):
            raise InvalidArgumentError(
                "memory, protocol=tagged and cold are for ranks on GPUs, the ranks are on the CPU; "
                "leave them out, or name a GPU with --device"
            )
        usual = ON_GPU if on_gpu else ON_CPU
        chosen = replace(usual, **SHORTER) if self.short and on_gpu else usual
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        named: dict[str, Any] = {name: one for name, one in given.items() if one or one is False}
        return replace(chosen, **named)


ON_GPU = Options(
    operations=OPERATIONS,
    ranks=(2, 4, 8, 16),
    rows=(1, 8, 64),
    memories=(VRAM, PINNED),
    protocols=("tagged", "push", "pull"),
    samples=21,
    ops=64,
    cold=True,
)
ON_CPU = Options(
    operations=OPERATIONS,
    ranks=(2, 4),
    rows=(1, 8),
    memories=(SHARED,),
    protocols=("push", "pull"),
    samples=9,
    ops=4,
    cold=False,
)
SHORTER: dict[str, Any] = {
    "operations": (FUSED, PAIR, ROUTER),
    "rows": (1, 8, 64),
    "protocols": ("auto",),
    "samples": 11,
    "cold": False,
}
"""What `make gpu-test` measures: about a minute."""


def _check_registered(op: str) -> None:
    from ..kernels.registry import collectives, find  # which loads plugins of other packages

    if op not in collectives():
        try:
            find(op)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"operation={op!r} is unknown; choose from {', '.join(OPERATIONS)}, or another "
                "registered collective"
            ) from error


def _check_writable(name: str, path: Path) -> None:
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InvalidArgumentError(
            f"{name}={path} cannot be written ({error}); name a file in a folder that exists"
        ) from error


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and leaving: errors look alike in all commands."""

    def error(self, message: str) -> NoReturn:
        raise InvalidArgumentError(f"{message}; see {self.prog} --help")


def _list(kind: Callable[[str], Item]) -> Callable[[str], tuple[Item, ...]]:
    def read(text: str) -> tuple[Item, ...]:
        try:
            return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))
        except (KeyError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of such values") from None

    return read


def _times(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_TIMES:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to {MOST_TIMES}")
    return int(text)


def _size(text: str) -> int:
    """Read bytes: a number, or one with K or M behind it."""
    shift = {"K": 10, "M": 20}.get(text[-1:].upper(), 0)
    return int(text[:-1] if shift else text) << shift


def _memory(text: str) -> str:
    return MEMORIES[text.lower()]


def parse(arguments: Sequence[str], prog: str = "pcie-comm bench") -> Options:
    """Return the options that a command line gives, checked.

    Raises:
        InvalidArgumentError, UnsupportedError: See Options.check.
        SystemExit: --help was asked for, and printed.
    """
    parser = _Parser(
        prog=prog,
        description="Measure the collectives of this machine, beside what one would use instead, "
        "and check every result. Exit code 1: an output was wrong.",
    )
    add = parser.add_argument
    add("--op", action="append", metavar="NAME", help="operation, or any collective; repeatable")
    add("--ranks", type=_list(int), help="world sizes, for example 2,4,8,16")
    add("--rows", type=_list(int), help="rows of a call, for example 1,8,64")
    add("--memory", type=_list(_memory), help="where slabs lie: vram, pinned or both (vram,pinned)")
    add("--protocol", type=_list(str), help=f"from {', '.join(PROTOCOLS)}; several with commas")
    add("--samples", type=_times, help="timed replays of each contender")
    add("--ops", type=_times, help="operations of each rank in one replay")
    add("--cold", action=argparse.BooleanOptionalAction, help="also with evicted caches")
    add("--device", help="cpu, cuda:N, or cuda for all GPUs in turn; a GPU if there is one")
    add("--out", type=Path, metavar="FILE.json", help="write the report")
    add("--plot", type=Path, metavar="FILE.png", help="write a picture; needs matplotlib")
    add("--short", action="store_true", help="fewer cases, about a minute on a GPU")
    add("--alone", action="store_true", help="our single launches and floors, nothing beside them")
    add("--read", type=Path, metavar="FILE.json", help="show an earlier report; measure nothing")
    add("--ladder", action="store_true", help="all_gather and all_reduce, 1K to 256M bytes a rank")
    add("--sizes", type=_list(_size), help="of the ladder, bytes per rank, for example 64K,1M,256M")
    given = parser.parse_args(arguments)
    options = Options(
        operations=tuple(dict.fromkeys(given.op or ())),
        ranks=given.ranks or (),
        rows=given.rows or (),
        memories=given.memory or (),
        protocols=given.protocol or (),
        samples=given.samples or 0,
        ops=given.ops or 0,
        cold=given.cold,
        device=given.device,
        out=given.out,
        plot=given.plot,
        short=given.short,
        alone=given.alone,
        read=given.read,
        ladder=given.ladder,
        sizes=given.sizes or (),
    )
    options.check()
    return options

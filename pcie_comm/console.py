"""What programs of this package show on a terminal. Needs rich, nothing else of the package."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

FILE_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""


def console() -> Console:
    """Return a console that prints text as it is; where the width is unknown, a wide one."""
    plain = Console(highlight=False, markup=False, soft_wrap=True)
    if not plain.is_terminal:
        plain.width = max(plain.width, FILE_WIDTH)
    return plain


@contextlib.contextmanager
def progress(total: int, title: str) -> Iterator[Callable[[str, str], None]]:
    """Show progress: a bar on a terminal, else a line per step.

    Yields a function that is called after every step with the step's name and, for the line,
    what more there is to say of it.
    """
    terminal = console()
    count = itertools.count(1)

    def line(name: str, details: str) -> None:
        terminal.print(f"[{next(count)}/{total}] {name} {details}")

    if not terminal.is_terminal:
        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=terminal) as bar:
        task = bar.add_task(title, total=total)

        def advance(name: str, details: str) -> None:
            bar.update(task, advance=1, description=name)

        yield advance


@contextlib.contextmanager
def timed_progress(total_s: float, title: str) -> Iterator[Callable[[str, str, float], None]]:
    """Show progress by planned time, on stderr: a bar with the time left, else a line per step.

    Yields a function that is called after every step with its name, what came of it, and the
    seconds that were planned for it.
    """
    terminal = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    done_s = 0.0

    def line(name: str, details: str, planned_s: float) -> None:
        nonlocal done_s
        done_s += planned_s
        share = 100 * done_s / total_s if total_s else 100.0
        terminal.print(f"[{share:3.0f} %] {name}: {details}")

    if not terminal.is_terminal:
        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=terminal) as bar:
        task = bar.add_task(title, total=total_s)

        def advance(name: str, details: str, planned_s: float) -> None:
            bar.update(task, advance=planned_s, description=name)

        yield advance

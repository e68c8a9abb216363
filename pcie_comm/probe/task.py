"""What a child process is asked to do, and what it answers.

A task names its work, the GPUs it is about, and its *blanks*: the records that it is to fill. So
whatever becomes of the process, every record exists, with the reason where there is no figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..topology.probed import SKIPPED, Check
from ..topology.record import ANY, Reasons, Record, no_reasons

NOT_RUN = "it was not run"


@dataclass(frozen=True)
class Figure(Record):
    """One cell of a matrix; figures of a kind become a Measurement.

    Attributes:
        kind: Key of matrices.KINDS.
        row, column: Of the matrix.
        value: In the unit of the kind.
        nbytes: Of a transfer; 0 where that makes no sense.
    """

    kind: str
    row: str
    column: str
    value: float | None = None
    nbytes: int = 0
    unknown: Reasons = field(default_factory=no_reasons)


@dataclass(frozen=True)
class Task:
    """Something for a child process to do.

    Attributes:
        work: Name of a function in works.WORKS.
        gpus: Names of the GPUs it is about, and their CUDA ordinals.
        blanks: What it fills, in this order.
        options: For the function.
        seconds: That it may take, for the progress bar.
        deadline_s: After which its process is ended.
        group: Tasks of one group share a process as long as all goes well.
        visitor: A second process takes part, and both are fresh.
    """

    work: str
    gpus: Mapping[str, int]
    blanks: tuple[Record, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.5
    deadline_s: float = 60.0
    group: str = "verify"
    visitor: bool = False

    @property
    def title(self) -> str:
        """What it is about, in words."""
        first = self.blanks[0] if self.blanks else None
        words = [self.options.get("title", self.work)]
        if isinstance(first, Check):
            words = [first.name, f"{first.source} -> {first.target}"]
        elif isinstance(first, Figure):
            words = [first.kind, f"{first.row} -> {first.column}"]
        return " ".join(words)


@dataclass(frozen=True)
class Answer:
    """What a child process says of a task.

    Attributes:
        records: The blanks, filled.
        data: Anything else, for works that are asked something.
        broken: The process is of no further use.
        wrong: Between which places wrong bytes arrived, and how; None if none did.
    """

    records: tuple[Record, ...]
    data: Any = None
    broken: bool = False
    wrong: tuple[str, str, str] | None = None


def blank_check(source: str, target: str, name: str) -> Check:
    """Return a check that is still to be made."""
    return Check(source, target, name, SKIPPED, NOT_RUN)


def failed(blanks: Sequence[Record], verdict: str, reason: str) -> tuple[Record, ...]:
    """Return blanks that stay empty, with the reason; checks get the verdict."""
    return tuple(
        replace(blank, verdict=verdict, detail=reason)
        if isinstance(blank, Check)
        else replace(blank, unknown={ANY: reason})  # type: ignore[call-arg]
        for blank in blanks
    )


def missing(kind: type[Record], *names: str, reason: str = NOT_RUN, **facts: Any) -> Record:
    """Return a record of a kind without figures."""
    return kind(*names, **facts, unknown={ANY: reason})  # type: ignore[call-arg]

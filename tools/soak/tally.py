"""What a soak has found: one tally per rank, added up to one part of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Tally:
    """Of one rank, or of several together.

    Attributes:
        calls: Calls whose outputs were checked, of all ranks: a collective of W ranks is W calls.
        mismatches: Calls with at least one wrong byte.
        first: Round of the first wrong call; -1 if there is none.
        where: That call in words; draws it again.
        failure: The error that ended the soak.
        seconds: How long it made calls.
    """

    calls: int = 0
    mismatches: int = 0
    first: int = -1
    where: str = ""
    failure: str = ""
    seconds: float = 0.0

    def wrong(self, number: int, where: str) -> None:
        """Count a wrong call of round `number`."""
        self.mismatches += 1
        if self.first < 0 or number < self.first:
            self.first, self.where = number, where

    def report(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "calls": self.calls,
            "mismatches": self.mismatches,
            "first_wrong_round": self.first if self.mismatches else None,
            "first_wrong_call": self.where or None,
            "failure": self.failure or None,
            "seconds": round(self.seconds, 2),
            "calls_per_s": round(self.calls / self.seconds) if self.seconds else 0,
        }


def add_up(tallies: Sequence[Tally]) -> Tally:
    """Return the tally of all ranks."""
    found = [tally for tally in tallies if tally.first >= 0]
    first = min(found, key=lambda tally: tally.first, default=Tally())
    failures = [f"rank {rank}: {one.failure}" for rank, one in enumerate(tallies) if one.failure]
    return Tally(
        calls=sum(tally.calls for tally in tallies),
        mismatches=sum(tally.mismatches for tally in tallies),
        first=first.first,
        where=first.where,
        failure="; ".join(failures),
        seconds=max((tally.seconds for tally in tallies), default=0.0),
    )

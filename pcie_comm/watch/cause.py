"""Why a group cannot go on: which rank is the cause, and the error that says so. Pure."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass
from typing import Any

from ..errors import PeerAbortedError, PeerDiedError, PeerError, PeerTimeoutError


class Kind(enum.IntEnum):
    """What became of a rank. The numbers stand on the roll call."""

    ABORTED = 1
    DIED = 2
    LATE = 3
    """Another rank waited for it until the timeout, and gave the group up."""


@dataclass
class Cause:
    """What became of a rank. The watchdog fills in `exit_code` when it becomes known.

    Attributes:
        peer: Group rank it is about; the own rank after its own `abort`.
        kind: What became of it.
        reason: What is known besides, or empty.
        exit_code: Exit code of a dead rank's process, or minus the signal that ended it.
    """

    peer: int
    kind: Kind
    reason: str = ""
    exit_code: int | None = None

    def error(self, rank: int, op: str | None = None, epoch: int | None = None) -> PeerError:
        """Return the cause as an error that rank `rank` reports; a new one each time."""
        facts: dict[str, Any] = {"rank": rank, "peer": self.peer, "op": op, "epoch": epoch}
        reason = f" ({self.reason})" if self.reason else ""
        if self.kind == Kind.DIED:
            return PeerDiedError(
                f"rank {self.peer} died: {fate(self.exit_code, self.reason)}; "
                "close the group, and build a new one of the ranks that live",
                exit_code=self.exit_code,
                **facts,
            )
        if self.kind == Kind.LATE:
            return PeerTimeoutError(
                f"rank {self.peer} did not arrive in time{reason}; is it alive?", **facts
            )
        who = "this rank" if self.peer == rank else f"rank {self.peer}"
        return PeerAbortedError(
            f"the group was aborted by {who}{reason}; close it, and build a new one", **facts
        )


def doubts(peer_state: str) -> str:
    """Return what to ask about a peer that did not come; `peer_state` may be empty."""
    if not peer_state:
        return "is it alive, and did it make the same call?"
    return f"{peer_state}; did it make the same call?"


def fate(exit_code: int | None, reason: str = "") -> str:
    """Say in words how a process ended; `reason` is what is known besides."""
    if exit_code is None:
        return reason or "its process is gone, how it ended cannot be told"
    if exit_code < 0:
        known = {number.value: number.name for number in signal.Signals}
        how = f"killed by {known.get(-exit_code, f'signal {-exit_code}')}"
    else:
        how = f"its process ended with exit code {exit_code}"
    return f"{how} ({reason})" if reason else how

"""Who is to blame when a call over torch.distributed fails.

A backend only says that a connection broke or that time is up. The watches of all hosts know who
died or aborted, a moment later; notes on the board tell who waits and who gave up.
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

from .errors import (
    BrokenError,
    CommError,
    MismatchError,
    PeerAbortedError,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
)
from .watch.cause import doubts

if TYPE_CHECKING:
    from .dist_engine import DistEngine
    from .kernels.collective import Plan

HINDSIGHT_S = 0.5
"""Time that the watches of all hosts get to find out why a connection broke."""

_LOOK_S = 0.002


class Blame:
    """Turns failures of a rank's channel into errors of this library."""

    def __init__(self, engine: DistEngine) -> None:
        self._engine = engine

    def _facts(self, plan: Plan) -> dict[str, Any]:
        return {"rank": self._engine.rank, "op": plan.op, "epoch": self._engine.epoch}

    def _peers(self, rail: int) -> list[int]:
        span = self._engine.route.span
        keepers = [span.keeper(host, rail) for host in range(span.count)]
        return [rank for rank in keepers if rank != self._engine.rank]

    def note_waiting(self) -> None:
        """Let the peers know that this rank has come to its call."""
        route = self._engine.route
        route.board.leave(f"waiting/{route.lane}", self._engine.epoch)

    def late(self, plan: Plan, rail: int, deadline: float) -> PeerTimeoutError:
        """Return the error for a rail in which somebody is missing; name them, if that shows."""
        engine, route = self._engine, self._engine.route
        elapsed_s = time.monotonic() - deadline + engine.timeout_s
        name = f"waiting/{route.lane}"
        missing = [r for r in self._peers(rail) if route.board.read(name, r) != engine.epoch]
        who = "ranks " + ", ".join(map(str, missing)) if missing[1:] else "a rank"
        if len(missing) == 1:
            who = f"rank {missing[0]}"
        state = engine.peer_state(missing[0]) if missing else ""
        return PeerTimeoutError(
            f"{who} did not arrive in time: wanted epoch={engine.epoch}, "
            f"elapsed_s={elapsed_s:.3f}; {doubts(state)}",
            wanted=engine.epoch,
            elapsed_ns=int(elapsed_s * 1e9),
            peer=missing[0] if missing else None,
            **self._facts(plan),
        )

    def broke(self, plan: Plan, rail: int, error: RuntimeError) -> CommError:
        """Return the error for a rail that failed: who died or gave up, if that shows soon."""
        engine, route, facts = self._engine, self._engine.route, self._facts(plan)
        until, note = time.monotonic() + HINDSIGHT_S, None
        while time.monotonic() < until and engine.cause is None and note is None:
            note = route.board.first(f"failed/{route.lane}")
            time.sleep(_LOOK_S)
        if engine.cause is not None:
            return engine.cause.error(**facts)
        gave_up = self._gave_up(plan)
        if gave_up is not None:
            return gave_up
        peers = self._peers(rail)
        reason = str(error).partition("\n")[0].partition(". ")[0]
        return PeerDiedError(
            f"the connection to {'a peer' if peers[1:] else f'rank {peers[0]}'} broke ({reason}); "
            "look for its errors",
            peer=None if peers[1:] else peers[0],
            **facts,
        )

    def _gave_up(self, plan: Plan) -> PeerAbortedError | None:
        """Return the error for a peer that says on the board why it gave up, or None."""
        route = self._engine.route
        note = route.board.first(f"failed/{route.lane}")
        if not isinstance(note, list) or len(note) != 2 or note[0] == self._engine.rank:
            return None
        return PeerAbortedError(
            f"rank {note[0]} gave up: {note[1]}; close the group, and build a new one",
            peer=note[0],
            **self._facts(plan),
        )

    def translated(self, plan: Plan, error: CommError) -> CommError:
        """Return an error of the group inside the host, in ranks of the whole group."""
        engine = self._engine
        if isinstance(error, BrokenError) and isinstance(error.__cause__, CommError):
            error = error.__cause__  # it was aborted before this call
        until = time.monotonic() + HINDSIGHT_S
        while isinstance(error, PeerError) and time.monotonic() < until:
            if engine.cause is not None:
                return engine.cause.error(**self._facts(plan))
            gave_up = self._gave_up(plan)
            if gave_up is not None and isinstance(error, PeerAbortedError):
                return gave_up
            time.sleep(_LOOK_S)
        members = engine.members
        found = copy.copy(error)
        found.rank, found.op, found.epoch = engine.rank, plan.op, engine.epoch
        found.peer = None if error.peer is None else members[error.peer]
        ranks = ", ".join(map(str, members))
        found.args = (f"inside the host, where ranks {ranks} count from 0: {error.args[0]}",)
        if isinstance(found, MismatchError):
            found.values = {members[rank]: value for rank, value in found.values.items()}
        return found

    def tell(self, error: BaseException) -> None:
        """After a call that failed: let nobody wait for this rank."""
        engine, route = self._engine, self._engine.route
        if engine.cause is None:  # else every host's watch tells
            note = [engine.rank, f"{type(error).__name__}: {error}"[:300]]
            route.board.leave_first(f"failed/{route.lane}", note)
        for rail in route.rails.values():
            rail.drop()
        if route.inner is not None:
            route.inner.abort()

"""A board on which ranks leave notes for each other: a torch store, read without waiting.

Unlike the roll call it reaches other hosts. Unlike an exchange nobody takes part in anything: a
note is left in case somebody looks. A store that is gone loses notes, never a call.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..store_requests import Requests
from .cause import Cause, Kind

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from .watch import Watch

TICK_S = 0.05
"""Pause between two looks whether another host knows a cause. One request to the store each."""

_PATIENCE_S = 1.0


class Board:
    """One rank's view of the board.

    Args:
        store: That all ranks of the group reach; under a prefix of the group.
        rank: The own rank.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self.rank = rank
        self._requests = Requests(store)

    def leave(self, name: str, note: object) -> None:
        """Leave a note of this rank, in place of its last one of that name."""
        with suppress(RuntimeError):
            self._requests.ask(lambda store: store.set(f"{name}/{self.rank}", json.dumps(note)))

    def read(self, name: str, rank: int) -> Any:
        """Return a rank's note, or None."""
        return self._look(f"{name}/{rank}")

    def leave_first(self, name: str, note: object) -> None:
        """Leave a note unless some rank has left one of that name."""
        with suppress(RuntimeError):
            self._requests.ask(lambda store: store.compare_set(name, "", json.dumps(note)))

    def first(self, name: str) -> Any:
        """Return the note of who was first, or None."""
        return self._look(name)

    def _look(self, key: str) -> Any:
        def look(store: Store) -> bytes | None:
            return store.get(key) if store.check([key]) else None

        with suppress(RuntimeError, ValueError):
            note = self._requests.ask(look)
            return None if note is None else json.loads(note)
        return None


class FarSight:
    """Tells other hosts why this one gives up, and learns it from them. A thread of its own.

    The first cause stands on the board; every host's watch takes it over as its own.

    Args:
        board: The group's.
        watch: The own host's. Kept alive until `stop`.
    """

    def __init__(self, board: Board, watch: Watch) -> None:
        self._board = board
        self._watch = watch
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pcie_comm.far", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            self._look()

    def _look(self) -> None:
        cause = self._watch.cause
        if cause is not None:
            facts = [cause.peer, int(cause.kind), cause.reason, cause.exit_code]
            self._board.leave_first("cause", [self._board.rank, *facts])
            self._stop.set()
            return
        cause = self._read(self._board.first("cause"))
        if cause is not None:
            self._watch.learn(cause)
            self._stop.set()

    def _read(self, note: Any) -> Cause | None:
        """Return the cause that another rank noted; None if it is none."""
        kinds = [type(value) for value in note] if isinstance(note, list) else []
        if kinds[:4] != [int, int, int, str] or len(kinds) != 5:
            return None
        teller, peer, kind, reason, exit_code = note
        known = 0 <= peer < len(self._watch.span.hosts) and kind in list(Kind)
        if not known or not isinstance(exit_code, int | None):
            return None
        reason = reason or f"as rank {teller} saw"
        return Cause(peer, Kind(kind), reason, exit_code)

    def stop(self) -> None:
        """Tell what is known, and look no longer. Idempotent."""
        if not self._stop.is_set():
            self._stop.set()
            self._look()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE_S)

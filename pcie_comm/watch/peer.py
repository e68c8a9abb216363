"""What one rank sees of another: alive, stopped, aborted, dead."""

from __future__ import annotations

from .cause import Cause, Kind, fate
from .life_lock import Life
from .process import PeerProcess, Process
from .roll_call import Line, State

EXIT_CODE_GRACE_S = 0.03
"""How long a death is kept back for its exit code: a process that dies with much memory, or with a
GPU, is taken down for as long as a second after its threads are gone."""

SILENT_S = 1.0
"""A process whose watchdog has not run for so long is called stopped, for people to look at."""


class Peer:
    """A peer as its line on the roll call and its process show it.

    Args:
        rank: The peer.
        watcher: The own rank.
        line: The peer's line.
        process: The peer's process.
    """

    def __init__(self, rank: int, watcher: int, line: Line, process: Process) -> None:
        self.rank = rank
        self._watcher = watcher
        self._line: Line | None = line
        self.foreign = process.token != Process.here().token
        self._process = PeerProcess(process) if self.foreign else None
        self._beat = 0
        self._beat_at = self._looked_at = 0.0
        self._lost_at = 0.0

    def judge(self, now: float) -> Cause | None:
        """Return why this peer will come to no further call, or None.

        Args:
            now: Seconds of the monotonic clock.
        """
        line = self._line
        if line is None:
            return None
        if line.beat != self._beat or not self._looked_at:
            self._beat, self._beat_at = line.beat, now
        self._looked_at = now
        state = line.state
        if state == State.LEFT:
            return None
        if state == State.ABORTED:
            return self._blamed(line) or Cause(self.rank, Kind.ABORTED, line.heard())
        if state != State.EXITED and not self._is_lost(line):
            return None
        exit_code = self.exit_code()
        self._lost_at = self._lost_at or now
        if exit_code is None and now - self._lost_at < EXIT_CODE_GRACE_S:
            return None
        return self._blamed(line) or Cause(self.rank, Kind.DIED, line.heard(), exit_code)

    def _is_lost(self, line: Line) -> bool:
        if self._process is None:
            return False
        life = line.life_lock().look() if line.state == State.PRESENT else Life.FREE
        return life is Life.ABANDONED or (life is Life.FREE and self._process.ended())

    def _blamed(self, line: Line) -> Cause | None:
        """Return what this peer saw before its own end: an end that followed is only an echo."""
        if line.blamed in (0, 1 + self._watcher):
            return None
        exit_code = line.exit_code if line.exit_known else None
        return Cause(line.blamed - 1, Kind(line.blamed_kind), f"as rank {self.rank} saw", exit_code)

    def exit_code(self) -> int | None:
        """Return the exit code of a peer that died, or None if it is not known, or not yet."""
        return self._process.exit_code() if self._process else None

    def let_go(self) -> bool:
        """Tell whether this peer addresses no slab any more: it unmapped them, or has ended."""
        released = self._line is not None and self._line.released != 0
        return released or (self._process is not None and self._process.ended())

    def describe(self) -> str:
        """Say in words how the peer fares, as of the watchdog's last look."""
        if self._process is None:
            return "a thread of this process"
        if self._process.ended():
            return fate(self._process.exit_code())
        silent_s = self._looked_at - self._beat_at
        if silent_s >= SILENT_S:
            return f"its process has not run for {silent_s:.1f} s: stopped, or starved"
        how = "pidfd and life lock" if self._process.descriptor >= 0 else "life lock"
        return f"its process lives ({how})"

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._line = None
        if self._process is not None:
            self._process.close()

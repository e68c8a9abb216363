"""Watch: what a group knows of its ranks' lives, and how it tells them of its own end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..agreement import agree, read_fields, read_record
from ..errors import CommError, PeerError, PeerTimeoutError
from ..span import Span
from . import watchdog
from .board import Board, FarSight
from .cause import Cause, Kind
from .life_lock import LifeLock
from .peer import Peer
from .process import Process
from .roll_call import Line, RollCall, State

if TYPE_CHECKING:
    from ..bootstrap import Bootstrap


class Watch:
    """One rank's watch over its peers.

    The watchdog looks at the peers every few milliseconds. Once it has found a cause, that one
    stays: `on_cause` is called with it, once, on the watchdog's thread or on that of `abort`.

    Args:
        rank: The own rank.
        processes: The process of every rank.
        roll_call: The group's page; owned from here on.
        on_cause: Makes the rank's waits end. Must not wait, and must not refer to the group: a
            group that is dropped must be collected.

    The ranks of other hosts are on no page here. What becomes of them is learned from theirs.

    Attributes:
        cause: Why the group cannot go on, or None.
        span: Where the ranks are.
        one_process: All ranks of this host are threads of this process.
        group: Random name of the group, the same on all ranks.
        released: This rank addresses no peer's slab any more.
    """

    def __init__(
        self,
        rank: int,
        processes: Sequence[Process],
        roll_call: RollCall,
        on_cause: Callable[[Cause], None],
    ) -> None:
        self.rank = rank
        self.group = roll_call.name
        self.span = Span.of([process.boot for process in processes])
        self._far: FarSight | None = None
        self.cause: Cause | None = None
        self.released = False
        self.peers = {
            peer: Peer(peer, rank, roll_call.line(peer), process)
            for peer, process in enumerate(processes)
            if peer != rank and self.span.hosts[peer] == self.span.hosts[rank]
        }
        self.one_process = not any(peer.foreign for peer in self.peers.values())
        self._roll_call: RollCall | None = roll_call
        self._own = roll_call.line(rank)
        self._held: LifeLock | None = None
        self._on_cause = on_cause
        self._lock = threading.RLock()

    def attend(self) -> None:
        """Be present on the roll call, and look at the peers from now on."""
        watchdog.add(self)
        with self._lock:
            if self._own.state == State.ABSENT:
                self._own.say(State.PRESENT)

    def hold_life_lock(self) -> None:
        """Take the own life lock for the calling thread, the watchdog's."""
        self._held = self._own.life_lock()
        self._held.hold()

    def release_life_lock(self) -> None:
        """Give the own life lock back, on the thread that took it. Idempotent."""
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def look(self) -> None:
        """Look at every peer once; called by the watchdog, and by ranks of this process."""
        with self._lock:
            if self._roll_call is None:
                return
            self._own.beat = (self._own.beat + 1) & 0xFFFF_FFFF
            now = time.monotonic()
            for peer in self.peers.values():
                cause = peer.judge(now)
                if cause is not None:
                    self._declare(cause)
            found = self.cause
            unknown = found is not None and found.kind == Kind.DIED and found.exit_code is None
            if found is not None and unknown and found.peer in self.peers:
                found.exit_code = self.peers[found.peer].exit_code()

    def learn(self, cause: Cause) -> None:
        """Take over what another host found out."""
        with self._lock:
            if self._roll_call is not None:
                self._declare(cause)

    def see_far(self, board: Board) -> None:
        """Exchange causes with the other hosts from now on, if there are any."""
        if self.span.count > 1:
            self._far = FarSight(board, self)

    def _declare(self, cause: Cause) -> None:
        if self.cause is None:
            self.cause = cause
            if cause.peer != self.rank:
                self._own.blame(cause)
            self._on_cause(cause)

    def abort(self, reason: str) -> None:
        """Say that this rank comes to no further call; end its own waits and those of the peers.

        Returns at once. Peers in other processes learn of it within a tick of their watchdog.
        """
        with self._lock:
            if self._roll_call is None:
                return
            if self._own.state in (State.ABSENT, State.PRESENT):
                self._own.say(State.ABORTED, reason)
            self._declare(Cause(self.rank, Kind.ABORTED, reason))
        watchdog.look_now()

    def give_up(self, failure: CommError) -> None:
        """Abort because of what a call or the set-up raised; name the rank that is to blame."""
        with self._lock:
            late = failure.peer if isinstance(failure, PeerTimeoutError) else None
            if late is not None and self.cause is None:
                self._own.blame(Cause(late, Kind.LATE))
        self.abort(f"it gave up after {type(failure).__name__}: {failure}")

    def exit(self) -> None:
        """Say that the interpreter ends. Touches nothing but the own line."""
        if self._roll_call is not None and self._own.state == State.PRESENT:
            self._own.say(State.EXITED, "the interpreter ended without close()")

    def error(self) -> PeerError | None:
        """Return the cause as an error, or None."""
        cause = self.cause
        return None if cause is None else cause.error(self.rank)

    def say_released(self) -> None:
        """Say that this rank addresses no peer's slab any more."""
        self.released = True
        self._own.released = 1

    def all_let_go(self) -> bool:
        """Tell whether no peer can address this rank's slabs any more."""
        return all(peer.let_go() for peer in self.peers.values())

    def describe(self, peer: int) -> str:
        """Say in words how a rank fares."""
        if peer in self.peers:
            return self.peers[peer].describe()
        return "this rank" if peer == self.rank else f"on host {self.span.hosts[peer]}"

    def retire(self) -> None:
        """Look at the peers no longer, except in `all_let_go`. Idempotent.

        Peers take a rank that did not abort for one that closed the group with them.
        """
        with self._lock:
            self._on_cause = _ignore
            if self._own.state != State.ABORTED:
                self._own.say(State.LEFT)
        watchdog.remove(self)  # without the lock: the watchdog's thread may wait for it

    def forget_name(self) -> None:
        """Remove the name of the roll call: every rank has mapped it."""
        if self._roll_call is not None:
            self._roll_call.unlink()

    def leave(self) -> None:
        """Retire, and unmap the roll call. Idempotent."""
        if self._far is not None:
            self._far.stop()
        self.retire()
        self.forget_name()
        with self._lock:
            roll_call, self._roll_call = self._roll_call, None
            if roll_call is None:
                return
            self._own = Line()  # of no page: a late abort changes nothing
            for peer in self.peers.values():
                peer.close()
            roll_call.close()


def _ignore(cause: Cause) -> None:
    """What a watch does about a cause once its group is closed."""


def open_watch(bootstrap: Bootstrap, on_cause: Callable[[Cause], None], timeout_s: float) -> Watch:
    """Call the roll and start watching. Collective.

    From here on the bootstrap's waits end when a peer dies or aborts.

    Raises:
        UnsupportedError: /dev/shm is missing or full.
        InvalidArgumentError: The ranks do not share /dev/shm.
        PeerAbortedError, PeerTimeoutError: As for every agreement.
    """
    rank = bootstrap.rank
    pages: list[RollCall] = []

    def create() -> str:
        pages.append(RollCall.create(one_process=bootstrap.same_process))
        return pages[0].name

    def introduce() -> bytes:
        page = create() if rank == 0 else ""
        return json.dumps({"page": page, "process": asdict(Process.here())}).encode()

    try:
        records = agree(bootstrap, "roll call", introduce, timeout_s)
        told = [read_record(record, peer, "roll call") for peer, record in enumerate(records)]
        processes = [
            read_fields(Process, facts.get("process"), peer, "roll call")
            for peer, facts in enumerate(told)
        ]
        name = group = str(told[0].get("page"))  # what is no name, no file has
        span = Span.of([process.boot for process in processes])
        if span.count > 1:  # the other hosts need pages of their own
            first = span.members[span.hosts[rank]][0]
            names = agree(
                bootstrap,
                "roll call of each host",
                lambda: (create() if rank == first != 0 else "").encode(),
                timeout_s,
            )
            name = names[first].decode(errors="replace") if first else group

        def make() -> Watch:
            page = pages.pop() if pages else RollCall.attach(name, 0)
            watch = Watch(rank, processes, page, on_cause)
            watch.group = group
            return watch

        return _attend(bootstrap, make, timeout_s)
    finally:
        for page in pages:  # that no watch owns
            page.unlink()
            page.close()


def _attend(bootstrap: Bootstrap, make: Callable[[], Watch], timeout_s: float) -> Watch:
    """Make a watch on every rank, or on none. Collective."""
    watches: list[Watch] = []

    def attend() -> bytes:
        watches.append(make())
        watches[0].attend()
        bootstrap.trouble = watches[0].error
        return b""

    try:
        agree(bootstrap, "attending the roll call", attend, timeout_s)
    except BaseException as error:
        for watch in watches:
            watch.abort(f"{type(error).__name__}: {error}")
            watch.leave()
        raise
    watches[0].forget_name()
    return watches[0]

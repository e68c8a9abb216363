"""Rendezvous: how the ranks of one group find each other and exchange small records.

Three kinds of ranks share one interface: threads of one process (here), processes that share a
torch store, and members of a torch process group (both in bootstrap_torch.py). Only bytes travel;
they are read as JSON or fixed binary, never unpickled.

An exchange is collective: every rank calls it in the same order. `agree` (agreement.py) turns local
work into such a step, so that a failure on one rank reaches all and nobody is left waiting.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .agreement import agree, compare
from .config import Config
from .errors import (
    BrokenError,
    ClosedError,
    CommError,
    PeerAbortedError,
    PeerError,
    PeerTimeoutError,
    UnsupportedError,
)
from .rank_order import group_order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

__all__ = ["Bootstrap", "ThreadBootstrap", "agree", "compare", "open_bootstrap"]


_LOOK_S = 0.02
"""Pause between two looks whether the peers still live, in seconds."""

_HINDSIGHT_S = 0.1


class Bootstrap(ABC):
    """One rank's end of the rendezvous. Ranks are group ranks.

    Nothing here has a finaliser: dropping a bootstrap, or leaving the process without `close`,
    talks to nobody.

    Attributes:
        rank: Group rank of this end.
        world_size: Number of ranks.
        global_ranks: What launcher or torch call each of them, in group-rank order.
        same_process: All ranks are threads of this process.
        trouble: Tells why the peers need not be waited for any longer: an error, or None. The
            group's watch takes this place; waits ask it again and again.
    """

    same_process: bool = False

    def __init__(self, rank: int, global_ranks: Sequence[int]) -> None:
        self.rank = rank
        self.world_size = len(global_ranks)
        self.global_ranks = tuple(global_ranks)
        self.trouble: Callable[[], PeerError | None] = lambda: None
        self._failure: BaseException | None = None
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._failure else "open"
        return f"<{type(self).__name__} rank={self.rank} world_size={self.world_size} {state}>"

    @property
    def failed(self) -> bool:
        """An exchange failed: this end refuses further ones."""
        return self._failure is not None

    @property
    def failure(self) -> CommError | None:
        """What an exchange failed with, if it was an error of this library."""
        return self._failure if isinstance(self._failure, CommError) else None

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Give `payload` to every rank and return the payloads of all.

        Collective: every rank calls it, in the same order. After a failure this end is out of
        step with its peers and refuses further exchanges.

        Args:
            payload: Bytes of any length; the ranks' lengths may differ.
            timeout_s: Longest wait for the peers, in seconds.

        Returns:
            One payload per rank, in group-rank order.

        Raises:
            PeerTimeoutError: A peer did not come in time; names the missing ranks where known.
            PeerAbortedError: A peer called `abort`.
            PeerDiedError: A peer died, or a connection to the peers broke.
            BrokenError: An earlier exchange failed; that failure is `__cause__`.
            ClosedError: `close` was called before.
        """
        if self._closed:
            raise ClosedError("the bootstrap was closed; build a new group", rank=self.rank)
        if self._failure is not None:
            raise BrokenError(
                f"an earlier exchange failed ({self._failure}); build a new group", rank=self.rank
            ) from self._failure
        try:
            return self._exchange(bytes(payload), timeout_s)
        except BaseException as error:
            self._failure = error
            raise

    @abstractmethod
    def _exchange(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Do one exchange, or raise a CommError."""

    def shared_store(self) -> Store:
        """Return a torch store that all ranks reach while this end is open.

        For what outlasts an exchange: rails of torch_dist, and notes between hosts. Whoever writes
        there takes a prefix that no other group has.

        Raises:
            UnsupportedError: This kind of rendezvous has none.
        """
        raise UnsupportedError(
            f"{type(self).__name__} has no store, which torch_dist and groups over several hosts "
            "need; override shared_store",
            reason="the rendezvous has no store",
            rank=self.rank,
        )

    @property
    def process_group(self) -> ProcessGroup | None:
        """The caller's process group, if the ranks meet through one."""
        return None

    def abort(self, reason: str) -> None:
        """Tell waiting peers, where this kind can, that this rank comes to no further exchange.

        Returns at once. The peers raise PeerAbortedError with `reason`, or time out.
        """
        if self._failure is None:
            self._failure = PeerAbortedError(f"this rank aborted: {reason}", rank=self.rank)

    def close(self) -> None:
        """Give up the connection. Idempotent; waits for no peer's progress."""
        self._closed = True

    def _check_peers(self) -> None:
        """Raise if waiting on makes no sense."""
        error = self.trouble()
        if error is not None:
            raise error

    def _blame_a_peer(self) -> None:
        """After a connection broke, give the watch a moment to find out whose end broke it."""
        deadline = time.monotonic() + _HINDSIGHT_S
        while time.monotonic() < deadline:
            self._check_peers()
            time.sleep(_LOOK_S / 4)

    def _timed_out(self, missing: Sequence[int], started: float) -> PeerTimeoutError:
        elapsed = time.monotonic() - started
        who = f"ranks {', '.join(map(str, missing))}" if missing else "at least one rank"
        return PeerTimeoutError(
            f"{who} of world_size={self.world_size} did not come within {elapsed:.1f} s; "
            "look for their errors, or raise Config.setup_timeout_s",
            rank=self.rank,
            peer=missing[0] if missing else None,
            elapsed_ns=int(elapsed * 1e9),
        )


class _Meeting:
    """Where the threads of one process meet. Every field is guarded by `changed`."""

    def __init__(self, global_ranks: Sequence[int]) -> None:
        self.changed = threading.Condition()
        self.global_ranks = tuple(global_ranks)
        self.rounds: dict[int, dict[int, bytes]] = {}
        self.readers: dict[int, int] = {}
        self.store: Store | None = None
        self.aborted: tuple[int, str] | None = None


class ThreadBootstrap(Bootstrap):
    """Ranks are threads of one process."""

    same_process = True

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.global_ranks)
        self._meeting = meeting
        self._round = 0

    @classmethod
    def create(cls, world_size: int) -> list[ThreadBootstrap]:
        """Return the connected ends of `world_size` ranks, in rank order."""
        meeting = _Meeting(group_order(world_size))
        return [cls(rank, meeting) for rank in range(world_size)]

    def _exchange(self, payload: bytes, timeout_s: float) -> list[bytes]:
        meeting, number, started = self._meeting, self._round, time.monotonic()
        self._round += 1
        with meeting.changed:
            here = meeting.rounds.setdefault(number, {})
            here[self.rank] = payload
            meeting.changed.notify_all()
            while len(here) < self.world_size:
                if meeting.aborted is not None:
                    raise aborted_by(self.rank, *meeting.aborted)
                self._check_peers()
                remaining_s = started + timeout_s - time.monotonic()
                if remaining_s <= 0:
                    missing = [peer for peer in range(self.world_size) if peer not in here]
                    raise self._timed_out(missing, started)
                meeting.changed.wait(min(remaining_s, _LOOK_S))
            meeting.readers[number] = meeting.readers.get(number, 0) + 1
            if meeting.readers[number] == self.world_size:
                del meeting.rounds[number], meeting.readers[number]
            return [here[peer] for peer in range(self.world_size)]

    def shared_store(self) -> Store:
        with self._meeting.changed:
            if self._meeting.store is None:
                from torch.distributed import HashStore  # type: ignore[attr-defined]

                self._meeting.store = HashStore()
            return self._meeting.store

    def abort(self, reason: str) -> None:
        super().abort(reason)
        with self._meeting.changed:
            if self._meeting.aborted is None:
                self._meeting.aborted = (self.rank, reason)
            self._meeting.changed.notify_all()


def alone(global_ranks: Sequence[int]) -> Bootstrap:
    """Return the bootstrap of a group of one: no peers, no connection."""
    return ThreadBootstrap(0, _Meeting(global_ranks))


def aborted_by(rank: int, peer: int | None, reason: str) -> PeerAbortedError:
    """Build the error of a rank that learns of a peer's abort."""
    who = "a rank" if peer is None else f"rank {peer}"
    return PeerAbortedError(f"{who} aborted: {reason}", rank=rank, peer=peer)


def open_bootstrap(
    ranks: int | Sequence[int],
    process_group: ProcessGroup | None = None,
    config: Config | None = None,
) -> Bootstrap:
    """Connect the ranks of a group, by what this process was started with.

    Collective over `ranks`. In this order: `process_group` if given; the store of an initialised
    torch.distributed; the TCPStore that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe
    (torchrun); nothing at all for a group of one.

    Args:
        ranks: World size, or the global ranks of the group in group-rank order.
        process_group: Torch process group whose members are exactly `ranks`, in any order. With
            an int, group ranks are its own.
        config: Settings; `setup_timeout_s` bounds the wait for the peers.

    Raises:
        InvalidArgumentError: `ranks` is malformed, lacks this process, or nothing connects it.
        PeerTimeoutError: A rank did not come in time.
        MismatchError: The ranks name the group in different orders.
    """
    from . import bootstrap_torch  # torch only when a group is built

    order = group_order(ranks)
    config = config or Config()
    if process_group is not None:
        bootstrap = bootstrap_torch.from_process_group(ranks, process_group)
    else:
        bootstrap = bootstrap_torch.from_launch(order, config.setup_timeout_s)
    try:
        named = json.dumps({"ranks": bootstrap.global_ranks}).encode()
        compare(bootstrap.all_gather(named, config.setup_timeout_s), "the order of the group")
    except BaseException:
        bootstrap.close()
        raise
    return bootstrap

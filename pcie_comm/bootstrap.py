"""Rendezvous: how the ranks of one group find each other and exchange small records.

Three kinds of ranks share one interface: threads of one process (here), processes that share a
torch store, and members of a torch process group (both in bootstrap_torch.py). Only bytes travel;
they are read as JSON or fixed binary, never unpickled.

An exchange is collective: every rank calls it in the same order. `agree` turns local work into
such a step, so that a failure on one rank reaches all of them and nobody is left waiting.
"""

from __future__ import annotations

import json
import operator
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .config import Config
from .errors import (
    BrokenError,
    ClosedError,
    CommError,
    InvalidArgumentError,
    MismatchError,
    PeerAbortedError,
    PeerTimeoutError,
)
from .layout import MAX_WORLD

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DONE = b"\x01"
_FAILED = b"\x00"
_MAX_REASON = 4096
"""Longest error text, in characters, that travels to the other ranks."""


class Bootstrap(ABC):
    """One rank's end of the rendezvous. Ranks are group ranks.

    Nothing here has a finaliser: dropping a bootstrap, or leaving the process without `close`,
    talks to nobody.

    Attributes:
        rank: Group rank of this end.
        world_size: Number of ranks.
        same_process: All ranks are threads of this process.
    """

    same_process: bool = False

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._failure: BaseException | None = None
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._failure else "open"
        return f"<{type(self).__name__} rank={self.rank} world_size={self.world_size} {state}>"

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
            PeerDiedError: A connection to the peers broke.
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

    def abort(self, reason: str) -> None:
        """Tell waiting peers, where this kind can, that this rank comes to no further exchange.

        Returns at once. The peers raise PeerAbortedError with `reason`, or time out.
        """
        if self._failure is None:
            self._failure = PeerAbortedError(f"this rank aborted: {reason}", rank=self.rank)

    def close(self) -> None:
        """Give up the connection. Idempotent; waits for no peer's progress."""
        self._closed = True

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

    def __init__(self, world_size: int) -> None:
        self.changed = threading.Condition()
        self.world_size = world_size
        self.rounds: dict[int, dict[int, bytes]] = {}
        self.readers: dict[int, int] = {}
        self.aborted: tuple[int, str] | None = None


class ThreadBootstrap(Bootstrap):
    """Ranks are threads of one process."""

    same_process = True

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.world_size)
        self._meeting = meeting
        self._round = 0

    @classmethod
    def create(cls, world_size: int) -> list[ThreadBootstrap]:
        """Return the connected ends of `world_size` ranks, in rank order."""
        meeting = _Meeting(len(group_order(world_size)))
        return [cls(rank, meeting) for rank in range(world_size)]

    def _exchange(self, payload: bytes, timeout_s: float) -> list[bytes]:
        meeting, number, started = self._meeting, self._round, time.monotonic()
        self._round += 1
        with meeting.changed:
            here = meeting.rounds.setdefault(number, {})
            here[self.rank] = payload
            meeting.changed.notify_all()
            meeting.changed.wait_for(
                lambda: len(here) == self.world_size or meeting.aborted is not None, timeout_s
            )
            if len(here) < self.world_size:
                if meeting.aborted is not None:
                    raise _aborted(self.rank, *meeting.aborted)
                missing = [peer for peer in range(self.world_size) if peer not in here]
                raise self._timed_out(missing, started)
            meeting.readers[number] = meeting.readers.get(number, 0) + 1
            if meeting.readers[number] == self.world_size:
                del meeting.rounds[number], meeting.readers[number]
            return [here[peer] for peer in range(self.world_size)]

    def abort(self, reason: str) -> None:
        super().abort(reason)
        with self._meeting.changed:
            if self._meeting.aborted is None:
                self._meeting.aborted = (self.rank, reason)
            self._meeting.changed.notify_all()


def _aborted(rank: int, peer: int, reason: str) -> PeerAbortedError:
    return PeerAbortedError(f"rank {peer} aborted: {reason}", rank=rank, peer=peer)


def agree(
    bootstrap: Bootstrap, what: str, work: Callable[[], bytes], timeout_s: float
) -> list[bytes]:
    """Run `work` on every rank and share how it went.

    Collective. Every rank takes part whether its own work succeeded or not, so nobody waits for a
    rank that has already failed. Work must not talk to peers itself.

    Args:
        bootstrap: The ranks.
        what: The step in a few words, for messages: "mapping the peers' slabs".
        work: Returns the bytes to share.
        timeout_s: Longest wait for the peers' outcomes, in seconds, after the own work.

    Returns:
        What each rank's work returned, in group-rank order.

    Raises:
        PeerAbortedError: Another rank's work failed; holds that error's class and text.
        Exception: The own work's error, if it failed here.
    """
    error: Exception | None = None
    payload = b""
    try:
        payload = work()
    except Exception as caught:
        error = caught
    except BaseException as caught:  # leaving the process must not wait for peers
        bootstrap.abort(f"{what}: {type(caught).__name__}")
        raise
    try:
        outcome = _DONE + payload if error is None else _FAILED + _describe(error)
        try:
            outcomes = bootstrap.all_gather(outcome, timeout_s)
        except CommError:
            if error is not None:
                raise error  # noqa: B904  the exchange's failure stays visible as __context__
            raise
        if error is not None:
            raise error
        _raise_first_failure(bootstrap, what, outcomes)
        return [outcome[1:] for outcome in outcomes]
    finally:
        del error  # its traceback holds this frame


def _describe(error: Exception) -> bytes:
    return json.dumps([type(error).__name__, str(error)[:_MAX_REASON]]).encode()


def _raise_first_failure(bootstrap: Bootstrap, what: str, outcomes: Sequence[bytes]) -> None:
    failed = [peer for peer, outcome in enumerate(outcomes) if not outcome.startswith(_DONE)]
    if not failed:
        return
    kind, text = json.loads(outcomes[failed[0]][1:])
    others = f" (ranks {', '.join(map(str, failed[1:]))} failed as well)" if failed[1:] else ""
    raise PeerAbortedError(
        f"{what} failed on rank {failed[0]}: {kind}: {text}{others}",
        rank=bootstrap.rank,
        peer=failed[0],
    )


def compare(records: Sequence[bytes], what: str) -> None:
    """Check that the ranks' contract records, JSON objects, are equal field by field.

    Every rank holds the same records, so every rank reaches the same verdict.

    Args:
        records: One record per rank, in group-rank order.
        what: What the records describe, for the message.

    Raises:
        MismatchError: `values` maps each rank to its values of the fields that differ.
        InvalidArgumentError: A record is no JSON object.
    """
    contracts = [_read_contract(record, peer) for peer, record in enumerate(records)]
    names = sorted({name for contract in contracts for name in contract})
    absent = "<absent>"
    differing = [
        name
        for name in names
        if any(c.get(name, absent) != contracts[0].get(name, absent) for c in contracts)
    ]
    if not differing:
        return
    values = {
        rank: {name: contract.get(name, absent) for name in differing}
        for rank, contract in enumerate(contracts)
    }
    listing = "; ".join(
        f"{name}: " + ", ".join(f"rank {rank}={row[name]!r}" for rank, row in values.items())
        for name in differing
    )
    raise MismatchError(
        f"the ranks disagree on {what}: {listing}; give every rank the same", values=values
    )


def _read_contract(record: bytes, peer: int) -> dict[str, Any]:
    try:
        contract = json.loads(record)
        if not isinstance(contract, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise InvalidArgumentError(
            f"the contract record of rank {peer} is malformed ({error}); "
            "do all ranks run the same version of pcie_comm?",
            peer=peer,
        ) from error
    return contract


def group_order(ranks: int | Sequence[int]) -> tuple[int, ...]:
    """Return the global ranks of a group in group-rank order.

    Raises:
        InvalidArgumentError: `ranks` is no world size from 1 to 16 and no sequence of that many
            different, non-negative global ranks.
    """
    if isinstance(ranks, Sequence):
        return _checked_sequence(ranks)
    world_size = _checked_integer(ranks, "ranks")
    if not 1 <= world_size <= MAX_WORLD:
        raise InvalidArgumentError(
            f"world size ranks={world_size} is out of range; give 1 to {MAX_WORLD}"
        )
    return tuple(range(world_size))


def _checked_sequence(ranks: Sequence[int]) -> tuple[int, ...]:
    order = tuple(_checked_integer(rank, f"ranks={ranks!r}: rank") for rank in ranks)
    if not 1 <= len(order) <= MAX_WORLD:
        raise InvalidArgumentError(
            f"ranks={ranks!r} has length {len(order)}; give 1 to {MAX_WORLD} global ranks"
        )
    if min(order) < 0:
        raise InvalidArgumentError(
            f"ranks={ranks!r} holds the negative rank {min(order)}; global ranks start at 0"
        )
    twice = sorted({rank for rank in order if order.count(rank) > 1})
    if twice:
        raise InvalidArgumentError(
            f"ranks={ranks!r} names {twice} more than once; name each global rank once"
        )
    return order


def _checked_integer(value: object, name: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError("a bool is no rank")
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidArgumentError(
            f"{name}={value!r} is not an integer; give a world size from 1 to {MAX_WORLD}, "
            "or a list of global ranks"
        ) from error


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

    group_order(ranks)
    config = config or Config.from_env()
    if process_group is not None:
        return bootstrap_torch.from_process_group(ranks, process_group)
    return bootstrap_torch.from_launch(group_order(ranks), config.setup_timeout_s)

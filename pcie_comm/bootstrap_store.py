"""Rendezvous of processes through a torch store (TCPStore under torchrun)."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from torch.distributed.distributed_c10d import PrefixStore, Store

from .agreement import read_pair
from .bootstrap import Bootstrap, aborted_by
from .config import agent_hosts_store
from .errors import PeerDiedError
from .store_requests import FAREWELL_S, Answer, Requests, SilenceError

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02
_LINGER_S = 2.0
_LEFT = b"left"


class Pause:
    """Sleeps between two looks at something: short at first, then longer, until a deadline."""

    def __init__(self, timeout_s: float) -> None:
        self.started = time.monotonic()
        self._deadline = self.started + timeout_s
        self._seconds = _FIRST_PAUSE_S

    def remaining_s(self) -> float:
        return self._deadline - time.monotonic()

    def sleep(self) -> None:
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, _LONGEST_PAUSE_S)


class StoreBootstrap(Bootstrap):
    """Ranks are processes that share a torch store.

    Looks at keys instead of blocking in `Store.wait`: a client has one connection, which others in
    this process use too, and a look can tell which ranks are missing.

    Each group has a session of its own (`_join`), so that groups of the same ranks, built one after
    another or after a failed attempt, never read each other's keys. A rank deletes its payload of
    one exchange when it has completed the next; who closes last deletes the rest.

    Attributes:
        hosts_store: Whether the store ends with this process.

    Args:
        store: A store that all ranks reach.
        order: Global ranks in group-rank order.
        global_rank: This process.
        timeout_s: Longest wait for the peers to join, in seconds.

    Raises:
        PeerTimeoutError: A rank did not come in time.
        PeerDiedError: The store is gone.
    """

    def __init__(
        self, store: Store, order: Sequence[int], global_rank: int, timeout_s: float
    ) -> None:
        super().__init__(order.index(global_rank), order)
        self._global_rank = global_rank
        self.hosts_store = global_rank == 0 and not agent_hosts_store()
        self._round = 0
        members = "-".join(map(str, sorted(order)))
        meeting = PrefixStore(f"pcie_comm/{members}", store)
        pause = Pause(timeout_s)
        try:
            session = self._join(Requests(meeting), pause)
        except SilenceError as error:
            raise self._timed_out([], pause.started) from error
        except RuntimeError as error:
            self._raise_store_error(error)
        self._session: Requests | None = Requests(PrefixStore(session, meeting))

    def _join(self, meeting: Requests, pause: Pause) -> str:
        """Return the name of a session that all ranks have entered.

        Each rank writes a fresh token, the tokens of all make the session's name, and each rank
        acknowledges that name. With the token of a failed attempt they make a name that the token's
        owner does not acknowledge; when the owner comes again, its new token makes a new name.
        """
        mine, joins = f"join/{self._global_rank}", [f"join/{rank}" for rank in self.global_ranks]

        def ask(request: Callable[[Store], Answer]) -> Answer:
            return meeting.ask(request, max(pause.remaining_s(), FAREWELL_S))

        def all_there(session: str) -> bool:
            return ask(lambda store: store.check(_acknowledgements(session, self.global_ranks)))

        def read_tokens(store: Store) -> list[bytes]:
            return [store.get(key) for key in joins] if store.check(joins) else [_LEFT]

        def acknowledge(store: Store) -> None:
            store.delete_key(f"{session}/ack/{self._global_rank}")
            store.set(f"{name}/ack/{self._global_rank}", "1")

        def leave(store: Store) -> list[int]:
            keys = _acknowledgements(session, self.global_ranks) if session else joins
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            store.set(mine, _LEFT.decode())
            store.delete_key(f"{session}/ack/{self._global_rank}")
            return missing

        session = ""
        ask(lambda store: store.set(mine, secrets.token_hex(8)))
        while not (session and all_there(session)):
            tokens = ask(read_tokens)
            name = hashlib.sha256(b"".join(sorted(tokens))).hexdigest()[:16]
            if _LEFT not in tokens and name != session:
                ask(acknowledge)
                session = name
            elif pause.remaining_s() <= 0:
                raise self._timed_out(ask(leave), pause.started)
            else:
                pause.sleep()
        return session

    def _exchange(self, payload: bytes, timeout_s: float) -> list[bytes]:
        session, number, pause = self._session, self._round, Pause(timeout_s)
        assert session is not None  # all_gather refuses after close
        self._round += 1
        keys = [f"{number}/{rank}" for rank in self.global_ranks]

        def ask(request: Callable[[Store], Answer]) -> Answer:
            return session.ask(request, max(pause.remaining_s(), FAREWELL_S), self._check_peers)

        def look(store: Store) -> tuple[list[bytes] | None, bytes | None]:
            if store.check(keys):
                return [store.get(key) for key in keys], None
            return None, store.get("abort") if store.check(["abort"]) else None

        def missing(store: Store) -> list[int]:
            return [rank for rank, key in enumerate(keys) if not store.check([key])]

        try:
            ask(lambda store: store.set(keys[self.rank], payload))  # type: ignore[arg-type]  # bytes are legal
            payloads, aborted = ask(look)
            while payloads is None:
                if aborted is not None:
                    peer, reason = read_pair(aborted, int, str)
                    raise aborted_by(self.rank, peer, reason)
                self._check_peers()
                if pause.remaining_s() <= 0:
                    raise self._timed_out(session.ask(missing), pause.started)
                pause.sleep()
                payloads, aborted = ask(look)
            if number:
                ask(lambda store: store.delete_key(f"{number - 1}/{self._global_rank}"))
        except SilenceError as error:
            raise self._timed_out([], pause.started) from error
        except RuntimeError as error:
            self._raise_store_error(error)
        return payloads

    def shared_store(self) -> Store:
        assert self._session is not None  # nobody asks after close
        return self._session.store

    def abort(self, reason: str) -> None:
        super().abort(reason)
        session, note = self._session, json.dumps([self.rank, reason])
        if session is not None:
            with suppress(RuntimeError):
                session.ask(lambda store: store.set("abort", note))

    def close(self) -> None:
        """Give up the connection.

        The process that hosts the store waits up to 2 s for the others to close: they may still be
        reading the last exchange, and the store ends with its process.
        """
        # Let go of the store: it would outlive torch's destroy_process_group, and what is left in
        # it would confuse the next init_process_group of this process.
        session, self._session = self._session, None
        if session is None:
            return
        super().close()
        with suppress(RuntimeError):  # the store is gone: nothing to tidy up
            if session.ask(lambda store: store.add("closed", 1)) == self.world_size:
                session.ask(self._delete_session)
            pause = Pause(_LINGER_S if self.hosts_store else 0.0)
            while pause.remaining_s() > 0 and session.ask(lambda store: store.check(["closed"])):
                pause.sleep()

    def _delete_session(self, store: Store) -> None:
        for rank in self.global_ranks:
            store.delete_key(f"ack/{rank}")
            for number in range(max(0, self._round - 2), self._round):
                store.delete_key(f"{number}/{rank}")
        store.delete_key("abort")
        store.delete_key("closed")

    def _raise_store_error(self, error: RuntimeError) -> NoReturn:
        self._blame_a_peer()
        reason = str(error).partition("\n")[0]
        raise PeerDiedError(
            f"the torch store failed ({reason}); it ends with the process that hosts it, "
            "global rank 0 or the launcher",
            rank=self.rank,
        ) from error


def _acknowledgements(session: str, order: Sequence[int]) -> list[str]:
    return [f"{session}/ack/{rank}" for rank in order]

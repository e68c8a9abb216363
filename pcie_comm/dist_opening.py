"""How a channel over torch.distributed is made: its rails, and the group inside the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .bootstrap_store import StoreBootstrap
from .config import Config
from .dist_engine import DistEngine, Route
from .errors import CommError, PeerTimeoutError
from .layout import LINE_NBYTES, align_up
from .transport.torch_dist import HEADER_NBYTES, Rail, prefix
from .watch.board import Board

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from .bootstrap import Bootstrap
    from .group import PcieDcpGroup
    from .meeting import Terms

LARGEST_SLOT = 1 << 30


@dataclass(frozen=True)
class Opening:
    """What a channel is made from.

    Attributes:
        bootstrap, terms, config: The group's.
        name: The group's random name, the same on all ranks.
        lane: Name of the channel.
        segment_nbytes: What a rank may exchange in one call.
        make_group: PcieDcpGroup.from_bootstrap.
    """

    bootstrap: Bootstrap
    terms: Terms
    config: Config
    name: str
    lane: str
    segment_nbytes: int
    make_group: Callable[..., PcieDcpGroup]


def board_of(bootstrap: Bootstrap, name: str) -> Board:
    """Return the board of the group called `name`."""
    return Board(prefix(bootstrap.shared_store(), name, "board"), bootstrap.rank)


def open_engine(opening: Opening) -> DistEngine:
    """Connect a channel's ranks. Every rank does it at once; waits are bounded by the set-up's.

    Raises:
        PeerTimeoutError: A rank did not come in time.
        CommError: What the group inside the host raises.
    """
    bootstrap, terms = opening.bootstrap, opening.terms
    rank, limit_s = bootstrap.rank, opening.config.setup_timeout_s
    store = prefix(bootstrap.shared_store(), opening.name, opening.lane)
    with ExitStack() as undo:
        rails: dict[int, Rail] = {}
        for number in terms.span.served(rank):
            rails[number] = _rail(opening, prefix(store, "rail", number), limit_s)
            undo.callback(rails[number].drop)
        inner = _inner(opening, store)
        if inner is not None:
            undo.callback(inner.close)
        board = board_of(bootstrap, opening.name)
        route = Route(terms.span, rails, inner, board, opening.lane, terms.backend)
        engine = DistEngine(rank, terms.device, opening.config.timeout_s, route)
        undo.pop_all()
    return engine


def _rail(opening: Opening, store: Store, limit_s: float) -> Rail:
    terms, rank = opening.terms, opening.bootstrap.rank
    place = terms.span.hosts[rank]
    try:
        rail = Rail(terms.backend, store, place, terms.span.count, terms.device, limit_s)
        rail.warm_up(limit_s)
    except RuntimeError as error:
        raise PeerTimeoutError(
            f"torch_dist could not connect the ranks by {terms.backend} "
            f"({str(error).partition(chr(10))[0]}); can they reach each other? gloo takes the "
            "network of GLOO_SOCKET_IFNAME, NCCL that of NCCL_SOCKET_IFNAME",
            rank=rank,
        ) from error
    return rail


def _inner(opening: Opening, store: Store) -> PcieDcpGroup | None:
    """Return the group of this host's ranks; None where this is the only one."""
    bootstrap, span = opening.bootstrap, opening.terms.span
    host = span.hosts[bootstrap.rank]
    members = span.members[host]
    if len(members) == 1:
        return None
    limit_s = opening.config.setup_timeout_s
    own = StoreBootstrap(prefix(store, "host", host), members, bootstrap.rank, limit_s)
    own.hosts_store = False  # the outer end waits for the others
    own.same_process = bootstrap.same_process
    shared = span.most_served(host) * span.count * (HEADER_NBYTES + opening.segment_nbytes)
    nbytes = len(members) * align_up(shared + LINE_NBYTES, LINE_NBYTES)
    config = replace(opening.config, slot_nbytes=min(nbytes, LARGEST_SLOT), max_rows=1)
    inner = opening.make_group(own, opening.terms.device, opening.terms.inner, config)
    try:
        inner.prepare("all_gather_heads", rows=1)
    except CommError:
        inner.abort()
        inner.close()
        raise
    return inner


def facts_of(engine: Any) -> dict[str, object]:
    """Return what `describe` says of a channel over torch.distributed; nothing of another one."""
    if not isinstance(engine, DistEngine):
        return {}
    route = engine.route
    inside = None if route.inner is None else route.inner.describe()["transport"]
    return {"across": route.backend, "inside": inside, "times": dict(route.times.__dict__)}

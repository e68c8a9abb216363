"""What a channel has counted, as values; see docs/observability.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .layout import CountLayout

if TYPE_CHECKING:
    import numpy as np

WORDS = CountLayout.NBYTES // 8
"""Counters in a record."""

_TOTAL, _LONGEST = CountLayout.TOTAL // 8, CountLayout.LONGEST // 8
_HISTOGRAM = CountLayout.HISTOGRAM // 8


@dataclass(frozen=True)
class WaitStats:
    """How long waits took.

    Attributes:
        count: Number of waits.
        total_ns: Their sum, in nanoseconds.
        longest_ns: The longest.
        histogram: 32 buckets. Bucket b has the waits of 2**b to 2**(b+1)-1 ns; the first also those
            of 0 ns, the last also all longer ones.
    """

    count: int
    total_ns: int
    longest_ns: int
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class PeerStats:
    """What one rank waited for one peer.

    Attributes:
        peer: The peer's rank.
        waits: One for each operation.
    """

    peer: int
    waits: WaitStats


@dataclass(frozen=True)
class ChannelStats:
    """What one rank has counted on one channel since it was made. Counters only grow.

    Attributes:
        channel: Its name.
        rank: This rank.
        world_size: Number of ranks.
        ops: Operations that took part in the exchange: eager calls, and replays of captured ones.
        sent_nbytes: Payload that left this rank: what it staged, with tags and padding, times the
            number of peers. Of sums under pull, which peers fetch in parts, an upper bound.
        waits: All waits: those for each peer together. Over `torch_dist`, where calls wait for all
            peers at once, one for each operation.
        peers: Per peer, in rank order; empty where waits are for all at once.
    """

    channel: str
    rank: int
    world_size: int
    ops: int
    sent_nbytes: int
    waits: WaitStats
    peers: tuple[PeerStats, ...]

    @property
    def slowest_peer(self) -> int | None:
        """The peer that was waited for longest in total; None without waits for single peers."""
        waited = [one for one in self.peers if one.waits.total_ns]
        if not waited:
            return None
        return max(waited, key=lambda one: one.waits.total_ns).peer


class Records(NamedTuple):
    """Counters as they are kept, in records of CountLayout.

    Attributes:
        by_rank: [ranks, WORDS] uint64: the waits for each peer; of the own rank, its launches.
        joint: [WORDS] uint64: waits for all peers at once; None where each is waited for.
    """

    by_rank: np.ndarray
    joint: np.ndarray | None = None


def channel_stats(channel: str, rank: int, world_size: int, records: Records) -> ChannelStats:
    """Return records as values."""
    own = _waits(records.by_rank[rank])
    peers: tuple[PeerStats, ...] = ()
    if records.joint is not None:
        waits = _waits(records.joint)
    else:
        others = [peer for peer in range(world_size) if peer != rank]
        peers = tuple(PeerStats(peer, _waits(records.by_rank[peer])) for peer in others)
        waits = _sum([one.waits for one in peers])
    return ChannelStats(channel, rank, world_size, own.count, own.total_ns, waits, peers)


def _waits(record: np.ndarray) -> WaitStats:
    words = [int(word) for word in record]
    histogram = tuple(words[_HISTOGRAM:])
    return WaitStats(sum(histogram), words[_TOTAL], words[_LONGEST], histogram)


def _sum(waits: list[WaitStats]) -> WaitStats:
    """Return several waits as one; none at all as zeros."""
    buckets = zip(*(one.histogram for one in waits), strict=True)
    return WaitStats(
        count=sum(one.count for one in waits),
        total_ns=sum(one.total_ns for one in waits),
        longest_ns=max((one.longest_ns for one in waits), default=0),
        histogram=tuple(map(sum, buckets)) or (0,) * CountLayout.BUCKETS,
    )

"""Where ranks are, and who carries what: every shard arrives, whatever the layout."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pcie_comm.span import Span

spans = st.lists(st.sampled_from("abcde"), min_size=1, max_size=16).map(Span.of)


def carry(span: Span) -> dict[int, dict[tuple[int, int, int], int]]:
    """Play a gather with rank numbers as shards; return what each rank finds where."""
    brought = {}  # (rank, place among its rails) -> per host, the shard that came
    for rail in range(span.rails):
        keepers = [span.keeper(host, rail) for host in range(span.count)]
        shards = [rank if span.local(rank) == rail else None for rank in keepers]
        for rank in keepers:
            brought[rank, span.served(rank).index(rail)] = shards
    held = {}
    for rank, host in enumerate(span.hosts):
        held[rank] = {
            (local, place, far): shard
            for local, member in enumerate(span.members[host])
            for place in range(len(span.served(member)))
            for far, shard in enumerate(brought[member, place])
        }
    return held


@given(spans)
def test_every_rank_finds_every_shard(span):
    for rank, held in carry(span).items():
        for source in range(len(span.hosts)):
            assert held[span.found(source, span.hosts[rank])] == source


@given(spans)
def test_rails_are_dealt_out_evenly(span):
    for rank, host in enumerate(span.hosts):
        served = span.served(rank)
        assert span.most_served(host) - 1 <= len(served) <= span.most_served(host)
        assert served == tuple(sorted(served))
        assert served[0] == span.local(rank)
        assert all(span.keeper(host, rail) == rank for rail in served)


@given(spans)
def test_apart_is_one_rail_of_all(span):
    apart = span.apart()
    assert (apart.count, apart.rails) == (len(span.hosts), 1)
    assert all(apart.served(rank) == (0,) for rank in range(apart.count))


def test_hosts_are_numbered_by_their_first_rank():
    span = Span.of(["x", "y", "x", "z", "y"])
    assert span.hosts == (0, 1, 0, 2, 1)
    assert span.members == ((0, 2), (1, 4), (3,))
    assert (span.count, span.rails) == (3, 2)

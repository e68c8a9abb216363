"""How the ranks of a group lie on hosts, and which of them carries what from host to host. Pure.

A gather over several hosts takes two steps. Ranks with the same number on their hosts exchange
their shards: they form a *rail*. Then the ranks of each host share what their rails brought. There
are as many rails as the largest host has ranks; on a smaller host a rank serves several of them,
dealt out in turn, and adds a filler where it has no shard of its own. docs/hosts.md says why so.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Span:
    """Where each rank is.

    Attributes:
        hosts: Per rank, the number of its host. Hosts count from 0 in the order of their first
            rank.
    """

    hosts: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> Span:
        """Return the span of ranks that name their hosts so."""
        numbers: dict[Hashable, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    def apart(self) -> Span:
        """Return the span in which every rank counts as a host of its own."""
        return Span(tuple(range(len(self.hosts))))

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Per host, its ranks in ascending order. A rank's place in it is its local rank."""
        return tuple(
            tuple(rank for rank, where in enumerate(self.hosts) if where == host)
            for host in range(self.count)
        )

    @property
    def count(self) -> int:
        """Number of hosts."""
        return max(self.hosts) + 1

    @property
    def rails(self) -> int:
        """Number of rails: ranks of the largest host."""
        return max(map(len, self.members))

    def local(self, rank: int) -> int:
        """Return a rank's local rank."""
        return self.members[self.hosts[rank]].index(rank)

    def keeper(self, host: int, rail: int) -> int:
        """Return the rank that serves a rail on a host."""
        return self.members[host][rail % len(self.members[host])]

    def served(self, rank: int) -> tuple[int, ...]:
        """Return the rails that a rank serves, in ascending order; its own shard is in the first.

        Everybody goes through rails in this order, so no two ranks wait for each other.
        """
        return tuple(range(self.local(rank), self.rails, len(self.members[self.hosts[rank]])))

    def most_served(self, host: int) -> int:
        """Return how many rails a rank of a host serves at most: what each of them shares."""
        return -(-self.rails // len(self.members[host]))

    def found(self, rank: int, host: int) -> tuple[int, int, int]:
        """Return where a host's ranks find a rank's shard once they have shared their rails.

        Returns:
            Local rank of who shared it, which of its rails it came by, and which host's part.
        """
        rail, here = self.local(rank), len(self.members[host])
        return rail % here, rail // here, self.hosts[rank]

"""Which order of GPUs puts island mates side by side, and which GPUs are nearest to each other."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from .labels import ORDER, components, distance, groups_within, labels
from .model import Host
from .traffic import traffic_islands

COST = {-1: 0, 0: 1, 1: 2, 2: 4, 3: 8, 4: 16, 5: 16}
"""Of a pair, by `distance`: every step costs as much as two pairs one step nearer."""

MOST_CHOICES = 20_000
VETO_COST = 1 << 20

Pairs = Collection[tuple[str, str]]


def best_order(host: Host) -> list[str]:
    """Return all GPUs, mates at every level side by side, otherwise in the order given.

    Mates by measured traffic come together first, where that is known; then GPUs of one NUMA node,
    even if their labels do not say so.
    """
    names = [gpu.name for gpu in host.gpus or ()]
    levels = [traffic_islands(host) or [tuple(names)], _wide_groups(host, names)]
    levels += [groups_within(host, label) for label in reversed(ORDER[:-2])]
    place = {name: at for at, name in enumerate(names)}
    first = [
        {name: place[group[0]] for group in groups if group for name in group} for groups in levels
    ]
    return sorted(names, key=lambda name: (*(level[name] for level in first), place[name]))


def _wide_groups(host: Host, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return GPUs in groups that a label within a NUMA node, or the same NUMA node, connects."""
    numa = {gpu.name: gpu.numa_node for gpu in host.gpus or ()}
    every = labels(host)
    linked = [
        pair
        for pair in every
        if distance(every[pair].best) <= ORDER.index("NODE")
        or (numa[pair[0]] is not None and numa[pair[0]] == numa[pair[1]])
    ]
    return components(names, linked)


def crossings(order: Sequence[str], groups: Sequence[Sequence[str]]) -> int:
    """Return how many neighbours in a ring are in different groups."""
    group = {name: at for at, members in enumerate(groups) for name in members}
    if len(order) < 2:
        return 0
    return sum(
        group[one] != group[other] for one, other in zip(order, [*order[1:], order[0]], strict=True)
    )


def best_subset(host: Host, count: int, vetoed: Pairs = ()) -> list[str]:
    """Return the `count` GPUs that are nearest to each other, in the best order.

    Vetoed pairs are avoided where possible. Of equals, those that come first win. With more than
    20,000 choices the GPUs are taken one by one, which need not find the very best.
    """
    names = best_order(host)
    every = labels(host)

    def cost(one: str, other: str) -> int:
        veto = (one, other) in vetoed or (other, one) in vetoed
        return COST[distance(every[one, other].best)] + (VETO_COST if veto else 0)

    costs = {pair: cost(*pair) for pair in itertools.combinations(names, 2)}
    choices = itertools.combinations(names, count)
    if _count(len(names), count) <= MOST_CHOICES:
        best = min(choices, key=lambda some: sum(costs[p] for p in itertools.combinations(some, 2)))
        return list(best)
    grown = [_grow(names, start, count, costs) for start in names]
    return min(grown, key=lambda some: sum(costs[p] for p in itertools.combinations(some, 2)))


def _count(total: int, count: int) -> int:
    choices = 1
    for at in range(count):
        choices = choices * (total - at) // (at + 1)
    return choices


def _grow(
    names: Sequence[str], start: str, count: int, costs: dict[tuple[str, str], int]
) -> list[str]:
    """Return `count` GPUs, each the one that is nearest to those taken before."""
    taken = [start]

    def price(name: str) -> int:
        return sum(costs.get((name, other), 0) + costs.get((other, name), 0) for other in taken)

    while len(taken) < count:
        taken.append(min((name for name in names if name not in taken), key=price))
    return [name for name in names if name in taken]

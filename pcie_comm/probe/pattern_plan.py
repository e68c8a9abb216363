"""Which transfers at once are worth a look on a host. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..topology.links import uplink
from ..topology.model import Host
from ..topology.ordering import best_order
from ..topology.probed import HOST, ONE_ROOT, TWO_ROOTS, TWO_SWITCHES, UPLINK

ONE_GPU = "there is one GPU"

Flows = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Plan:
    """A pattern to measure.

    Attributes:
        name: Of the pattern; see probed.Pattern, likewise place.
        flows: Source and target of each transfer; None if it is left out.
        reason: Why it is.
    """

    name: str
    place: str = ""
    flows: Flows | None = None
    reason: str = ""


NAMES = (UPLINK, TWO_ROOTS, ONE_ROOT, TWO_SWITCHES)


def plans(host: Host, names: Sequence[str]) -> tuple[Plan, ...]:
    """Return the patterns for some GPUs of a host, in the order of ranks; some are left out."""
    return (*_of_switches(host, names), *_of_all(host, names))


def _of_all(host: Host, names: Sequence[str]) -> Iterator[Plan]:
    first, others = names[0], names[1:]
    advised = [name for name in best_order(host) if name in names]
    found: dict[str, Flows] = {
        "one to all": tuple((first, other) for other in others),
        "all to one": tuple((other, first) for other in others),
        "ring in rank order": _ring(names),
        "ring in advised order": _ring(advised),
        "all to all": tuple((a, b) for a in names for b in names if a != b),
    }
    for name, flows in found.items():
        if len(names) < 2:
            yield Plan(name, reason=ONE_GPU)
        elif name == "ring in advised order" and advised == list(names):
            yield Plan(name, reason="the advised order is the rank order")
        else:
            yield Plan(name, flows=flows)


def _ring(names: Sequence[str]) -> Flows:
    return tuple(zip(names, [*names[1:], names[0]], strict=True))


def _of_switches(host: Host, names: Sequence[str]) -> Iterator[Plan]:
    if len(names) < 2 or host.nodes is None:
        reason = ONE_GPU if len(names) < 2 else host.why("nodes")
        yield from (Plan(name, reason=reason) for name in NAMES)
        return
    shared = [group for group in _uplinks(host, names).items() if len(group[1]) > 1]
    if not shared:
        yield from (Plan(name, reason="no two GPUs share an uplink") for name in NAMES)
        return
    for place, members in shared:
        outside = [name for name in names if _root(host, name) != _root(host, members[0])]
        targets = [outside[at % len(outside)] if outside else HOST for at in range(len(members))]
        yield Plan(UPLINK, place, tuple(zip(members, targets, strict=True)))
        yield from _to_roots(host, (place, members), outside)


def _to_roots(
    host: Host, group: tuple[str, Sequence[str]], outside: Sequence[str]
) -> Iterator[Plan]:
    """Yield what two GPUs of a switch do to GPUs below other roots, and the controls."""
    place, (one, two, *_) = group
    roots: dict[str, list[str]] = {}
    for name in outside:
        roots.setdefault(_root(host, name), []).append(name)
    if len(roots) < 2:
        reason = "no GPUs below two other roots"
        yield from (Plan(name, place, reason=reason) for name in NAMES[1:])
        return
    near, far, *_ = roots.values()
    yield Plan(TWO_ROOTS, place, ((one, near[0]), (two, far[0])))
    yield Plan(ONE_ROOT, place, ((one, near[0]), (two, near[-1])))
    yield Plan(TWO_SWITCHES, place, ((one, near[0]), (near[-1], far[0])))


def _uplinks(host: Host, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the GPUs below each uplink: the topmost port of a switch."""
    found: dict[str, list[str]] = {}
    for gpu in host.gpus or ():
        top = uplink(host, gpu.address or "")
        if gpu.name in names and top is not None and top.address != gpu.address:
            found.setdefault(top.address, []).append(gpu.name)
    return found


def _root(host: Host, name: str) -> str:
    address = next((gpu.address for gpu in host.gpus or () if gpu.name == name), None)
    path = host.path(address)
    return path[-1].address if path else name

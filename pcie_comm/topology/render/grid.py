"""Tables of what was verified and measured: what text and page have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..model import Host, Link, Measurement
from ..probed import MEMORIES, Check, Exchange, Ladder, LinkLoad, Pattern

UNKNOWN = "?"


@dataclass(frozen=True)
class Table:
    """Cells with names.

    Attributes:
        title: Of the table.
        columns: Their names.
        rows: Name and cells of each.
        notes: What is to be said below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...] = ()


def tables(host: Host) -> Iterator[Table]:
    """Yield a table for each kind of thing that was verified or measured; matrices apart."""
    if host.checks:
        yield checks(host.checks)
    for memory in MEMORIES:
        found = [one for one in host.exchanges if one.memory == memory]
        if found:
            yield exchanges(found, memory)
    if host.ladders:
        yield ladders(host.ladders)
    if host.patterns:
        yield patterns(host.patterns)
    if host.loads:
        yield links_under_load(host.loads)


def checks(found: Sequence[Check]) -> Table:
    """Return the verdicts, a row for each pair."""
    names = tuple(dict.fromkeys(check.name for check in found))
    by_place = {(check.source, check.target, check.name): check for check in found}
    pairs = dict.fromkeys((check.source, check.target) for check in found)
    rows = tuple(
        (
            f"{source} -> {target}",
            tuple(
                check.verdict if (check := by_place.get((source, target, name))) else ""
                for name in names
            ),
        )
        for source, target in pairs
    )
    return Table("verified", names, rows, tuple(_reasons(found)))


def _reasons(found: Sequence[Check]) -> Iterator[str]:
    """Yield each detail once, with what it is about."""
    about: dict[str, list[str]] = {}
    for check in found:
        if check.detail:
            place = f"{check.source} -> {check.target} {check.name}"
            about.setdefault(f"{check.verdict}: {check.detail}", []).append(place)
    for detail, places in about.items():
        more = f" and {len(places) - 2} more" if len(places) > 2 else ""
        yield f"{', '.join(places[:2])}{more}: {detail}"


def exchanges(found: Sequence[Exchange], memory: str) -> Table:
    """Return the times of the protocols with slabs in one memory, a row for each pair."""
    sizes = sorted({point.nbytes for one in found for point in one.points or ()})
    rows, notes = [], dict[str, None]()
    for one in found:
        name = f"{one.source} - {one.target}"
        if one.points is None:
            notes[f"{name}: {one.why('points')}"] = None
            continue
        times = {
            point.nbytes: " / ".join(map(number, (point.pull_us, point.push_us, point.tagged_us)))
            for point in one.points
        }
        rows.append((name, tuple(times.get(size, UNKNOWN) for size in sizes)))
    title = f"exchange of two ranks, slabs in {memory}: pull / push / tagged (us)"
    return Table(title, tuple(f"{size} B" for size in sizes), tuple(rows), tuple(notes))


def ladders(found: Sequence[Ladder]) -> Table:
    """Return the times by size, a row for each way."""
    sizes = sorted({point.nbytes for one in found for point in one.points or ()})
    rows = []
    for one in found:
        times = {point.nbytes: point.us for point in one.points or ()}
        name = f"{one.source} -> {one.target} {one.engine} {one.access}"
        rows.append((name, tuple(number(times.get(size)) for size in sizes)))
    notes = {
        f"{one.source} -> {one.target}: {one.why('points')}" for one in found if not one.points
    }
    columns = tuple(f"{size} B" for size in sizes)
    return Table("one transfer by size (us)", columns, tuple(rows), tuple(sorted(notes)))


def patterns(found: Sequence[Pattern]) -> Table:
    """Return the patterns that were measured; the others are notes."""
    rows, notes = [], dict[str, None]()
    for one in found:
        name = " ".join(filter(None, (one.name, one.place)))
        if one.flows is None:
            notes[f"{name}: {one.why('flows')}"] = None
            continue
        alone = sum(flow.alone_gbps or 0.0 for flow in one.flows)
        least = min((flow.gbps or 0.0 for flow in one.flows), default=0.0)
        cells = (one.access, str(len(one.flows)), number(one.gbps), number(alone), number(least))
        rows.append((name, cells))
    columns = ("access", "flows", "together", "sum of each alone", "slowest flow")
    return Table("several transfers at once (GB/s)", columns, tuple(rows), tuple(notes))


def links_under_load(found: Sequence[LinkLoad]) -> Table:
    """Return the links under load, a row for each GPU."""
    rows = []
    for one in found:
        errors = "; ".join(f"{name} +{count}" for name, count in (one.errors or {}).items())
        seen = "none" if one.errors is not None else UNKNOWN
        replays = UNKNOWN if one.replays is None else str(one.replays)
        rows.append((one.gpu, (link(one.driver), link(one.sysfs), replays, errors or seen)))
    notes = dict.fromkeys(
        f"{name}: {one.why(name)}"
        for one in found
        for name in ("driver", "sysfs", "replays", "errors")
        if one.why(name)
    )
    return Table(
        "links under load", ("driver", "sysfs", "replays", "errors"), tuple(rows), tuple(notes)
    )


def gaps(matrix: Measurement) -> tuple[str, ...]:
    """Return why cells of a matrix are empty, each reason once."""
    about: dict[str, list[str]] = {}
    for gap in matrix.gaps:
        about.setdefault(gap.reason, []).append(f"{gap.row} -> {gap.column}")
    return tuple(
        f"{', '.join(places[:3])}{' ...' if len(places) > 3 else ''}: {reason}"
        for reason, places in about.items()
    )


def link(one: Link | None) -> str:
    """Return a link in a few words."""
    if one is None or one.speed_gts is None:
        return UNKNOWN
    return f"{one.speed_gts:g} GT/s x{UNKNOWN if one.width is None else one.width}"


def number(value: float | None) -> str:
    """Return a figure as it is shown."""
    return UNKNOWN if value is None else f"{value:.4g}"

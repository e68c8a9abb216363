"""The order that docs/protocol.md needs, as rules for a graph of instructions (machine_code.py).

Rules return their findings as text; none means that the code is right.
"""

from __future__ import annotations

from machine_code import Kind, Program, Role

WATCHED_WORDS = 2
"""What a wait looks at besides the flag or the units: abort word and poison word."""


def order_findings(program: Program, kind: Kind) -> list[str]:
    """Check all rules of order that a kernel of this kind is under."""
    findings = _overlap_findings(program) if kind.overlaps else []
    if kind.communicates:
        findings += _status_findings(program)
        findings += _tagged_findings(program) if kind.tagged else _staged_findings(program)
        waits = program.places(Role.ACQUIRE, Role.UNIT_LOAD)
        sends = program.places(Role.RELEASE, Role.ANNOUNCE, Role.UNIT_STORE)
        late = program.reach(program.after(waits)) & sends
        findings += program.named({"sent only when waiting has begun": late})
        findings += _begin_findings(program)
        findings += _count_findings(program) if kind.counts else []
    return findings


def _missing(program: Program, *roles: Role) -> list[str]:
    return [f"no {role.value}" for role in roles if not program.places(role)]


def _overlap_findings(program: Program) -> list[str]:
    """The first thing a kernel does is to wait for its predecessor; then it lets others start."""
    waits = program.places(Role.PREDECESSOR)
    early = program.reach([0], waits)
    touching = {place for place, one in enumerate(program.instructions) if one.touches}
    return _missing(program, Role.PREDECESSOR, Role.SUCCESSOR) + program.named(
        {
            "memory before the wait for the predecessor": early & touching,
            "successor before the wait for the predecessor": early & program.places(Role.SUCCESSOR),
        }
    )


def _unclaimed(program: Program) -> set[int]:
    """Return what runs without a claim of the poison word: all but the status record."""
    return program.reach([0], program.places(Role.CLAIM))


def _status_findings(program: Program) -> list[str]:
    """Who claims the poison word writes the status record and releases its code."""
    claims, codes = program.places(Role.CLAIM), program.places(Role.STATUS)
    findings = _missing(program, Role.CLAIM, Role.STATUS)
    if len(claims) != len(codes):
        findings.append(f"{len(claims)} claims of the poison word, {len(codes)} status codes")
    return findings + program.named({"status code unclaimed": codes & _unclaimed(program)})


def _begin_findings(program: Program) -> list[str]:
    """Once, before it waits, a launch notes that it has begun, and looks whether another has."""
    noted = program.places(Role.BEGIN)
    findings = _missing(program, Role.BEGIN)
    if len(noted) > 1:
        findings.append(f"{len(noted)} notes that the launch has begun")
    late = program.reach(program.after(program.places(Role.ACQUIRE))) & noted
    return findings + program.named({"begun only when waiting is over": late})


COUNTERS = 3
"""What a lane counts: a sum, the largest, and a bucket of the histogram."""


def _count_findings(program: Program) -> list[str]:
    """Nothing is counted before the barrier that lets the block go on."""
    counts, barriers = program.places(Role.COUNT), program.places(Role.BARRIER)
    waits = program.places(Role.ACQUIRE)
    findings = [] if len(counts) == COUNTERS else [f"{len(counts)} reductions of counters"]
    early = program.reach(program.after(waits), barriers) & counts
    unwaited = counts - program.reach(program.after(waits))
    return findings + program.named(
        {"counted before the barrier behind the wait": early, "counted without a wait": unwaited}
    )


def _watched(program: Program) -> tuple[set[int], list[str]]:
    """Return the relaxed loads that an acquire may follow: those inside the wait for a flag.

    And the look of Lane.await_turn, before all else, if there is one.
    """
    acquires = program.places(Role.ACQUIRE)
    before = program.leading_to(program.places(Role.RELAXED), acquires)
    watched = before & program.reach(program.after(acquires))
    looks = before - watched
    findings = []
    if len(watched) != WATCHED_WORDS:
        findings.append(f"a wait watches abort and poison word, here {len(watched)} words")
    if len(looks) > 1:
        findings.append(f"{len(looks)} looks before all waits")
    return before, findings


def _staged_findings(program: Program) -> list[str]:
    """Push and pull, steps 2 to 7: stage, barrier, release, acquire, barrier, collect."""
    watched, findings = _watched(program)
    findings += _missing(program, Role.RELEASE, Role.ACQUIRE)
    collected = program.places(Role.RELAXED) - watched
    if not collected:
        findings.append("nothing is collected by relaxed loads at system scope")
    barriers = program.places(Role.BARRIER)
    first = program.reach([0], barriers)
    second = program.reach(program.after(first & barriers), barriers)
    releases, acquires = program.places(Role.RELEASE), program.places(Role.ACQUIRE)
    staged = program.reach(program.after(program.places(Role.STAGE)), barriers)
    acquired = program.reach(program.after(acquires), barriers)
    return findings + program.named(
        {
            "release before the first barrier": first & releases,
            "acquire before the first barrier": first & acquires,
            "no barrier between staging and release": staged & releases,
            "no barrier between acquire and collecting": acquired & collected,
            "collecting before the second barrier": (first | second) & collected,
        }
    )


def _tagged_findings(program: Program) -> list[str]:
    """Tagged push: the flag publishes nothing, units carry their tags, outputs wait for the flags.

    An output is written behind a barrier that no acquire follows: then every thread has passed it
    that waited for a flag. The own shard does not wait: it is copied before the first unit is read.
    """
    watched, findings = _watched(program)
    findings += _missing(program, Role.ANNOUNCE, Role.ACQUIRE, Role.UNIT_STORE, Role.UNIT_LOAD)
    for role, what in ((Role.ANNOUNCE, "announcements of a flag"), (Role.RELAY, "relays")):
        if len(program.places(role)) > 1:
            findings.append(f"{len(program.places(role))} {what}")
    units, acquires = program.places(Role.UNIT_LOAD), program.places(Role.ACQUIRE)
    others = program.places(Role.RELAXED) - watched
    if not others or len(others) % WATCHED_WORDS:
        findings.append(f"a wait for units watches abort and poison word, here {len(others)} words")
    barriers = program.places(Role.BARRIER)
    last = barriers - program.leading_to(barriers, acquires)
    if not last:
        findings.append("no barrier behind the wait for the flags")
    early = program.until(last)
    outputs = early.reach(early.after(units)) & program.places(Role.STORE)
    unclaimed = _unclaimed(program)
    return findings + program.named(
        {
            "a flag is released that publishes nothing": program.places(Role.RELEASE),
            "relaxed load that is no part of a wait": others - program.leading_to(others, units),
            "output before the barrier behind the wait": outputs & unclaimed,
            "weak store to a peer": program.places(Role.STAGE) & unclaimed,
        }
    )

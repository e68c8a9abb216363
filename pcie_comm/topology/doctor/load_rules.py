"""Rules about what was verified, and about links and uplinks under load."""

from __future__ import annotations

from ..links import Ceiling, ceiling
from ..model import Host, Link
from ..probed import FAULTS, HOST, NO_ACCESS, ONE_ROOT, TWO_ROOTS, TWO_SWITCHES, UPLINK, Pattern
from ..traffic import bad_checks
from .figure_rules import MEASURED
from .finding import ERROR, WARNING, Case, Finding, Outcome
from .link_rules import PCIE
from .pair_rules import can_access

VERIFIED = "pcie-comm topo --verify"
NOT_VERIFIED = f"nothing was verified; run `{VERIFIED}`"
NOT_LOADED = f"no link was seen under load; run `{MEASURED}`"
SHARED = 0.7
"""Sources of one uplink that get less than this of what they get alone are held back by it."""

TOGETHER = 0.9
"""Two sources to two roots must bring at least this of what one brings alone."""

AVOID = "do not use this pair; `pcie-comm advise` vetoes it"


def data_fault(case: Case) -> Outcome:
    """Bytes that were dropped, mirrored or spoilt, or a peer that never came."""
    if not case.host.checks:
        return NOT_VERIFIED
    found = []
    for (source, target), checks in bad_checks(case.host).items():
        faults = [check for check in checks if check.verdict in FAULTS]
        if not faults:
            continue
        found.append(
            Finding(
                id="data-fault",
                severity=ERROR,
                subject=f"{source}-{target}",
                evidence=f"{faults[0].name}: {faults[0].detail}",
                expected="every check OK",
                seen=", ".join(f"{check.name} {check.verdict}" for check in faults),
                remedy="use no group on this GPU" if target == HOST else AVOID,
                source=VERIFIED,
            )
        )
    return found


def false_access(case: Case) -> Outcome:
    """A pair that the driver allows and that fails when it is used."""
    host = case.host
    if not host.checks:
        return NOT_VERIFIED
    stated = {(pair.source, pair.target): pair for pair in host.pairs or ()}
    found = []
    for ends, checks in bad_checks(host).items():
        refused = [check for check in checks if check.verdict == NO_ACCESS]
        pair = stated.get(ends)
        if not refused or (pair is not None and not can_access(pair)):
            continue
        found.append(
            Finding(
                id="false-access",
                severity=ERROR,
                subject="-".join(ends),
                evidence=f"{refused[0].name}: {refused[0].detail}",
                expected="access in use, as the driver says",
                seen=", ".join(check.name for check in refused),
                remedy=AVOID
                if HOST not in ends
                else "see whether containers share IPC and /dev/shm",
                source=VERIFIED,
            )
        )
    return found


def slow_link(case: Case) -> Outcome:
    """A link that stays below its ceiling while it carries traffic."""
    host = case.host
    if not host.loads:
        return NOT_LOADED
    known = [load for load in host.loads if load.driver is not None or load.sysfs is not None]
    if not known:
        return host.loads[0].why("driver")
    found = []
    for load in known:
        seen = load.driver or load.sysfs
        most = _ceiling(host, load.gpu, seen)
        if seen is None or not _is_below(seen, most):
            continue
        found.append(
            Finding(
                id="slow-link-under-load",
                severity=WARNING,
                subject=load.gpu,
                evidence=f"speed_gts={seen.speed_gts}, width={seen.width} during copies both ways",
                expected=str(most),
                seen=f"{seen.speed_gts:g} GT/s x{seen.width}",
                remedy="reseat the card, riser or cable; see power limits and ASPM in the firmware",
                source=f"{MEASURED}; {PCIE}, Link Status Register",
            )
        )
    return found


def _ceiling(host: Host, name: str, seen: Link | None) -> Ceiling:
    address = next((gpu.address for gpu in host.gpus or () if gpu.name == name), None)
    node = host.node(address)
    most = Ceiling(None, None) if node is None else ceiling(host, node)
    if most.speed_gts is None and seen is not None:
        return Ceiling(seen.max_speed_gts, seen.max_width)
    return most


def _is_below(seen: Link, most: Ceiling) -> bool:
    slow = seen.speed_gts and most.speed_gts and seen.speed_gts < most.speed_gts
    narrow = seen.width and most.width and seen.width < most.width
    return bool(seen.speed_gts and seen.width and (slow or narrow))


def load_errors(case: Case) -> Outcome:
    """Errors that links counted while this tool loaded them."""
    loads = case.host.loads
    if not loads:
        return NOT_LOADED
    if all(load.replays is None and load.errors is None for load in loads):
        return loads[0].why("errors")
    found = []
    for load in loads:
        counts = dict(load.errors or {})
        if load.replays:
            counts["replays"] = load.replays
        if not counts:
            continue
        severe = any(word in name for name in counts for word in (" nonfatal ", " fatal "))
        found.append(
            Finding(
                id="errors-under-load",
                severity=ERROR if severe else WARNING,
                subject=load.gpu,
                evidence=f"counters grew: {counts}",
                expected="no errors while the links carry traffic",
                seen=", ".join(f"{name} +{count}" for name, count in counts.items()),
                remedy="reseat the card, riser or cable; a lower link speed is steadier",
                source=f"{MEASURED}; NVML and AER counters before and after",
            )
        )
    return found


def _measured(host: Host, name: str) -> list[Pattern]:
    return [one for one in host.patterns if one.name == name and one.flows]


def _why_not(host: Host, name: str) -> str:
    """Return why no pattern of a name was measured."""
    reasons = (one.why("flows") for one in host.patterns if one.name == name)
    return next(reasons, f"no patterns were measured; run `{MEASURED}`")


def oversubscribed(case: Case) -> Outcome:
    """Sources behind one uplink that hold each other back."""
    patterns = _measured(case.host, UPLINK)
    if not patterns:
        return _why_not(case.host, UPLINK)
    found = []
    for one in patterns:
        alone = sum(flow.alone_gbps or 0.0 for flow in one.flows or ())
        if one.gbps is None or not alone or one.gbps >= SHARED * alone:
            continue
        found.append(
            Finding(
                id="oversubscribed-uplink",
                severity=WARNING,
                subject=one.place,
                evidence=f"{len(one.flows or ())} sources {one.access} {one.gbps:g} GB/s together",
                expected=f"{alone:g} GB/s, the sum of what each does alone",
                seen=f"{one.gbps / alone:.2f} of it",
                remedy="put GPUs of one switch side by side in the rank order (`pcie-comm advise`)",
                source=MEASURED,
            )
        )
    return found


def uplink_collapse(case: Case) -> Outcome:
    """Two sources of one switch that together bring less than one of them alone."""
    host = case.host
    patterns = _measured(host, TWO_ROOTS)
    if not patterns:
        return _why_not(host, TWO_ROOTS)
    found = []
    for one in patterns:
        single = max((flow.alone_gbps or 0.0 for flow in one.flows or ()), default=0.0)
        if one.gbps is None or one.gbps >= TOGETHER * single:
            continue
        controls = "; ".join(
            f"{other.name}: {other.gbps:g}"
            for name in (ONE_ROOT, TWO_SWITCHES)
            for other in _measured(host, name)
            if (other.place, other.access) == (one.place, one.access)
        )
        found.append(
            Finding(
                id="uplink-collapse",
                severity=WARNING,
                subject=one.place,
                evidence=f"{one.name}, {one.access}: {one.gbps:g} GB/s together; {controls}",
                expected=f"at least the {single:g} GB/s of one alone",
                seen=f"{one.gbps / single:.2f} of it",
                remedy="order ranks so that few leave the switch at once (`pcie-comm advise`)",
                source=MEASURED,
            )
        )
    return found

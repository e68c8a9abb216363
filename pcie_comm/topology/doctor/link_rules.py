"""Rules about PCIe links, switches and ports."""

from __future__ import annotations

from collections.abc import Iterator

from ..links import ceiling, port_of, uplink
from ..model import DOWNSTREAM, ROOT_PORT, Gpu, Host, PciNode
from .finding import ERROR, INFO, WARNING, Case, Finding, Outcome
from .host_rules import NCCL_TROUBLES

REDIRECTS = ("ReqRedir", "CmpltRedir")
HARMLESS = ("UnsupReq", "AdvNonFatalErr")
"""Status bits that probing for devices sets on healthy links."""

PCIE = "PCI Express Base Specification"
SWITCH_NOTE = "docs/topology.md, what labels do not say"


def _placed(host: Host) -> Iterator[tuple[Gpu, PciNode]]:
    for gpu in host.gpus or ():
        if (node := host.node(gpu.address)) is not None:
            yield gpu, node


def _missing(host: Host) -> str:
    """Return why there are no devices to judge, nothing if there are."""
    if host.nodes is None:
        return host.why("nodes")
    if host.gpus is None:
        return host.why("gpus")
    if host.gpus and all(node.link is None for _, node in _placed(host)):
        return next((node.why("link") for _, node in _placed(host)), "no GPU is in the tree")
    return ""


def narrow_link(case: Case) -> Outcome:
    """A link with fewer lanes than both ends have is badly seated, or its cable is bad."""
    host = case.host
    if reason := _missing(host):
        return reason
    found = []
    for gpu, node in _placed(host):
        most, link = ceiling(host, node), node.link
        if link is None or link.width is None or most.width is None or link.width >= most.width:
            continue
        found.append(
            Finding(
                id="narrow-link",
                severity=WARNING,
                subject=f"{gpu.name} {node.address}",
                evidence=f"width={link.width}, max_width={link.max_width}, ceiling={most}",
                expected=f"x{most.width}",
                seen=f"x{link.width}",
                remedy="reseat the card, riser or cable; check bifurcation in the firmware",
                source=f"{PCIE}, Link Status Register",
            )
        )
    return found


def low_ceiling(case: Case) -> Outcome:
    """A port that can do less than its GPU holds it back for ever."""
    host = case.host
    if reason := _missing(host):
        return reason
    found = []
    for gpu, node in _placed(host):
        port = port_of(host, node)
        most, link = ceiling(host, node), node.link
        if port is None or link is None or most.speed_gts is None or most.width is None:
            continue
        if (most.speed_gts, most.width) == (link.max_speed_gts, link.max_width):
            continue
        found.append(
            Finding(
                id="low-ceiling",
                severity=WARNING,
                subject=f"{gpu.name} {node.address}",
                evidence=f"port={port.address}, ceiling={most}",
                expected=f"{link.max_speed_gts} GT/s x{link.max_width}, as the GPU can",
                seen=str(most),
                remedy="move the GPU to a better slot, or count with this ceiling",
                source=f"{PCIE}, Link Capabilities Register",
            )
        )
    return found


def idle_link(case: Case) -> Outcome:
    """GPUs lower their link while idle; only a low speed under load is a fault."""
    host = case.host
    if reason := _missing(host):
        return reason
    idle = []
    for gpu, node in _placed(host):
        most, link = ceiling(host, node), node.link
        if link and link.speed_gts and most.speed_gts and link.speed_gts < most.speed_gts:
            idle.append(f"{gpu.name} {link.speed_gts:g} of {most.speed_gts:g} GT/s")
    if not idle:
        return []
    return [
        Finding(
            id="idle-link",
            severity=INFO,
            subject="host",
            evidence="; ".join(idle),
            expected="any speed while idle, the ceiling under load",
            seen=f"{len(idle)} links below their ceiling",
            remedy="nothing, if the GPUs were idle; else look at the speed under load",
            source="NVML, nvmlDeviceGetCurrPcieLinkGeneration: lowered when idle",
        )
    ]


def acs_redirect(case: Case) -> Outcome:
    """Ports that redirect send traffic between GPUs of one switch up to the root complex."""
    host = case.host
    loose = [acs for acs in host.loose_acs if set(acs.enabled) & set(REDIRECTS)]
    found = [_redirect("a port that the source does not name", acs.enabled) for acs in loose]
    if host.nodes is None or host.gpus is None:
        return found if host.loose_acs else host.why("nodes") or host.why("gpus")
    ports = {
        node.address: node
        for gpu in host.gpus
        for node in host.path(gpu.address)
        if node.role in (DOWNSTREAM, ROOT_PORT)
    }
    known = [node for node in ports.values() if node.acs is not None]
    if ports and not known and not host.loose_acs:
        return next(node.why("acs") for node in ports.values())
    for node in known:
        if node.acs is not None and set(node.acs.enabled) & set(REDIRECTS):
            found.append(_redirect(node.address, node.acs.enabled))
    return found


def _redirect(subject: str, enabled: tuple[str, ...]) -> Finding:
    return Finding(
        id="acs-redirect",
        severity=WARNING,
        subject=subject,
        evidence=f"ACSCtl has {', '.join(enabled)}",
        expected=f"neither {' nor '.join(REDIRECTS)} on ports above GPUs",
        seen=", ".join(name for name in enabled if name in REDIRECTS),
        remedy="have an administrator switch ACS off in the firmware, unless VMs need it",
        source=NCCL_TROUBLES,
    )


def shared_uplink(case: Case) -> Outcome:
    """GPUs behind one uplink share it for all traffic that leaves the switch."""
    host = case.host
    if reason := _missing(host):
        return reason
    below: dict[str, list[tuple[Gpu, PciNode]]] = {}
    for gpu, node in _placed(host):
        top = uplink(host, node.address)
        if top is not None and top.address != node.address:
            below.setdefault(top.address, []).append((gpu, node))
    found = []
    for address, members in below.items():
        top = host.node(address)
        supply = ceiling(host, top).gbps if top is not None else None
        demands = [ceiling(host, node).gbps for _, node in members]
        demand = sum(value for value in demands if value is not None)
        if (
            supply is None
            or None in demands
            or demand <= supply
            or len(members) == len(host.gpus or ())
        ):
            continue
        found.append(_uplink(address, members, demand, supply))
    return found


def _uplink(
    address: str, members: list[tuple[Gpu, PciNode]], demand: float, supply: float
) -> Finding:
    return Finding(
        id="shared-uplink",
        severity=INFO,
        subject=address,
        evidence=f"{', '.join(gpu.name for gpu, _ in members)} below it",
        expected=f"an uplink of {demand:g} GB/s, what its GPUs can send together",
        seen=f"{supply:g} GB/s, {demand / supply:.1f} times oversubscribed",
        remedy="put GPUs of one switch side by side in the rank order (`pcie-comm advise`)",
        source=f"{PCIE}, raw rates by speed and width",
    )


def virtual_switch(case: Case) -> Outcome:
    """Switches cut into virtual parts may join in hardware what labels call far."""
    host = case.host
    if host.nodes is None or host.gpus is None:
        return host.why("nodes") or host.why("gpus")
    ports = {
        node.address
        for gpu in host.gpus
        for node in host.path(gpu.address)
        if node.virtual and node.vendor is not None
    }
    if not ports:
        return []
    return [
        Finding(
            id="virtual-switch",
            severity=INFO,
            subject=", ".join(sorted(ports)[:4]) + (" ..." if len(ports) > 4 else ""),
            evidence="the subsystem names of these ports say Virtual",
            expected="nothing; both kinds of switch work",
            seen=f"{len(ports)} virtual ports above GPUs",
            remedy="measure pairs: two labelled NODE may sit on one chip",
            source=SWITCH_NOTE,
        )
    ]


def link_errors(case: Case) -> Outcome:
    """Errors that links counted or hold in their status."""
    host = case.host
    if host.nodes is None or host.gpus is None:
        return host.why("nodes") or host.why("gpus")
    above = {node.address: node for gpu in host.gpus for node in host.path(gpu.address)}
    known = [node for node in above.values() if node.aer is not None]
    if above and not known:
        return next((n.why("aer") for n in above.values() if "root" not in n.why("aer")), "no AER")
    found = []
    for node in known:
        aer = node.aer
        counts = (
            {}
            if aer is None
            else {"correctable": aer.correctable, "nonfatal": aer.nonfatal, "fatal": aer.fatal}
        )
        seen = {kind: dict(errors) for kind, errors in counts.items() if errors}
        status = () if aer is None else tuple(b for b in aer.status or () if b not in HARMLESS)
        if seen or status:
            severe = bool(seen.get("nonfatal") or seen.get("fatal"))
            found.append(_errors(node.address, seen, status, severe))
    return found


def _errors(
    address: str, seen: dict[str, dict[str, int]], status: tuple[str, ...], severe: bool
) -> Finding:
    return Finding(
        id="link-errors",
        severity=ERROR if severe else WARNING,
        subject=address,
        evidence=f"AER counters {seen or 'none'}, status bits {', '.join(status) or 'none'}",
        expected="no errors since the last restart",
        seen=", ".join([*seen, *status]),
        remedy="see whether they grow under load; reseat the card, riser or cable",
        source=f"{PCIE}, Advanced Error Reporting",
    )

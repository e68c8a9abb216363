"""What identifies a machine, in parts, so that a changed part can be named.

Only what stays the same while a machine idles, works or restarts: no current link speed, no
counter. A part of which nothing is known is None; two fingerprints are compared in the parts that
both know.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .model import Host, PciNode

Fingerprint = Mapping[str, str | None]
"""By part: 16 hexadecimal digits, or None."""

ESSENTIAL = ("gpus", "tree")
"""One of these must be known on both sides, else nothing identifies the machine."""


def fingerprint(host: Host) -> dict[str, str | None]:
    """Return the fingerprint of a host, by part."""
    system = host.system
    facts: dict[str, Any] = {
        "gpus": _gpus(host),
        "tree": _tree(host, lambda n: [n.parent, n.role, n.vendor, n.device]),
        "links": _tree(host, lambda n: n.link and [n.link.max_speed_gts, n.link.max_width]),
        "acs": _tree(host, lambda n: n.acs and list(n.acs.enabled)),
        "iommu": system.iommu,
        "command line": system.cmdline,
        "kernel": system.kernel,
        "driver": system.driver,
        "virtual machine": system.virtual_machine,
        "numa": [[n.index, n.cpus] for n in system.numa] if system.numa else None,
    }
    return {name: _digest(fact) for name, fact in facts.items()}


def _gpus(host: Host) -> Any:
    """Return address and UUID of every GPU; None if one of them is not known of all."""
    if not host.gpus or not all(gpu.address and gpu.uuid for gpu in host.gpus):
        return None
    return sorted([gpu.address, gpu.uuid, gpu.mig] for gpu in host.gpus)


def _tree(host: Host, fact: Any) -> Any:
    """Return a fact of every device between a GPU and its root; None if it is known of none."""
    above: dict[str, PciNode] = {
        node.address: node for gpu in host.gpus or () for node in host.path(gpu.address)
    }
    rows = [[address, fact(node)] for address, node in sorted(above.items())]
    return rows if any(row[1] is not None for row in rows) else None


def _digest(fact: Any) -> str | None:
    if fact is None:
        return None
    text = json.dumps(fact, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed_parts(then: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """Return the parts that both know and that differ; `identity` if no essential is shared."""
    shared = [name for name in then if then[name] is not None and now.get(name) is not None]
    if not set(shared) & set(ESSENTIAL):
        return ("identity",)
    return tuple(name for name in shared if then[name] != now[name])

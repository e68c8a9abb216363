"""What a PCIe link can carry: the lower of what its two ends can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from .model import ROOT_COMPLEX, Host, PciNode

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Ceiling:
    """The most that a link can do; None where one end is not known.

    Attributes:
        speed_gts: In GT/s.
        width: In lanes.
    """

    speed_gts: float | None
    width: int | None

    @property
    def gbps(self) -> float | None:
        """Raw GB/s in one direction, before the overhead of encoding and packets."""
        if self.speed_gts is None or self.width is None:
            return None
        return self.speed_gts * self.width / 8

    def __str__(self) -> str:
        speed = "?" if self.speed_gts is None else f"{self.speed_gts:g}"
        return f"{speed} GT/s x{'?' if self.width is None else self.width}"


def port_of(host: Host, node: PciNode) -> PciNode | None:
    """Return the port that a device's link ends at, None if there is none or it is not known."""
    above = host.node(node.parent)
    return None if above is None or above.role == ROOT_COMPLEX else above


def ceiling(host: Host, node: PciNode) -> Ceiling:
    """Return the lower of the maxima of a device and of its port.

    A source that does not have ports, as NCCL's XML, states the ceiling itself.
    """
    link, port = node.link, port_of(host, node)
    if link is None:
        return Ceiling(None, None)
    if port is None or port.link is None:
        return Ceiling(link.max_speed_gts, link.max_width)
    return Ceiling(
        _lower(link.max_speed_gts, port.link.max_speed_gts),
        _lower(link.max_width, port.link.max_width),
    )


def _lower(one: Number | None, other: Number | None) -> Number | None:
    known = [value for value in (one, other) if value is not None]
    return min(known) if len(known) == 2 else None


def uplink(host: Host, address: str) -> PciNode | None:
    """Return the topmost device between a GPU and its root port or root: a switch, or itself."""
    path = [node for node in host.path(address) if node.role not in (ROOT_COMPLEX, "root port")]
    return path[-1] if path else None

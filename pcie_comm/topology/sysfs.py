"""Reads the PCI tree from a sysfs tree below any root, so that tests can build one.

Needs no GPU and no root. A file that is missing or unreadable makes its fact unknown, with the
reason; it never stops the rest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from .address import bus_of, normalise, root_name, sort_key
from .config_space import ConfigSpace
from .model import (
    DOWNSTREAM,
    ENDPOINT,
    ROOT_COMPLEX,
    ROOT_PORT,
    UPSTREAM,
    Acs,
    Aer,
    Bar,
    Link,
    PciNode,
)

MEMORY_RESOURCE = 0x200
BAR_COUNT = 6
MOST_NBYTES = 1 << 16
_SPEED = re.compile(r"([0-9.]+) GT/s")
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


class Sysfs:
    """A sysfs tree.

    Args:
        root: Folder that has `bus/pci/devices`; `/sys` of the running host.
    """

    def __init__(self, root: Path = Path("/sys")) -> None:
        self.root = root
        self.devices = root / "bus" / "pci" / "devices"

    def text(self, *parts: str | Path) -> str | None:
        """Return a file's text without white space around it, None if it cannot be read."""
        data = self.data(*parts)
        return None if data is None else data.decode(errors="replace").strip()

    def data(self, *parts: str | Path) -> bytes | None:
        """Return the first bytes of a file, None if it cannot be read."""
        try:
            with self.root.joinpath(*parts).open("rb") as file:
                return file.read(MOST_NBYTES)
        except OSError:
            return None

    def nodes(self) -> tuple[PciNode, ...] | None:
        """Return every PCI device and root complex; None if there is no such folder."""
        try:
            names = [name for name in os.listdir(self.devices) if normalise(name)]
        except OSError:
            return None
        parents = {name: self._parent(name) for name in names}
        found = [self._device(name, parents) for name in names]
        found += [_root_complex(name) for name in set(parents.values()) if name.startswith("pci")]
        return tuple(sorted(found, key=lambda node: (sort_key(node.address), node.address)))

    def _parent(self, name: str) -> str:
        """Return the folder that holds a device's: a bridge, or `pci0000:00`.

        A device without a folder of its own, as in trees that were copied without links, hangs on
        the root of its bus.
        """
        above = (self.devices / name).resolve().parent.name
        return above if normalise(above) or _ROOT.fullmatch(above) else root_name(bus_of(name))

    def _device(self, name: str, parents: Mapping[str, str]) -> PciNode:
        folder = self.devices / name
        space = ConfigSpace(self.data(folder / "config") or b"")
        class_code = self._hexadecimal(folder / "class")
        role, why = _role(name, parents, space, class_code)
        numa = self.text(folder / "numa_node")
        reasons = {
            "*": f"sysfs of {name} does not have it",
            "name": "sysfs has numbers, no names",
            "virtual": "sysfs does not tell",
            "numa_node": f"numa_node is {numa}, which means that the firmware does not say",
            "role": why,
            "acs": space.reason or "no extended configuration space is readable",
            "link": "no link: it is inside the root complex, or sysfs does not have it",
        }
        driver = folder / "driver"
        return PciNode(
            address=name,
            parent=parents[name],
            role=role,
            vendor=self._hexadecimal(folder / "vendor"),
            device=self._hexadecimal(folder / "device"),
            class_code=class_code,
            numa_node=int(numa) if numa is not None and numa.isdecimal() else None,
            link=self._link(folder, space),
            acs=_acs(role, space),
            aer=self._aer(folder, space),
            bars=self._bars(folder),
            driver=driver.resolve().name if driver.exists() else "",
            unknown=reasons,
        )

    def link(self, address: str) -> Link | None:
        """Return a device's link as it is now; None if sysfs does not have it."""
        return self._link(self.devices / address, ConfigSpace(b""))

    def errors(self, address: str) -> dict[str, int] | None:
        """Return a device's AER counters as `KIND NAME`, zeros left out; None without any."""
        texts = {
            kind: self.text(self.devices / address / f"aer_dev_{kind}")
            for kind in ("correctable", "nonfatal", "fatal")
        }
        if all(text is None for text in texts.values()):
            return None
        return {
            f"{kind} {name}": count
            for kind, text in texts.items()
            for name, count in (_counters(text) or {}).items()
        }

    def _hexadecimal(self, path: Path) -> str | None:
        text = self.text(path)
        return text.removeprefix("0x") if text else None

    def _link(self, folder: Path, space: ConfigSpace) -> Link | None:
        values = [
            self.text(folder / f"{when}_link_{what}")
            for what in ("speed", "width")
            for when in ("current", "max")
        ]
        if all(value is None for value in values):
            return space.link()
        speed, max_speed, width, max_width = values
        return Link(
            speed_gts=parse_speed(speed),
            max_speed_gts=parse_speed(max_speed),
            width=_lanes(width),
            max_width=_lanes(max_width),
            unknown={"*": f"sysfs says speed {speed} of {max_speed}, width {width} of {max_width}"},
        )

    def _aer(self, folder: Path, space: ConfigSpace) -> Aer | None:
        counts = {
            kind: self.text(folder / f"aer_dev_{kind}")
            for kind in ("correctable", "nonfatal", "fatal")
        }
        status = space.aer_status()
        if status is None and all(text is None for text in counts.values()):
            return None
        counters = {kind: _counters(text) for kind, text in counts.items()}
        return Aer(
            **counters, status=status, unknown={"*": "neither sysfs nor the readable space has it"}
        )

    def _bars(self, folder: Path) -> tuple[Bar, ...] | None:
        text = self.text(folder / "resource")
        if text is None:
            return None
        bars = []
        for region, line in enumerate(text.splitlines()[:BAR_COUNT]):
            try:
                first, last, flags = (int(word, 16) for word in line.split())
            except ValueError:
                continue
            if flags & MEMORY_RESOURCE and last > first:
                bars.append(Bar(region, last - first + 1))
        return tuple(bars)


def parse_speed(text: str | None) -> float | None:
    """Return the GT/s of a text such as `32.0 GT/s PCIe`, None if it has none."""
    match = _SPEED.search(text or "")
    return float(match[1]) if match else None


def _lanes(text: str | None) -> int | None:
    """Return a width; None for 0, 63 and 255, which stand for no link."""
    return int(text) if text and text.isdecimal() and 0 < int(text) <= 32 else None


def _counters(text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    words = [line.split() for line in text.splitlines()]
    pairs = [(line[0], int(line[1])) for line in words if len(line) == 2 and line[1].isdecimal()]
    return {name: count for name, count in pairs if count and not name.startswith("TOTAL")}


def _acs(role: str | None, space: ConfigSpace) -> Acs | None:
    return Acs(present=False) if role == ROOT_COMPLEX else space.acs()


def _role(
    name: str, parents: Mapping[str, str], space: ConfigSpace, class_code: str | None
) -> tuple[str | None, str]:
    """Return the role of a device, and why it is unknown.

    Without root it follows from the place: bridges below a root are root ports, below a root port
    upstream ports, below an upstream port downstream ports.
    """
    stated = space.role()
    if stated is not None:
        return stated, ""
    if class_code is None:
        return None, "neither class nor capabilities are readable"
    if not class_code.startswith("0604"):
        return ENDPOINT, ""
    return role_by_depth(name, parents), ""


def role_by_depth(name: str, parents: Mapping[str, str]) -> str:
    """Return the role that a PCI bridge has by its place below the root.

    A text that was damaged may have a loop in its tree, which ends the way up.
    """
    depth, above = 0, parents[name]
    while above in parents and depth < len(parents):
        depth, above = depth + 1, parents[above]
    return ROOT_PORT if depth == 0 else (DOWNSTREAM, UPSTREAM)[depth % 2]


def _root_complex(name: str) -> PciNode:
    reason = {"*": "a root complex is no PCI device", "parent": "it is the root"}
    return PciNode(name, role=ROOT_COMPLEX, unknown=reason)

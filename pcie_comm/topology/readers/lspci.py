"""Reads `lspci -vv` and `-vvv`, with or without `-nn` and `-D`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...errors import InvalidArgumentError
from ..address import bus_of, normalise, root_name, sort_key
from ..model import (
    ANY,
    BRIDGE,
    DOWNSTREAM,
    ENDPOINT,
    ROOT_COMPLEX,
    ROOT_PORT,
    UPSTREAM,
    Acs,
    Aer,
    Bar,
    Gpu,
    Host,
    Link,
    PciNode,
    unknown_system,
)
from .plain import acs_bits

KIND = "lspci -vvv"
ABSENT = "lspci does not print it"

VENDORS = {
    "NVIDIA Corporation": "10de",
    "Advanced Micro Devices, Inc. [AMD/ATI]": "1002",
    "Advanced Micro Devices, Inc. [AMD]": "1022",
    "Intel Corporation": "8086",
    "Broadcom / LSI": "1000",
    "PLX Technology, Inc.": "10b5",
    "PMC-Sierra Inc.": "11f8",
    "Microchip / SMSC": "1055",
    "ASMedia Technology Inc.": "1b21",
    "Mellanox Technologies": "15b3",
}
"""By the name that lspci prints without -nn: the vendors whose GPUs and switches matter here."""

GPU_VENDORS = ("10de", "1002")
GPU_CLASSES = {
    "VGA compatible controller": "030000",
    "3D controller": "030200",
    "Display controller": "038000",
}
ROLES_IN_WORDS = {
    "Root Port": ROOT_PORT,
    "Upstream Port": UPSTREAM,
    "Downstream Port": DOWNSTREAM,
    "PCI-Express to PCI/PCI-X Bridge": BRIDGE,
    "PCI/PCI-X to PCI-Express Bridge": BRIDGE,
    "Endpoint": ENDPOINT,
    "Legacy Endpoint": ENDPOINT,
    "Root Complex Integrated Endpoint": ENDPOINT,
}

_HEAD = re.compile(r"((?:[0-9a-f]{4,5}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ([^:]+): (.*)")
_NUMBERS = re.compile(r"\[([0-9a-f]{4}):([0-9a-f]{4})\]")
_CLASS = re.compile(r"(.*?) \[([0-9a-f]{4})\]")
_DEVICE = re.compile(r"Device ([0-9a-f]{4})\b")
_BUS = re.compile(r"Bus: primary=([0-9a-f]{2}), secondary=([0-9a-f]{2})")
_EXPRESS = re.compile(r"Express \(v\d\) (" + "|".join(map(re.escape, ROLES_IN_WORDS)) + r")\b")
_SPEED, _WIDTH = re.compile(r"Speed ([0-9.]+)GT/s"), re.compile(r"Width x(\d+)")
_REGION = re.compile(r"Region (\d): Memory at .*\[size=(\d+)([KMGT]?)\]")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass
class _Block:
    """One device: the words of its first line, and the lines below it."""

    address: str
    kind: str
    name: str
    lines: list[str] = field(default_factory=list)

    def line(self, start: str) -> str:
        """Return the first line that begins so, nothing if there is none."""
        return next((line for line in self.lines if line.startswith(start)), "")


def _blocks(text: str) -> list[_Block]:
    found: list[_Block] = []
    for line in text.splitlines():
        if match := _HEAD.fullmatch(line):
            found.append(_Block(normalise(match[1]) or match[1], match[2], match[3]))
        elif found and line[:1].isspace():
            found[-1].lines.append(line.strip())
    return found


def matches(text: str) -> bool:
    """Whether a text has devices with details below them, as -v and more print them."""
    return any(block.line("Bus: ") or block.line("Control: ") for block in _blocks(text))


def read(text: str, source: str) -> Host:
    """Read the tree, links, ACS, AER status and BARs; GPUs in the order of addresses.

    Raises:
        InvalidArgumentError: No device can be read.
    """
    blocks = _blocks(text)
    if not blocks:
        raise InvalidArgumentError(f"file={source} names no PCI device")
    bridges = {}
    for block in blocks:
        if match := _BUS.match(block.line("Bus: ")):
            domain = block.address.split(":", 1)[0]
            bridges[f"{domain}:{match[2]}"] = block.address
    nodes = [_node(block, bridges) for block in blocks]
    roots = {node.parent for node in nodes if node.parent and node.parent.startswith("pci")}
    nodes += [root_complex(name) for name in roots]
    nodes.sort(key=lambda node: (sort_key(node.address), node.address))
    lost = [line for block in blocks if not block.lines for line in (block.address,)]
    remark = f"{source}: no details of {', '.join(lost)}; the text may be cut off"
    return Host(
        sources=(f"{KIND}: {source}",),
        system=unknown_system(ABSENT),
        nodes=tuple(nodes),
        gpus=gpus_of(nodes, ABSENT),
        remarks=(remark,) if lost else (),
        unknown={ANY: ABSENT},
    )


def root_complex(name: str) -> PciNode:
    """Return the node of a root complex, `pci0000:00`."""
    reasons = {ANY: "a root complex is no PCI device", "parent": "it is the root"}
    return PciNode(name, role=ROOT_COMPLEX, unknown=reasons)


def gpus_of(nodes: Sequence[PciNode], reason: str) -> tuple[Gpu, ...]:
    """Return the GPUs among nodes, in the order of addresses; NVIDIA's, if there are such."""
    found = [node for node in nodes if (node.class_code or "").startswith("03")]
    found = [node for node in found if node.vendor in (*GPU_VENDORS, None)]
    nvidia = [node for node in found if node.vendor == "10de"]
    return tuple(
        Gpu(
            name=f"GPU{index}",
            address=node.address,
            product=node.name,
            numa_node=node.numa_node,
            bar1_nbytes=max((bar.nbytes for bar in node.bars), default=None) if node.bars else None,
            link=node.link,
            unknown={ANY: reason},
        )
        for index, node in enumerate(nvidia or found)
    )


def _node(block: _Block, bridges: dict[str, str]) -> PciNode:
    bus = bus_of(block.address)
    numbers = _NUMBERS.search(block.name)
    kind = _CLASS.fullmatch(block.kind)
    named = kind[1] if kind else block.kind
    role = _role(block)
    numa = block.line("NUMA node: ").removeprefix("NUMA node: ")
    driver = block.line("Kernel driver in use: ").removeprefix("Kernel driver in use: ")
    stated = _DEVICE.search(block.name)
    vendor = next((code for name, code in VENDORS.items() if block.name.startswith(name)), None)
    subsystem = block.line("Subsystem: ")
    return PciNode(
        address=block.address,
        parent=bridges.get(bus, root_name(bus)),
        role=role,
        virtual=True if "Virtual" in subsystem or "Virtual" in block.name else None,
        vendor=numbers[1] if numbers else vendor,
        device=numbers[2] if numbers else stated[1] if stated else None,
        class_code=_class_code(named, kind[2] if kind else None),
        name=block.name,
        numa_node=int(numa) if numa.isdecimal() else None,
        link=_link(block),
        acs=_acs(block),
        aer=_aer(block),
        bars=_bars(block) if block.lines else None,
        driver=driver if driver or block.line("Control: ") else None,
        unknown={
            ANY: ABSENT,
            "role": "no Express capability is shown; it needs root and -vv",
            "acs": "capabilities are not shown; they need root and -vv",
            "aer": "no Advanced Error Reporting is shown",
        },
    )


def _class_code(name: str, number: str | None) -> str | None:
    if name in GPU_CLASSES:
        return GPU_CLASSES[name]
    if name == "PCI bridge":
        return "060400"
    return f"{number}00" if number else None


def _role(block: _Block) -> str | None:
    for line in block.lines:
        if match := _EXPRESS.search(line):
            return ROLES_IN_WORDS[match[1]]
    if block.kind.startswith("PCI bridge"):
        return BRIDGE if block.line("Capabilities: ") else None
    return ENDPOINT if block.line("Control: ") else None


def _link(block: _Block) -> Link | None:
    capable, status = block.line("LnkCap:"), block.line("LnkSta:")
    if not capable and not status:
        return None
    numbers = [
        float(match[1]) if (match := pattern.search(line)) else None
        for pattern in (_SPEED, _WIDTH)
        for line in (status, capable)
    ]
    speed, max_speed, width, max_width = numbers
    return Link(
        speed_gts=speed,
        max_speed_gts=max_speed,
        width=int(width) if width else None,
        max_width=int(max_width) if max_width else None,
        unknown={ANY: "lspci shows no value, or a width of 0"},
    )


def _acs(block: _Block) -> Acs | None:
    capable, control = block.line("ACSCap:"), block.line("ACSCtl:")
    if control:
        return Acs(True, acs_bits(capable), acs_bits(control))
    # Extended capabilities have a version in their brackets. One that is shown proves that all are.
    extended = any(re.match(r"Capabilities: \[[0-9a-f]{3} v\d", line) for line in block.lines)
    return Acs(present=False) if extended else None


def _aer(block: _Block) -> Aer | None:
    worse, lesser = block.line("UESta:"), block.line("CESta:")
    if not worse and not lesser:
        return None
    return Aer(status=(*acs_bits(worse), *acs_bits(lesser)), unknown={ANY: "lspci has no counters"})


def _bars(block: _Block) -> tuple[Bar, ...]:
    # SR-IOV lists the windows of virtual functions in the same words, further down.
    own = block.lines
    for at, line in enumerate(own):
        if line.startswith("Capabilities: "):
            own = own[:at]
            break
    found = (_REGION.match(line) for line in own)
    return tuple(Bar(int(m[1]), int(m[2]) << _UNITS[m[3]]) for m in found if m)

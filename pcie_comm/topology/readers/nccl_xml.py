"""Reads and writes NCCL's topology XML, RCCL's dialect included.

In it a `cpu` is a NUMA node, and a `pci` is a device or a switch as a whole. Root complexes and
root ports are not in it, so that PHB and NODE cannot be told apart.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from ...errors import InvalidArgumentError
from ..address import normalise
from ..model import (
    ANY,
    ENDPOINT,
    MOST_CPUS,
    SWITCH,
    Gpu,
    Host,
    Link,
    NumaNode,
    PciNode,
    System,
    to_ranges,
)
from ..sysfs import parse_speed

KIND = "NCCL topology XML"
ABSENT = "NCCL's XML does not have it"


def matches(text: str) -> bool:
    """Whether a text is such XML, complete or not."""
    return text.lstrip().startswith("<") and "<system" in text


def read(text: str, source: str) -> Host:
    """Read NUMA nodes, switches, devices and GPUs.

    Raises:
        InvalidArgumentError: It is no well-formed XML, or has no `cpu` element.
    """
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise InvalidArgumentError(f"file={source} declares XML entities, which NCCL never does")
    try:
        top = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise InvalidArgumentError(f"file={source} is no well-formed XML: {error}") from error
    cpus = list(top.iter("cpu"))
    if top.tag != "system" or not cpus:
        raise InvalidArgumentError(f"file={source} has no system with cpu elements")
    found = [item for cpu in cpus for item in _devices(cpu, None, _number(cpu.get("numaid")))]
    nodes = tuple(node for node, _ in found)
    gpus = _gpus(found)
    no_gpu = "no element says which device is a GPU"
    return Host(
        sources=(f"{KIND}: {source}",),
        system=_system(cpus),
        nodes=nodes,
        gpus=gpus or None,
        remarks=() if gpus else (f"{source}: {no_gpu}",),
        unknown={ANY: ABSENT, "gpus": no_gpu},
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _devices(
    above: ElementTree.Element, parent: str | None, numa: int | None
) -> Iterator[tuple[PciNode, ElementTree.Element]]:
    for item in above.findall("pci"):
        address = normalise(item.get("busid", ""))
        if address is None:
            continue
        code = (item.get("class") or "").removeprefix("0x") or None
        below = item.find("pci") is not None
        role = SWITCH if below or (code or "").startswith("0604") else ENDPOINT if code else None
        node = PciNode(
            address=address,
            parent=parent,
            role=role,
            virtual=True if item.get("vendor") == "0xffff" or address[:4] == "ffff" else None,
            vendor=_identity(item.get("vendor")),
            device=_identity(item.get("device")),
            class_code=code,
            numa_node=numa,
            link=_link(item),
            unknown={ANY: ABSENT, "parent": "NCCL's XML has no root complexes"},
        )
        yield node, item
        yield from _devices(item, address, numa)


def _identity(text: str | None) -> str | None:
    number = (text or "").removeprefix("0x")
    return number if number and number != "ffff" else None


def _link(item: ElementTree.Element) -> Link | None:
    speed, width = parse_speed(item.get("link_speed")), _number(item.get("link_width"))
    if speed is None and not width:
        return None
    # NCCL writes the lower of the maxima of the device and of its port: the ceiling, not the state.
    return Link(max_speed_gts=speed, max_width=width or None, unknown={ANY: ABSENT})


def _gpus(found: list[tuple[PciNode, ElementTree.Element]]) -> tuple[Gpu, ...]:
    """Return the GPUs, by their `dev` if all have it, else as they stand in the file."""
    gpus = [
        (node, item.find("gpu"))
        for node, item in found
        if item.find("gpu") is not None or (node.class_code or "").startswith("03")
    ]
    indices = [None if own is None else _number(own.get("dev")) for _, own in gpus]
    numbered = list(zip(gpus, indices, strict=True))
    if None not in indices:
        numbered.sort(key=lambda item: item[1] or 0)
    return tuple(
        Gpu(
            name=f"GPU{index}",
            nvml_index=number,
            address=node.address,
            numa_node=node.numa_node,
            link=node.link,
            unknown={ANY: ABSENT},
        )
        for index, ((node, _), number) in enumerate(numbered)
    )


def _system(cpus: list[ElementTree.Element]) -> System:
    numa = [
        NumaNode(index=index, cpus=_cpus(cpu.get("affinity")), unknown={ANY: ABSENT})
        for cpu in cpus
        if (index := _number(cpu.get("numaid"))) is not None
    ]
    return System(numa=tuple(numa) or None, unknown={ANY: ABSENT})


def _cpus(mask: str | None) -> str | None:
    """Return the ranges of a mask of 32-bit words, `00ff00ff,0000ffff`, the highest first."""
    digits = (mask or "").replace(",", "")
    if not re.fullmatch(r"[0-9A-Fa-f]+", digits) or len(digits) * 4 > MOST_CPUS:
        return None
    value = int(digits, 16)
    return to_ranges(tuple(at for at in range(value.bit_length()) if value >> at & 1))

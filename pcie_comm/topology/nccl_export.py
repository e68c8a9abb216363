"""Writes NCCL's topology XML: what NCCL_TOPO_FILE takes, and readers.nccl_xml reads.

A switch is one element there, under the address of its upstream port; root ports and root complexes
have none. What is not known is left out, and NCCL finds it out itself.
"""

from __future__ import annotations

import contextlib
import xml.etree.ElementTree as ElementTree

from .links import ceiling
from .model import BRIDGE, SWITCH, UPSTREAM, Host, PciNode, expand_ranges

NO_NODE = "-1"


def to_nccl_xml(host: Host) -> str:
    """Return the GPUs of a host, and the switches above them, as NCCL's XML."""
    top = ElementTree.Element("system", version="1")
    cpus: dict[str, ElementTree.Element] = {}
    placed: dict[str, ElementTree.Element] = {}
    for gpu in host.gpus or ():
        path = host.path(gpu.address)
        if not path:
            continue
        above = _cpu(host, path, top, cpus)
        switches = [node for node in path[1:] if node.role in (UPSTREAM, SWITCH, BRIDGE)]
        for node in (*reversed(switches), path[0]):
            if node.address not in placed:
                placed[node.address] = ElementTree.SubElement(above, "pci", _facts(host, node))
            above = placed[node.address]
        facts = {} if gpu.nvml_index is None else {"dev": str(gpu.nvml_index)}
        ElementTree.SubElement(above, "gpu", facts)
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="unicode") + "\n"


def _cpu(
    host: Host,
    path: tuple[PciNode, ...],
    top: ElementTree.Element,
    cpus: dict[str, ElementTree.Element],
) -> ElementTree.Element:
    numa = next((node.numa_node for node in path if node.numa_node is not None), None)
    name = NO_NODE if numa is None else str(numa)
    if name not in cpus:
        cpus[name] = ElementTree.SubElement(top, "cpu", {"numaid": name})
        own = next((node for node in host.system.numa or () if node.index == numa), None)
        if own is not None and own.cpus is not None:
            with contextlib.suppress(ValueError):  # a damaged text; NCCL finds the mask itself
                cpus[name].set("affinity", _mask(expand_ranges(own.cpus)))
    return cpus[name]


def _mask(numbers: tuple[int, ...]) -> str:
    """Return a mask of 32-bit words in hexadecimal, the highest first."""
    value = sum(1 << number for number in set(numbers))
    words = range(max(1, -(-value.bit_length() // 32)))
    return ",".join(f"{value >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(words))


def _facts(host: Host, node: PciNode) -> dict[str, str]:
    most = ceiling(host, node)
    code = node.class_code or ("060400" if node.role in (UPSTREAM, SWITCH) else None)
    facts = {
        "busid": node.address,
        "class": f"0x{code}" if code else None,
        "vendor": f"0x{node.vendor}" if node.vendor else None,
        "device": f"0x{node.device}" if node.device else None,
        "link_speed": f"{most.speed_gts} GT/s PCIe" if most.speed_gts else None,
        "link_width": str(most.width) if most.width else None,
    }
    return {name: value for name, value in facts.items() if value is not None}

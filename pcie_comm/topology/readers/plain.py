"""Reads `numactl -H`, /proc/cmdline, and lines of ACSCtl without their devices."""

from __future__ import annotations

import re

from ...errors import InvalidArgumentError
from ..model import ANY, Acs, Host, NumaNode, System, to_ranges, unknown_system

NUMACTL = "numactl -H"
CMDLINE = "kernel command line"
ACS_LINES = "lines of ACSCtl"

_NODE = re.compile(r"node (\d+) (cpus|size|free):(.*)")
_DISTANCES = re.compile(r"\s*(\d+):((?:\s+\d+)+)\s*")
_ACS = re.compile(r"\s*ACSCtl:((?:\s+[A-Za-z]+[+-])+)\s*")


def is_numactl(text: str) -> bool:
    """Whether a text is what numactl -H prints."""
    return re.search(r"^available: \d+ nodes?", text, re.MULTILINE) is not None


def read_numactl(text: str, source: str) -> Host:
    """Read the NUMA nodes.

    Raises:
        InvalidArgumentError: It ends before the first node.
    """
    facts: dict[int, dict[str, str]] = {}
    distances: dict[int, list[int]] = {}
    for line in text.splitlines():
        if match := _NODE.fullmatch(line):
            facts.setdefault(int(match[1]), {})[match[2]] = match[3].strip()
        elif match := _DISTANCES.fullmatch(line):
            distances[int(match[1])] = [int(word) for word in match[2].split()]
    if not facts:
        raise InvalidArgumentError(f"file={source} names no NUMA node")
    nodes = tuple(_numa_node(index, facts, distances.get(index)) for index in sorted(facts))
    absent = "numactl -H does not print it"
    return Host(
        sources=(f"{NUMACTL}: {source}",),
        system=System(numa=nodes, unknown={ANY: absent}),
        unknown={ANY: absent},
    )


def _numa_node(
    index: int, facts: dict[int, dict[str, str]], distances: list[int] | None
) -> NumaNode:
    own = facts[index]
    cpus, size = own.get("cpus"), own.get("size", "").split()
    named = None
    if distances is not None and len(distances) == len(facts):
        named = {str(other): value for other, value in zip(sorted(facts), distances, strict=True)}
    return NumaNode(
        index=index,
        cpus=None
        if cpus is None
        else to_ranges(tuple(int(n) for n in cpus.split() if n.isdecimal())),
        memory_nbytes=int(size[0]) << 20 if size and size[0].isdecimal() else None,
        distances=named,
        unknown={ANY: "the line is missing"},
    )


def is_cmdline(text: str) -> bool:
    """Whether a text is one line of kernel options."""
    lines = text.strip().splitlines()
    return (
        len(lines) == 1 and re.search(r"(?:^|\s)(?:BOOT_IMAGE|root|initrd)=", lines[0]) is not None
    )


def read_cmdline(text: str, source: str) -> Host:
    """Read a kernel command line."""
    line = text.strip()
    mode, reason = iommu_of_cmdline(line)
    absent = "a kernel command line does not have it"
    return Host(
        sources=(f"{CMDLINE}: {source}",),
        system=System(cmdline=line, iommu=mode, unknown={ANY: absent, "iommu": reason}),
        unknown={ANY: absent},
    )


def iommu_of_cmdline(line: str) -> tuple[str | None, str]:
    """Return the IOMMU mode that kernel options decide, and why they do not."""
    options = line.split()
    if any(name in options for name in ("iommu=off", "amd_iommu=off", "intel_iommu=off")):
        return "off", ""
    if "iommu=pt" in options or "iommu.passthrough=1" in options:
        return "passthrough", ""
    return None, "the options do not decide; it depends on firmware and kernel defaults"


def is_acs_lines(text: str) -> bool:
    """Whether every line is an ACSCtl line of lspci."""
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and all(_ACS.fullmatch(line) for line in lines)


def read_acs_lines(text: str, source: str) -> Host:
    """Read ACSCtl lines, as `lspci -vvv | grep ACSCtl` prints them."""
    found = tuple(Acs(True, (), acs_bits(line)) for line in text.splitlines() if line.strip())
    absent = "lines of ACSCtl name no device"
    return Host(
        sources=(f"{ACS_LINES}: {source}",),
        system=unknown_system(absent),
        loose_acs=found,
        unknown={ANY: absent},
    )


def acs_bits(line: str) -> tuple[str, ...]:
    """Return the bits that a line such as `ACSCtl: SrcValid+ TransBlk-` shows as set."""
    return tuple(word[:-1] for word in line.split() if word.endswith("+"))

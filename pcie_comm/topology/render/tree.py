"""The part of the PCI tree that has GPUs in it, with a line of words for each device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..links import ceiling
from ..model import ROOT_COMPLEX, Gpu, Host, PciNode


@dataclass
class Branch:
    """A device, what is said of it, and what is below it.

    Attributes:
        key: Its address.
        title: A few words.
        details: More words.
        gpu: The GPU that it is, or None.
        below: Branches with GPUs in them.
    """

    key: str
    title: str
    details: str
    gpu: Gpu | None
    below: list[Branch] = field(default_factory=list)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Branch]]:
        """Yield this branch and all below with their depth, parents first."""
        yield depth, self
        for branch in self.below:
            yield from branch.walk(depth + 1)


def forest(host: Host) -> list[Branch]:
    """Return the tops of the trees that have GPUs in them; GPUs without a tree are tops."""
    branches: dict[str, Branch] = {}
    tops: list[Branch] = []
    for gpu in host.gpus or ():
        path = host.path(gpu.address)
        if not path:
            tops.append(Branch(gpu.address or gpu.name, gpu.name, _gpu_words(gpu), gpu))
            continue
        above: Branch | None = None
        for node in reversed(path):
            if node.address not in branches:
                own = gpu if node is path[0] else None
                branches[node.address] = _branch(host, node, own)
                (tops if above is None else above.below).append(branches[node.address])
            above = branches[node.address]
    return tops


def _branch(host: Host, node: PciNode, gpu: Gpu | None) -> Branch:
    title = gpu.name if gpu is not None else node.role or "bridge of unknown role"
    words = [] if node.role == ROOT_COMPLEX else [_link_words(host, node)]
    if node.virtual:
        words.append("virtual")
    if node.acs is not None and node.acs.enabled:
        words.append("ACS " + " ".join(node.acs.enabled))
    if gpu is not None:
        words.append(_gpu_words(gpu))
    return Branch(node.address, title, ", ".join(filter(None, words)), gpu)


def _link_words(host: Host, node: PciNode) -> str:
    link = node.link
    if link is None:
        return ""
    most = ceiling(host, node)
    if link.speed_gts is None:
        return f"at most {most}"
    width = "?" if link.width is None else link.width
    return f"{link.speed_gts:g} GT/s x{width} now, at most {most}"


def _gpu_words(gpu: Gpu) -> str:
    facts = [gpu.product]
    if gpu.numa_node is not None:
        facts.append(f"NUMA {gpu.numa_node}")
    if gpu.ordinal is not None:
        facts.append(f"cuda:{gpu.ordinal}")
    if gpu.uuid is not None:
        facts.append(gpu.uuid)
    if gpu.mig:
        facts.append("MIG on")
    return ", ".join(filter(None, facts))

"""Labels of pairs of GPUs, from the PCI tree, beside the driver's own; islands.

The rule is the legend of `nvidia-smi topo -m`: PIX crosses at most one PCIe switch, PXB several but
no host bridge, PHB one host bridge, NODE several within a NUMA node, SYS the link between NUMA
nodes. A label says where the bytes may go, not how fast: see docs/topology.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .model import BRIDGE, ROOT_COMPLEX, SWITCH, UPSTREAM, Gpu, Host, LabelMatrix, PciNode

SELF = "X"
ISLAND_LABELS = ("PIX", "PXB")
ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")
NO_TREE = "there is no PCI tree"


@dataclass(frozen=True)
class Label:
    """What is said of a pair.

    Attributes:
        derived: From the tree; None if it does not tell.
        reason: Why not.
        driver: What the driver says; None if it is not known.
    """

    derived: str | None
    reason: str
    driver: str | None

    @property
    def best(self) -> str | None:
        """The derived label, else the driver's."""
        return self.derived or self.driver

    @property
    def mismatch(self) -> bool:
        """Whether both are known and differ. NVLink is not in the tree, so it never does."""
        known = self.derived is not None and self.driver is not None
        return known and self.derived != self.driver and distance(self.driver) >= 0


def distance(label: str | None) -> int:
    """Return a number that grows with distance: -1 for NVLink, 5 for an unknown label."""
    if label is not None and label.startswith("NV"):
        return -1
    return ORDER.index(label) if label in ORDER else len(ORDER)


def labels(host: Host) -> dict[tuple[str, str], Label]:
    """Return what is said of every ordered pair of GPUs, themselves included, by their names."""
    gpus = host.gpus or ()
    paths = {gpu.name: host.path(gpu.address) for gpu in gpus}
    driver = host.driver_labels
    found = {}
    for one in gpus:
        for other in gpus:
            derived, reason = (SELF, "")
            if one is not other:
                derived, reason = _derive(host, (one, other), paths)  # type: ignore[assignment]
            stated = driver.get(one.name, other.name) if driver else None
            found[one.name, other.name] = Label(derived, reason, stated)
    return found


def derived_matrix(host: Host) -> LabelMatrix:
    """Return the labels that follow from the tree."""
    names = tuple(gpu.name for gpu in host.gpus or ())
    every = labels(host)
    return LabelMatrix(
        names, names, tuple(tuple(every[row, column].derived for column in names) for row in names)
    )


def best_matrix(host: Host) -> LabelMatrix:
    """Return the labels that follow from the tree, else the driver's."""
    names = tuple(gpu.name for gpu in host.gpus or ())
    every = labels(host)
    return LabelMatrix(
        names, names, tuple(tuple(every[row, column].best for column in names) for row in names)
    )


def _derive(
    host: Host, pair: tuple[Gpu, Gpu], paths: Mapping[str, tuple[PciNode, ...]]
) -> tuple[str | None, str]:
    if not host.nodes:
        return None, NO_TREE
    mine, others = (paths[gpu.name] for gpu in pair)
    if not mine or not others:
        return None, "the tree does not have both GPUs"
    addresses = {node.address for node in others}
    common = next((node for node in mine if node.address in addresses), None)
    if common is not None and common.role != ROOT_COMPLEX:
        one_switch = not any(_has_switch_below(path, common) for path in (mine, others))
        return ("PIX" if one_switch else "PXB"), ""
    if common is not None:
        return "PHB", ""
    return _across_roots(host, mine, others)


def _has_switch_below(path: Sequence[PciNode], common: PciNode) -> bool:
    """Whether a switch of its own lies between a GPU and the node that both have in common.

    The downstream port below the common upstream port belongs to the same switch.
    """
    between = path[1 : [node.address for node in path].index(common.address)]
    return any(node.role in (UPSTREAM, SWITCH, BRIDGE, None) for node in between)


def _across_roots(
    host: Host, mine: Sequence[PciNode], others: Sequence[PciNode]
) -> tuple[str | None, str]:
    one, other = _numa(mine), _numa(others)
    if one is not None and other is not None and one != other:
        return "SYS", ""
    if not mine[-1].role == others[-1].role == ROOT_COMPLEX:
        return None, "the source does not name host bridges: PHB or NODE"
    if one is None or other is None:
        numa = host.system.numa
        if numa is not None and len(numa) == 1:
            return "NODE", ""
        return None, "the NUMA node of a GPU is unknown: NODE or SYS"
    return "NODE", ""


def _numa(path: Sequence[PciNode]) -> int | None:
    return next((node.numa_node for node in path if node.numa_node is not None), None)


def components(names: Sequence[str], linked: Iterable[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Return names in groups that pairs connect, groups and names in the order given."""
    group = {name: name for name in names}
    for one, other in linked:
        keep, drop = group[one], group[other]
        if keep != drop:
            group = {name: keep if at == drop else at for name, at in group.items()}
    return [
        tuple(name for name in names if group[name] == key) for key in dict.fromkeys(group.values())
    ]


def groups_within(host: Host, farthest: str) -> list[tuple[str, ...]]:
    """Return the GPUs in groups whose pairs are at most `farthest` apart; a partition."""
    names = [gpu.name for gpu in host.gpus or ()]
    near = (
        pair
        for pair, label in labels(host).items()
        if pair[0] != pair[1] and distance(label.best) <= ORDER.index(farthest)
    )
    return components(names, near)


def islands(host: Host) -> list[tuple[str, ...]]:
    """Return the GPUs that reach each other without a host bridge, in groups; a partition.

    A GPU that shares no switch is an island of its own.
    """
    return groups_within(host, ISLAND_LABELS[-1])


def mismatches(host: Host) -> list[tuple[str, str, Label]]:
    """Return the pairs whose derived label is not the driver's, each once."""
    names = [gpu.name for gpu in host.gpus or ()]
    return [
        (*pair, label)
        for pair, label in labels(host).items()
        if label.mismatch and names.index(pair[0]) < names.index(pair[1])
    ]

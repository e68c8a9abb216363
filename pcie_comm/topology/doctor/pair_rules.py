"""Rules about pairs of GPUs, their labels, and figures that were measured."""

from __future__ import annotations

import statistics

from ..labels import islands, labels, mismatches
from ..model import Host, Measurement, Pair
from ..ordering import best_order, crossings
from .finding import ERROR, WARNING, Case, Finding, Outcome
from .host_rules import CUDA_GUIDE

SLOWER = 0.9
COLLAPSE = 0.5
LEGEND = "legend of nvidia-smi topo -m"


def can_access(pair: Pair) -> bool | None:
    """Whether a pair can read and write, None if neither CUDA nor the driver says."""
    if pair.cuda_access is not None:
        return pair.cuda_access
    stated = [status for kind, status in (pair.p2p or {}).items() if kind in ("read", "write", "?")]
    return all(status == "OK" for status in stated) if stated else None


def _facts(pair: Pair) -> str:
    status = ", ".join(f"{kind} {value}" for kind, value in sorted((pair.p2p or {}).items()))
    return f"p2p: {status or 'unknown'}; cuda_access={pair.cuda_access}"


def no_access(case: Case) -> Outcome:
    """Pairs without peer access need another transport."""
    pairs = case.host.pairs
    if pairs is None:
        return case.host.why("pairs")
    refused = [pair for pair in pairs if can_access(pair) is False]
    if not refused:
        return []
    shown = ", ".join(f"{pair.source}-{pair.target}" for pair in refused[:6])
    return [
        Finding(
            id="no-access",
            severity=WARNING,
            subject=shown + (" ..." if len(refused) > 6 else ""),
            evidence=_facts(refused[0]),
            expected="peer access between all GPUs of a group",
            seen=f"{len(refused)} of {len(pairs)} ordered pairs without",
            remedy="a driver that allows it for this GPU, or the transport host_pinned",
            source=CUDA_GUIDE,
        )
    ]


def one_way(case: Case) -> Outcome:
    """A pair that can be used in one direction hangs who relies on both."""
    pairs = case.host.pairs
    if pairs is None:
        return case.host.why("pairs")
    access = {(pair.source, pair.target): pair for pair in pairs}
    found = []
    for (source, target), pair in access.items():
        back = access.get((target, source))
        if back is None or not can_access(pair) or can_access(back) is not False:
            continue
        found.append(
            Finding(
                id="one-way-pair",
                severity=ERROR,
                subject=f"{source}-{target}",
                evidence=f"there: {_facts(pair)}; back: {_facts(back)}",
                expected="the same answer in both directions",
                seen=f"{source} can, {target} cannot",
                remedy="do not use this pair; `pcie-comm advise` vetoes it",
                source=CUDA_GUIDE,
            )
        )
    return found


def label_mismatch(case: Case) -> Outcome:
    """The driver and the tree should say the same of a pair."""
    host = case.host
    if host.driver_labels is None:
        return host.why("driver_labels")
    if host.nodes is None:
        return host.why("nodes")
    return [
        Finding(
            id="label-mismatch",
            severity=WARNING,
            subject=f"{one}-{other}",
            evidence=f"tree: {label.derived}, driver: {label.driver}",
            expected="the same label",
            seen=f"{label.derived} and {label.driver}",
            remedy="do not trust either; measure the pair",
            source=LEGEND,
        )
        for one, other, label in mismatches(host)
    ]


def far_in_node(case: Case) -> Outcome:
    """A pair of one NUMA node that the driver calls SYS contradicts its own legend."""
    host = case.host
    if host.driver_labels is None:
        return host.why("driver_labels")
    numa = {gpu.name: gpu.numa_node for gpu in host.gpus or ()}
    if all(node is None for node in numa.values()):
        return "the NUMA nodes of the GPUs are unknown"
    odd = [
        pair
        for pair, label in labels(host).items()
        if label.driver == "SYS" and numa[pair[0]] is not None and numa[pair[0]] == numa[pair[1]]
    ]
    if not odd:
        return []
    return [
        Finding(
            id="label-numa-conflict",
            severity=WARNING,
            subject=f"{odd[0][0]}-{odd[0][1]} and {len(odd) // 2 - 1} more",
            evidence=f"driver: SYS, both on NUMA node {numa[odd[0][0]]}",
            expected="NODE or nearer within a NUMA node",
            seen=f"{len(odd) // 2} pairs of one NUMA node labelled SYS",
            remedy="do not group by label here; measure the pairs",
            source=LEGEND,
        )
    ]


def rank_order(case: Case) -> Outcome:
    """Ranks that alternate between islands load the uplinks for every neighbour."""
    host = case.host
    if host.gpus is None:
        return host.why("gpus")
    names = [gpu.name for gpu in host.gpus]
    groups = islands(host)
    if len(names) > 1 and len(groups) == len(names):
        return [] if any(label.best for label in labels(host).values()) else "no label is known"
    seen, least = crossings(names, groups), crossings(best_order(host), groups)
    if seen <= least:
        return []
    return [
        Finding(
            id="rank-order",
            severity=WARNING,
            subject="host",
            evidence=f"islands: {'; '.join(' '.join(group) for group in groups)}",
            expected=f"{least} neighbours in a ring on different islands",
            seen=f"{seen} in the order of the source",
            remedy=f"order ranks as {' '.join(best_order(host))} (`pcie-comm advise`)",
            source="docs/topology.md, order",
        )
    ]


def _middle(matrix: Measurement) -> float | None:
    """Return the median of the figures between different GPUs."""
    cells = [
        value
        for row, values in zip(matrix.rows, matrix.cells, strict=True)
        for column, value in zip(matrix.columns, values, strict=True)
        if row != column and value is not None
    ]
    return statistics.median(cells) if cells else None


def _bandwidths(host: Host, **facts: object) -> list[tuple[Measurement, float]]:
    found = []
    for matrix in host.measurements:
        middle = _middle(matrix)
        fits = all(getattr(matrix, name) == value for name, value in facts.items())
        if fits and matrix.unit == "GB/s" and middle is not None and "CPU" not in matrix.rows:
            found.append((matrix, middle))
    return found


def slow_p2p(case: Case) -> Outcome:
    """Peer access that is slower than the way through the host is broken somewhere."""
    found, compared = [], False
    for matrix, with_p2p in _bandwidths(case.host, p2p=True):
        others = _bandwidths(case.host, p2p=False, direction=matrix.direction)
        if not others:
            continue
        compared = True
        without = others[0][1]
        if with_p2p >= SLOWER * without:
            continue
        found.append(
            Finding(
                id="slow-p2p",
                severity=WARNING,
                subject=matrix.title,
                evidence=f"median {with_p2p:g} GB/s with P2P, {without:g} without",
                expected="at least the speed without P2P",
                seen=f"{with_p2p / without:.2f} of it",
                remedy="look for ACS redirects and a translating IOMMU; else use host_pinned",
                source="p2pBandwidthLatencyTest, medians between different GPUs",
            )
        )
    return found if compared else "no figures with P2P and without it"


def write_collapse(case: Case) -> Outcome:
    """Some hosts write to peers at a fraction of the speed at which they read."""
    writes = _bandwidths(case.host, p2p=True, access="write")
    reads = _bandwidths(case.host, p2p=True, access="read")
    if not writes or not reads:
        return "no figures of peer reads and writes"
    (matrix, write), (_, read) = writes[0], reads[0]
    if write >= COLLAPSE * read:
        return []
    return [
        Finding(
            id="write-collapse",
            severity=WARNING,
            subject=matrix.title,
            evidence=f"median {write:g} GB/s written, {read:g} read",
            expected="writes about as fast as reads",
            seen=f"{write / read:.2f} of it",
            remedy="use the pull protocol (Config.protocol='pull')",
            source="p2pBandwidthLatencyTest, medians between different GPUs",
        )
    ]

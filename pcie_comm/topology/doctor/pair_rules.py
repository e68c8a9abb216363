"""Rules about pairs of GPUs and their labels."""

from __future__ import annotations

from ..labels import islands, labels, mismatches
from ..model import Pair
from ..ordering import best_order, crossings
from ..traffic import bad_checks
from .finding import ERROR, WARNING, Case, Finding, Outcome
from .host_rules import CUDA_GUIDE

LEGEND = "legend of nvidia-smi topo -m"


def can_access(pair: Pair) -> bool | None:
    """Whether a pair can read and write, None if neither CUDA nor the driver says."""
    if pair.cuda_access is not None:
        return pair.cuda_access
    stated = [status for kind, status in (pair.p2p or {}).items() if kind in ("read", "write", "?")]
    return all(status == "OK" for status in stated) if stated else None


def _facts(pair: Pair) -> str:
    status = ", ".join(f"{kind} {value}" for kind, value in sorted((pair.p2p or {}).items()))
    ranked = "" if pair.performance_rank is None else f", performance_rank={pair.performance_rank}"
    return f"p2p: {status or 'unknown'}; cuda_access={pair.cuda_access}{ranked}"


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
    bad = bad_checks(case.host)
    found = []
    for (source, target), pair in access.items():
        back = access.get((target, source))
        works = can_access(pair) and (source, target) not in bad
        refused = back is not None and (can_access(back) is False or (target, source) in bad)
        if back is None or not works or not refused:
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

"""Rules about figures: what this tool measured, and what others print."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ..model import Host, Measurement
from ..traffic import SLOWER, cells, is_between_gpus, slower_than_host
from .finding import WARNING, Case, Finding, Outcome

COLLAPSE = 0.5
P2P_TEST = "p2pBandwidthLatencyTest, medians between different GPUs"
MEASURED = "pcie-comm topo --measure"


def _middle(matrix: Measurement) -> float | None:
    """Return the median of the figures between different GPUs."""
    values = [value for _, value in cells(matrix)]
    return statistics.median(values) if values else None


def _bandwidths(host: Host, **facts: object) -> list[tuple[Measurement, float]]:
    found = []
    for matrix in host.measurements:
        middle = _middle(matrix)
        fits = all(getattr(matrix, name) == value for name, value in facts.items())
        if fits and matrix.unit == "GB/s" and middle is not None and is_between_gpus(host, matrix):
            found.append((matrix, middle))
    return found


def slow_p2p(case: Case) -> Outcome:
    """Peer access that is slower than the way through the host is broken somewhere."""
    found, compared = [], False
    for matrix, with_p2p in _bandwidths(case.host, p2p=True):
        others = _bandwidths(case.host, p2p=False, direction=matrix.direction, engine=matrix.engine)
        if not others:
            continue
        compared = True
        without = others[0][1]
        if with_p2p < SLOWER * without:
            found.append(
                _slow(
                    matrix.title,
                    f"median {with_p2p:g} GB/s with P2P, {without:g} without",
                    f"{with_p2p / without:.2f} of it",
                    P2P_TEST if matrix.engine is None else MEASURED,
                )
            )
    slower = slower_than_host(case.host)
    for (source, target), figures in slower.items():
        found.append(_slow(f"{source}-{target}", figures, "slower than through the host", MEASURED))
    compared = compared or any(one.source != one.target for one in case.host.exchanges)
    return found if compared else "no figures with P2P and without it"


def _slow(subject: str, evidence: str, seen: str, source: str) -> Finding:
    return Finding(
        id="slow-p2p",
        severity=WARNING,
        subject=subject,
        evidence=evidence,
        expected="at least the speed without P2P",
        seen=seen,
        remedy="look for ACS redirects and a translating IOMMU; else use host_pinned",
        source=source,
    )


def write_collapse(case: Case) -> Outcome:
    """Some hosts write to peers at a fraction of the speed at which they read."""
    pairs = [*_reads_and_writes(case.host)]
    if not pairs:
        return "no figures of peer reads and writes"
    found = []
    for writes, reads in pairs:
        write, read = _middle(writes), _middle(reads)
        back = dict(cells(reads))
        worst = {
            pair: (value, back[pair])
            for pair, value in cells(writes)
            if pair in back and value < COLLAPSE * back[pair]
        }
        if write is not None and read is not None and write < COLLAPSE * read:
            seen, evidence = write / read, f"median {write:g} GB/s written, {read:g} read"
        elif worst:
            ends = min(worst, key=lambda pair: worst[pair][0] / worst[pair][1])
            seen = worst[ends][0] / worst[ends][1]
            evidence = f"{'-'.join(ends)}: {worst[ends][0]:g} GB/s written, {worst[ends][1]:g} read"
        else:
            continue
        found.append(_collapsed(writes, evidence, seen))
    return found


def _reads_and_writes(host: Host) -> Iterator[tuple[Measurement, Measurement]]:
    """Yield matrices of writes with those of reads by the same engine, in the same direction."""
    for writes, _ in _bandwidths(host, p2p=True, access="write"):
        for reads, _ in _bandwidths(host, p2p=True, access="read", engine=writes.engine):
            if writes.engine is None or writes.direction == reads.direction:
                yield writes, reads
                break


def _collapsed(writes: Measurement, evidence: str, seen: float) -> Finding:
    return Finding(
        id="write-collapse",
        severity=WARNING,
        subject=writes.title,
        evidence=evidence,
        expected="writes about as fast as reads",
        seen=f"{seen:.2f} of it",
        remedy="use the pull protocol (Config.protocol='pull')",
        source=P2P_TEST if writes.engine is None else MEASURED,
    )


def slow_pair(case: Case) -> Outcome:
    """A pair that is far slower than the others has a bad link, or a longer way than its label."""
    host = case.host
    matrices = [
        (matrix, middle)
        for matrix, middle in _bandwidths(host, p2p=True, direction="unidirectional")
        if matrix.engine is not None
    ]
    if not matrices:
        return "no figures of pairs; measure them: pcie-comm topo --measure"
    found = []
    for matrix, middle in matrices:
        slow = {pair: value for pair, value in cells(matrix) if value < COLLAPSE * middle}
        if slow:
            worst = min(slow, key=lambda pair: slow[pair])
            found.append(
                Finding(
                    id="slow-pair",
                    severity=WARNING,
                    subject=", ".join("-".join(pair) for pair in sorted(slow)[:6]),
                    evidence=f"{matrix.title}: {'-'.join(worst)} {slow[worst]:g}",
                    expected=f"about the median of all pairs, {middle:g} GB/s",
                    seen=f"{len(slow)} pairs below half of it",
                    remedy="compare labels and links of these GPUs; keep them apart in groups",
                    source=MEASURED,
                )
            )
    return found

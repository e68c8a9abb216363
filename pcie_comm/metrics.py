"""What groups have counted, for Prometheus. Needs `pip install 'pcie_comm[prometheus]'`.

With a server of your own, register a StatsCollector with its registry; else `serve` starts one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

try:
    from prometheus_client import CollectorRegistry, generate_latest, start_http_server
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}; pcie_comm.metrics needs it: pip install 'pcie_comm[prometheus]'", name=error.name
    ) from error

from .errors import CommError
from .layout import CountLayout

if TYPE_CHECKING:
    from .group import PcieDcpGroup
    from .stats import ChannelStats, WaitStats

__all__ = ["StatsCollector", "render", "serve"]

_LABELS = ["channel", "rank"]
ALL_PEERS = "all"
"""Label `peer` of waits for all peers at once."""

_BOUNDS = [f"{2**bucket / 1e9:.9g}" for bucket in range(1, CountLayout.BUCKETS)]


class StatsCollector:
    """A collector of prometheus_client over the counters of groups; reads them at each scrape.

    A group that cannot be read, because it is closed or its device does not answer, has
    `pcie_comm_up` 0 and nothing else.

    Args:
        groups: With `Config.stats`; of one process, which may be several ranks.
    """

    def __init__(self, *groups: PcieDcpGroup) -> None:
        self._groups = groups

    def describe(self) -> Sequence[Any]:
        """Return nothing: so registering the collector reads no counter."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        up = GaugeMetricFamily(
            "pcie_comm_up", "Whether the counters could be read", labels=["rank"]
        )
        found: list[ChannelStats] = []
        for group in self._groups:
            try:
                found += group.stats().values()
                up.add_metric([str(group.rank)], 1)
            except CommError:
                up.add_metric([str(group.rank)], 0)
        yield up
        yield from _families(found)


def _families(found: Sequence[ChannelStats]) -> Iterator[Any]:
    ops = CounterMetricFamily("pcie_comm_ops", "Operations", labels=_LABELS)
    sent = CounterMetricFamily("pcie_comm_sent_bytes", "Bytes sent to peers", labels=_LABELS)
    labels = [*_LABELS, "peer"]
    waits = HistogramMetricFamily("pcie_comm_wait_seconds", "Waits for a peer", labels=labels)
    longest = GaugeMetricFamily("pcie_comm_wait_longest_seconds", "The longest", labels=labels)
    for stats in found:
        place = [stats.channel, str(stats.rank)]
        ops.add_metric(place, stats.ops)
        sent.add_metric(place, stats.sent_nbytes)
        each = [(str(one.peer), one.waits) for one in stats.peers]
        for peer, one in each or [(ALL_PEERS, stats.waits)]:
            waits.add_metric([*place, peer], _buckets(one), sum_value=one.total_ns / 1e9)
            longest.add_metric([*place, peer], one.longest_ns / 1e9)
    yield from (ops, sent, waits, longest)


def _buckets(waits: WaitStats) -> list[tuple[str, float]]:
    """Return upper bounds in seconds, and how many waits were below."""
    reached, below = 0, []
    for bound, count in zip([*_BOUNDS, "+Inf"], waits.histogram, strict=True):
        reached += count
        below.append((bound, float(reached)))
    return below


def _registry(groups: Sequence[PcieDcpGroup]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(StatsCollector(*groups))
    return registry


def render(*groups: PcieDcpGroup) -> str:
    """Return the counters of groups in Prometheus' text format."""
    text: bytes = generate_latest(_registry(groups))
    return text.decode()


def serve(*groups: PcieDcpGroup, port: int, address: str = "127.0.0.1") -> tuple[Any, Any]:
    """Answer scrapes with the counters of groups, from a daemon thread.

    There is no access control: whoever reaches the port reads the counters.

    Args:
        groups: As for StatsCollector; a rank's process serves a port of its own.
        port: TCP port; 0 takes a free one, see `server.server_port`.
        address: To listen at; this host alone by default.

    Returns:
        The server and its thread: `server.shutdown()`, then `thread.join()`, end it.
    """
    server, thread = start_http_server(port, address, registry=_registry(groups))
    return server, thread

"""The counters as Prometheus reads them."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request

import pytest
import torch

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry

from pcie_comm import Config, local_world
from pcie_comm.metrics import StatsCollector, render, serve

ROWS = torch.ones(1, 4)


@pytest.fixture
def world():
    with local_world(2, "cpu", config=Config(stats=True)) as opened:
        for _ in range(3):
            opened.run(lambda group: group.all_gather_pair(ROWS, ROWS))
        yield opened


def value(text: str, name: str, **labels: str) -> float:
    """Return the one sample of this name with these labels."""
    found = []
    for line, given, number in re.findall(r"^(\w+)\{(.*)\} (\S+)$", text, re.M):
        has = dict(re.findall(r'(\w+)="([^"]*)"', given))
        if line == name and labels.items() <= has.items():
            found.append(float(number))
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_text_has_what_stats_say(world):
    text = render(*world.groups)
    for group in world.groups:
        stats, rank = group.stats()["default"], str(group.rank)
        (peer,) = stats.peers
        place = {"channel": "default", "rank": rank}
        assert value(text, "pcie_comm_up", rank=rank) == 1
        assert value(text, "pcie_comm_ops_total", **place) == 3
        assert value(text, "pcie_comm_sent_bytes_total", **place) == stats.sent_nbytes
        place["peer"] = str(1 - group.rank)
        assert value(text, "pcie_comm_wait_seconds_count", **place) == 3
        total = value(text, "pcie_comm_wait_seconds_sum", **place)
        assert total == pytest.approx(peer.waits.total_ns / 1e9)
        assert value(text, "pcie_comm_wait_seconds_bucket", le="+Inf", **place) == 3
        longest = value(text, "pcie_comm_wait_longest_seconds", **place)
        assert longest == pytest.approx(peer.waits.longest_ns / 1e9)


def test_buckets_are_cumulative(world):
    lines = re.findall(r'_bucket\{.*le="([^"]+)".*rank="0"\} (\S+)', render(world.groups[0]))
    bounds, counts = zip(*((float(a), float(b)) for a, b in lines), strict=True)
    assert list(bounds) == sorted(bounds)
    assert list(counts) == sorted(counts)
    assert len(bounds) == 32


def test_a_closed_group_is_down_and_the_others_are_not(world):
    registry = CollectorRegistry()
    registry.register(StatsCollector(*world.groups))
    world.close()
    assert registry.get_sample_value("pcie_comm_up", {"rank": "0"}) == 0
    place = {"channel": "default", "rank": "0"}
    assert registry.get_sample_value("pcie_comm_ops_total", place) is None


def test_waits_for_all_at_once_have_no_peer():
    with local_world(2, "cpu", "torch_dist", Config(stats=True)) as opened:
        opened.run(lambda group: group.all_gather_pair(ROWS, ROWS))
        assert value(render(opened.groups[0]), "pcie_comm_wait_seconds_count", peer="all") == 1


def test_a_server_answers(world):
    server, thread = serve(*world.groups, port=0)
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
    assert value(text, "pcie_comm_ops_total", rank="1") == 3
    assert not thread.is_alive()


def test_without_the_extra_the_remedy_is_named():
    program = "import sys; sys.modules['prometheus_client'] = None; import pcie_comm.metrics"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert "pip install 'pcie_comm[prometheus]'" in ended.stderr

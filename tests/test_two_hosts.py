"""Ranks in two network namespaces, with a boot id and a /dev/shm each: two hosts to the library.

tests/test_hosts.py has more layouts and failures, with threads that say they are on several hosts.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.fixture(scope="module")
def two_hosts():
    spec = importlib.util.spec_from_file_location("two_hosts", TOOLS / "two_hosts.py")
    module = sys.modules["two_hosts"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        with module.two_networks():
            pass
    except module.UnavailableError as error:
        pytest.skip(f"no right to make network namespaces: {error}")
    return module


LAYOUTS = [
    "aab",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("aabb", "abab", "abbb")),
]


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_every_collective_gives_the_bytes_of_one_host(two_hosts, hosts):
    reports = two_hosts.run(hosts, ["--calls", "5"])
    for report in reports:
        members = [[r for r, name in enumerate(hosts) if name == host] for host in "ab"]
        assert report["described"]["hosts"] == members
        assert report["described"]["transport_reason"].startswith("the ranks are on 2 hosts")
        assert report["digest"] == report["flat"] == reports[0]["one_host"]
        assert report["digest"][0] > 50
        assert all(0 < row["across_us"] < row["us"] for row in report["times"])


FAULTS = [
    ("aabb", "kill", 3),
    pytest.param("abb", "kill", 0, marks=pytest.mark.slow),
    pytest.param("aab", "kill", 2, marks=pytest.mark.slow),
    pytest.param("aabb", "stop", 2, marks=pytest.mark.slow),
    pytest.param("abab", "abort", 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("hosts", "fault", "victim"), FAULTS)
def test_a_fault_on_one_host_ends_the_calls_on_both(two_hosts, hosts, fault, victim):
    """Every rank that lives has an error within the timeout of 5 s, and can close."""
    reports = two_hosts.run(hosts, ["--fault", fault, "--victim", str(victim)])
    seen = [report for rank, report in enumerate(reports) if rank != victim]
    kinds = {"kill": "PeerDiedError", "stop": "PeerTimeoutError", "abort": "PeerAbortedError"}
    for report in seen:
        assert report.get("error") in (kinds[fault], "PeerAbortedError"), reports
        assert report["elapsed_s"] < (7.5 if fault == "stop" else 4.0), reports
        assert report["close_s"] < 6.0, reports
    named = [r for r in seen if (r["error"], r["peer"]) == (kinds[fault], victim)]
    assert named, reports
    if hosts.count(hosts[victim]) > 1 and fault != "stop":  # its host's others saw it
        assert named == seen

"""Threads that take themselves for ranks on several hosts: what a process says of itself is faked.

The ways between "hosts" are real (gloo over loopback), the host is one. tests/test_two_hosts.py has
processes in network namespaces of their own.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from launcher import run_threads
from worlds import LIMIT_S, small

from pcie_comm import PcieDcpGroup
from pcie_comm.bootstrap import ThreadBootstrap
from pcie_comm.watch.process import Process

_here = threading.local()


def fake_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `build_on` place ranks; elsewhere a process stays what it is."""
    real = Process.here

    def here() -> Process:
        boot = getattr(_here, "boot", None)
        return real() if boot is None else dataclasses.replace(real(), boot=boot)

    monkeypatch.setattr(Process, "here", here)


def build_on(hosts: Sequence[str], **arguments: Any) -> list[Any]:
    """Build a group of one rank per entry, each on the host of that name.

    Returns each rank's group, or the exception that its constructor raised.
    """
    ends = ThreadBootstrap.create(len(hosts))

    def build(rank: int) -> PcieDcpGroup:
        _here.boot = hosts[rank]
        return PcieDcpGroup.from_bootstrap(
            ends[rank], **{"device": "cpu", "config": small(), **arguments}
        )

    return run_threads(build, len(hosts), timeout_s=2 * LIMIT_S)


def on_hosts(groups: Sequence[Any], hosts: Sequence[str], fn: Callable[[Any], Any]) -> list[Any]:
    """Call `fn(group)` on every rank at once, on its host; an exception is a rank's result."""

    def run(rank: int) -> Any:
        _here.boot = hosts[rank]
        return fn(groups[rank])

    return run_threads(run, len(groups), timeout_s=2 * LIMIT_S)

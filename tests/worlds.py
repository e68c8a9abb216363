"""Groups on the CPU for tests: built rank by rank, slowed down where it matters, looked into."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from launcher import run_threads

from pcie_comm import Config, PcieDcpGroup
from pcie_comm.bootstrap import ThreadBootstrap
from pcie_comm.host_engine import HostEngine

LIMIT_S = 20.0
"""Longest that anything in these tests waits for what must happen."""


def small(**settings: Any) -> Config:
    """Return settings for quick tests: little memory, limits that a loaded machine keeps."""
    return Config(
        **{"timeout_s": 10.0, "setup_timeout_s": LIMIT_S, "slot_nbytes": 1 << 16, **settings}
    )


def build_each(arguments: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Build a group of as many ranks as there are arguments, each rank with its own.

    Returns each rank's group, or the exception that its constructor raised.
    """
    ends = ThreadBootstrap.create(len(arguments))

    def build(rank: int) -> PcieDcpGroup:
        own = {"device": "cpu", "config": small(), **arguments[rank]}
        return PcieDcpGroup.from_bootstrap(ends[rank], **own)

    return run_threads(build, len(arguments), timeout_s=2 * LIMIT_S)


def on_each(groups: Sequence[Any], fn: Callable[[Any], Any]) -> list[Any]:
    """Call `fn(group)` on every rank at once; an exception is a rank's result."""
    return run_threads(lambda rank: fn(groups[rank]), len(groups), timeout_s=2 * LIMIT_S)


def close_each(groups: Sequence[Any]) -> None:
    assert on_each(groups, lambda group: group.close()) == [None] * len(groups)


def engine_of(lane: Any) -> HostEngine:
    """Return what runs the calls of a channel, or of a group's own channel."""
    channel = lane._channels["default"] if isinstance(lane, PcieDcpGroup) else lane
    return channel.engine


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's bytes, row by row: NaN payloads included."""
    dense = tensor.detach().clone(memory_format=torch.contiguous_format)
    raw = dense.reshape(-1).view(torch.uint8).numpy()
    return raw.reshape(len(tensor), -1) if len(tensor) else raw.reshape(0, 0)


def pair_of(value: float, width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs of all_gather_pair that hold one value."""
    return torch.full((1, width), value), torch.full((1, width), -value)


class Held:
    """A point that a thread waits at until another opens it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def open(self) -> None:
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(LIMIT_S), "nobody opened the gate"


Hook = Callable[[HostEngine], None]


def hook_waits(
    monkeypatch: pytest.MonkeyPatch, *, before: Hook | None = None, after: Hook | None = None
) -> None:
    """Call hooks around every wait: between staging and waiting, between waiting and reading."""
    wait = HostEngine._await_all

    def hooked(engine: HostEngine, *arguments: Any) -> None:
        if before is not None:
            before(engine)
        wait(engine, *arguments)
        if after is not None:
            after(engine)

    monkeypatch.setattr(HostEngine, "_await_all", hooked)

"""Hosts with what a probe would have found: figures depend on GPUs, whatever they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pcie_comm.topology.model import ANY, Gap, Host, Link, Measurement
from pcie_comm.topology.probed import (
    COPY_ENGINE,
    HOST,
    OK,
    PINNED,
    SM,
    TWO_ROOTS,
    UPLINK,
    VRAM,
    Check,
    Exchange,
    ExchangePoint,
    Flow,
    Ladder,
    LadderPoint,
    LinkLoad,
    Pattern,
)

NONE = {ANY: "a test"}
CHECKS = ("store", "load", "litmus push")
Rate = Callable[[int, int], float]


def number(host: Host, name: str) -> int:
    """Return what stays with a GPU however it is called: the number in its UUID."""
    gpu = next(gpu for gpu in host.gpus or () if gpu.name == name)
    return int((gpu.uuid or "0").rsplit("-", 1)[1], 16)


def same_switch(one: int, other: int) -> float:
    """GB/s of GPUs that come in pairs."""
    return 50.0 if one // 2 == other // 2 else 20.0


def matrix(host: Host, rate: Rate, **facts) -> Measurement:
    names = tuple(gpu.name for gpu in host.gpus or ())
    numbers = {name: number(host, name) for name in names}
    cells = tuple(tuple(rate(numbers[a], numbers[b]) for b in names) for a in names)
    usual = {
        "title": "a matrix",
        "unit": "GB/s",
        "p2p": True,
        "direction": "unidirectional",
        "access": "write",
        "engine": SM,
        "nbytes": 1024,
    }
    return Measurement(rows=names, columns=names, cells=cells, unknown=NONE, **{**usual, **facts})


def exchange(source: str, target: str, memory: str, us: float) -> Exchange:
    points = tuple(
        ExchangePoint(
            nbytes, pull_us=us * 3, push_us=us + nbytes / 1e5, tagged_us=us * 0.8 + nbytes / 5e4
        )
        for nbytes in (8192, 65_536, 1 << 20)
    )
    return Exchange(source, target, memory, points)


def probed(host: Host, rate: Rate = same_switch, delay: Rate | None = None) -> Host:
    """Return a host that was verified and measured, and in which all is well."""
    names = [gpu.name for gpu in host.gpus or ()]
    delays = delay or (lambda one, other: 1.0 + (one // 2 != other // 2))
    pairs = [(a, b) for a in names for b in names]
    ways = [(a, b, name) for a, b in (*pairs, *((a, HOST) for a in names)) for name in CHECKS]
    ends = [(a, b) for a, b in pairs if number(host, a) <= number(host, b)]
    flows = tuple(Flow(a, HOST, gbps=30.0, alone_gbps=32.0) for a in names[:2])
    link = Link(32.0, 32.0, 16, 16)
    return replace(
        host,
        measurements=(
            matrix(host, rate, title="writes"),
            matrix(host, rate, title="reads", access="read"),
            matrix(host, rate, title="copies", engine=COPY_ENGINE),
            matrix(host, lambda a, b: 15.0, title="staged", engine=COPY_ENGINE, p2p=False),
            replace(
                matrix(host, delays, title="delays", unit="us", access="read"),
                gaps=tuple(Gap(name, name, "the same") for name in names),
            ),
        ),
        checks=tuple(Check(*way, OK, rounds=10) for way in ways),
        exchanges=tuple(
            exchange(a, b, memory, us)
            for a, b in ends
            for memory, us in ((VRAM, 2.0), (PINNED, 4.0))
        ),
        ladders=tuple(Ladder(a, HOST, SM, "write", (LadderPoint(16, 3.0),)) for a in names),
        patterns=(
            Pattern(UPLINK, "0000:01:00.0", "write", flows, 60.0),
            Pattern(TWO_ROOTS, "0000:01:00.0", "write", flows, 62.0),
            Pattern("one to all", "", "read", unknown=NONE),
        ),
        loads=tuple(LinkLoad(name, link, link, 0, {}) for name in names),
    )


def spoilt(host: Host, source: str, target: str, verdict: str, name: str = "store") -> Host:
    """Return a host in which one check found something."""
    checks = tuple(
        replace(check, verdict=verdict, detail="3 of 9 words")
        if (check.source, check.target, check.name) == (source, target, name)
        else check
        for check in host.checks
    )
    return replace(host, checks=checks)

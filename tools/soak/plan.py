"""Which parts a soak has, and how their results become one report. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONTROLS = ("one_slot", "early_flag")
CONTROL_S = 20.0
"""Longest that a control may take to be caught, in seconds."""


@dataclass(frozen=True)
class Part:
    """One world under one protocol.

    Attributes:
        world_size: Number of ranks.
        protocol: Of the group.
        where: `threads` or `processes`; on a GPU `cuda_local` or `host_pinned`.
        kernels: On a GPU: variant of kernels.py, or empty for the library's own.
        control: Fault that must be found, or empty.
        overlap: Captured launches overlap.
    """

    world_size: int
    protocol: str
    where: str
    kernels: str = ""
    control: str = ""
    overlap: bool = False


def cpu_parts(worlds: Sequence[int], where: str, controls: bool) -> list[Part]:
    """Return the parts of a soak on the CPU, controls first."""
    protocols = ("push", "pull")
    faults = [
        Part(worlds[0], protocol, where, control=control)
        for control in CONTROLS
        for protocol in protocols
    ]
    return (faults if controls else []) + [
        Part(world, protocol, where) for world in worlds for protocol in protocols
    ]


def gpu_parts(worlds: Sequence[int], has_kernels: bool, controls: bool) -> list[Part]:
    """Return the parts of a soak on a GPU, controls first: every protocol, memory and kernel."""
    parts = []
    if controls and has_kernels:
        parts = [
            Part(worlds[0], protocol, "cuda_local", kernels=control, control=control)
            for control in CONTROLS
            for protocol in ("push", "pull", "tagged")
        ]
    turn = 0
    for kernels in ("", "delay") if has_kernels else ("",):
        for where in ("cuda_local", "host_pinned"):
            for protocol in ("tagged", "push", "pull", "auto"):
                world = worlds[turn % len(worlds)]
                parts.append(Part(world, protocol, where, kernels, overlap=turn % 3 == 2))
                turn += 1
    return parts


def verdict(part: Part, result: dict[str, Any]) -> str:
    """Return `ok`, or what is wrong; a control is ok once it was caught.

    Under tagged push a single slot shows as a timeout: the awaited tag was overwritten.
    """
    timed_out = "PeerTimeoutError" in (result["failure"] or "")
    if part.control:
        caught = result["mismatches"] or (part.protocol == "tagged" and timed_out)
        return "ok" if caught else "a control was not caught"
    if result["failure"]:
        return "failed"
    return "ok" if result["calls"] and not result["mismatches"] else "wrong bytes"


def total(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over all parts that are no controls, and whether all parts went well."""
    soaked = [one for one in results if not one["control"]]
    calls, seconds = sum(one["calls"] for one in soaked), sum(one["seconds"] for one in soaked)
    return {
        "good": bool(results) and all(one["verdict"] == "ok" for one in results),
        "calls": calls,
        "mismatches": sum(one["mismatches"] for one in soaked),
        "calls_per_s": round(calls / seconds) if seconds else 0,
        "controls_caught": sum(one["verdict"] == "ok" for one in results if one["control"]),
        "controls": sum(bool(one["control"]) for one in results),
    }

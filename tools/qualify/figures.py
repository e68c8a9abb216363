"""What ranks have found, put together: counts of checked calls, medians and ratios. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

OURS = "ours"
CASE = ("op", "rows", "protocol", "mode")


def counts(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of every case over all ranks, and the sums of all cases."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    digests: dict[tuple[Any, ...], set[int]] = {}
    for line in lines:
        key = tuple(line[name] for name in CASE)
        blank = dict(zip(CASE, key, strict=True))
        case = found.setdefault(key, {**blank, "ranks": 0, "calls": 0, "mismatches": 0})
        case["ranks"] += 1
        case["calls"] += line["calls"]
        case["mismatches"] += line["mismatches"]
        digests.setdefault(key, set()).add(line["digest"])
    return {
        "calls": sum(case["calls"] for case in found.values()),
        "mismatches": sum(case["mismatches"] for case in found.values()),
        "drawn_alike": all(len(some) == 1 for some in digests.values()),
        "cases": list(found.values()),
    }


def latencies(lines: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Return the cases that all ranks have measured, with medians, ratios and samples in us."""
    by_case: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in lines:
        by_case.setdefault((line["op"], line["rows"]), []).append(line)
    found = []
    for (op, rows), parts in by_case.items():
        if len(parts) < world_size or not parts[0]["contenders"]:
            continue
        sides = [
            _side(places) for places in zip(*(part["contenders"] for part in parts), strict=True)
        ]
        ours = sides[0]["median_us"]
        for side in sides[1:]:
            side["ratio"] = {
                "of": side["name"],
                "to": OURS,
                "time": round(side["median_us"] / ours, 3),
            }
        found.append({"op": op, "rows": rows, "contenders": sides})
    return found


def _side(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one contender of a case over all ranks."""
    by_rank = [[round(value / 1000, 3) for value in part["samples_ns"]] for part in parts]
    slowest = [max(values) for values in zip(*by_rank, strict=True)]
    faults = [fault for part in parts for fault in part["faults"]]
    return {
        "name": parts[0]["name"],
        "median_us": round(statistics.median(slowest), 3),
        "min_us": min(slowest),
        "max_us": max(slowest),
        "correct": not faults,
        "faults": faults[:4],
        "samples_us": slowest,
        "samples_by_rank_us": by_rank,
    }

"""Times the operations with bounded waits, or counters, beside the same without, in turns."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pcie_comm import CommError, Config, local_world
from pcie_comm.bench import contenders, workload
from pcie_comm.bench.case import blank_row, measure
from pcie_comm.bench.measure import GraphStage, Lanes
from pcie_comm.bench.options import TRANSPORTS, VRAM
from pcie_comm.bench.report import Row
from pcie_comm.bench.worlds import TIMEOUT_S, Worlds, slot_nbytes
from pcie_comm.local import LocalWorld

ON, OFF = " on", " off"
OVERLAPPING = ", overlapping"


@dataclass(frozen=True)
class Setting:
    """What is compared.

    Attributes:
        subject: `bounds`, or `stats`.
        ranks: World size; all on `device`.
        operations: Names.
        rows: Of a call.
        protocol: Of the groups.
        samples, ops: Timed replays of each side, and operations of each rank in one.
        kernels: Folder of the kernels without bounds; of both sides for `stats`, or None.
    """

    subject: str
    ranks: int
    operations: tuple[str, ...]
    rows: int
    protocol: str
    samples: int
    ops: int
    kernels: Path | None
    device: str = "cuda:0"


def run(setting: Setting) -> list[Row]:
    """Compare in a world of one size; return the rows, outputs checked before and after.

    Raises:
        CommError: A call gave up, or a kernel is not the one that was meant.
    """
    rows = []
    with _worlds(setting) as worlds:
        one = next(iter(worlds.values()))
        devices = [group.device for group in one.groups]
        lanes = Lanes(devices)
        for op in setting.operations:
            work = workload.make(op, setting.rows, devices)
            sides = [
                contenders.one_launch(name, setting.protocol, world, work)
                for name, world in worlds.items()
            ]
            _check_kernels(setting, worlds)
            template = blank_row(work, Worlds(VRAM, {setting.protocol: one}))
            stage = GraphStage(lanes, setting.ops)
            rows += measure(stage, work, sides, setting.samples, template)
    return rows


@contextlib.contextmanager
def _worlds(setting: Setting) -> Iterator[dict[str, LocalWorld]]:
    """Open a world with the subject and one without, plain and overlapping."""
    with contextlib.ExitStack() as stack:
        worlds = {}
        for overlap in (False, True):
            config = Config(
                timeout_s=TIMEOUT_S,
                protocol=setting.protocol,
                overlap=overlap,
                slot_nbytes=slot_nbytes(setting.rows, setting.ranks),
                max_rows=setting.rows,
            )
            for side, own in _sides(setting, config).items():
                opened = local_world(setting.ranks, setting.device, TRANSPORTS[VRAM], own)
                name = setting.subject + side + OVERLAPPING * overlap
                worlds[name] = stack.enter_context(opened)
        yield worlds


def _sides(setting: Setting, config: Config) -> dict[str, Config]:
    """Return the settings of both sides."""
    if setting.subject == "bounds":
        return {ON: config, OFF: replace(config, kernels_dir=setting.kernels)}
    folder = setting.kernels or config.kernels_dir
    return {side: replace(config, kernels_dir=folder, stats=side == ON) for side in (ON, OFF)}


def _check_kernels(setting: Setting, worlds: Mapping[str, LocalWorld]) -> None:
    """Check that each side has the kernels that were meant."""
    if setting.subject == "bounds":
        _check_sources(worlds)
        return
    for name, world in worlds.items():
        kernels: Any = world.groups[0].describe()["kernels"]
        if {key.endswith("-stats") for key in kernels} != {ON in name}:
            raise CommError(f"{name}: the kernels are {sorted(kernels)}")


def _check_sources(worlds: Mapping[str, LocalWorld]) -> None:
    """Check that worlds without bounds have their kernels from their folder, and the others not."""
    groups = {name: world.groups[0] for name, world in worlds.items()}
    folder = groups["bounds" + OFF].config.kernels_dir
    for name, group in groups.items():
        found: Any = group.describe()["kernels"]
        theirs = {source == f"ahead of time, {folder}" for source in found.values()}
        if theirs != {OFF in name}:
            raise CommError(f"{name}: kernels come from {sorted(set(found.values()))}")


def comparisons(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Compare each side that is on with the other: medians, and sample by sample."""
    sides = {(row.case, row.contender): row for row in rows}
    found = []
    for (case, name), on in sides.items():
        if ON not in name:
            continue
        off = sides[case, name.replace(ON, OFF)]
        each = [a / b for a, b in zip(on.samples_ns, off.samples_ns, strict=True)]
        found.append(
            {
                "op": on.op,
                "ranks": on.ranks,
                "rows": on.rows,
                "memory": on.memory,
                "protocol": on.protocol,
                "overlapping": name.endswith(OVERLAPPING),
                "on_us": _spread([sample / 1e3 for sample in on.samples_ns]),
                "off_us": _spread([sample / 1e3 for sample in off.samples_ns]),
                "ratio_of_medians": round(on.median_us / off.median_us, 4),
                "ratio_per_sample": _spread(each),
                "correct": on.correct and off.correct,
            }
        )
    return found


def direction(subject: str) -> str:
    """Return how to read a ratio."""
    return f"ratio = time with {subject} / time without; 1.01: {subject} cost 1 %"


def _spread(values: Sequence[float]) -> dict[str, float]:
    figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in figures.items()}


def line(found: dict[str, Any]) -> str:
    """Return a comparison in one line."""
    times = (
        f"{found[side]['median']:.3f} us ({found[side]['min']:.3f} to {found[side]['max']:.3f})"
        for side in ("on_us", "off_us")
    )
    overlapping = OVERLAPPING * found["overlapping"]
    verdict = "right" if found["correct"] else "WRONG"
    return (
        f"{found['op']}, ranks={found['ranks']}{overlapping}: on {next(times)}, off {next(times)}, "
        f"ratio {found['ratio_of_medians']:.3f}, {verdict}"
    )

"""Checks of plans. No rank runs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..kernels.collective import Plan
from ..kernels.plan_checks import check_plan, variants_of
from ..layout import MAX_BLOCKS
from ..tensors import torch_dtype
from .subject import Subject

PROTOCOLS = ("push", "pull", "tagged", "auto")
PLAIN = (str, int, float, bool, type(None))


def every_plan(subject: Subject) -> Iterator[tuple[str, list[Plan], list[Plan]]]:
    """Yield, for each case, its name, the ranks' plans, and the same asked for again."""
    for world_size, rows in subject.cases():
        inputs = subject.make(world_size, rows)
        for protocol in PROTOCOLS:
            for blocks in (2, MAX_BLOCKS):
                infos = [subject.info(r, world_size, protocol, blocks) for r in range(world_size)]
                plans, again = (
                    [subject.plan(info, inputs[info.rank]) for info in infos] for _ in range(2)
                )
                for plan, info in zip(plans, infos, strict=True):
                    check_plan(subject.plugin, plan, info, plan.staged_nbytes)
                name = f"world_size={world_size}, rows={rows}, protocol={protocol}"
                yield f"{name}, max_blocks={blocks}", plans, again


def plans_are_pure_and_alike(subject: Subject) -> None:
    """The same question gets the same plan, and all ranks get plans that match."""
    for name, plans, again in every_plan(subject):
        for rank, plan in enumerate(plans):
            if plan != again[rank]:
                subject.fail(f"plan() is not pure, {name}: {plan} and {again[rank]}")
            if plan.signature != plans[0].signature:
                subject.fail(f"plans of rank 0 and {rank} differ, {name}: {plans[0]} and {plan}")
        if not _is_plain(plans[0].facts):
            subject.fail(
                f"facts={plans[0].facts!r} are compared by their text, in other processes too; use "
                "tuples of strings and numbers alone"
            )


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def variants_cover_every_plan(subject: Subject) -> None:
    """Every kernel that a plan asks for is one that `prepare` and `pcie-comm compile` build."""
    keys = set(variants_of(subject.plugin))
    for name, plans, _ in every_plan(subject):
        missing = {str(plan.kernel) for plan in plans if plan.kernel not in keys}
        if missing:
            subject.fail(f"plan() asks for kernels={missing}, not in variants(); {name}")


def outputs_are_those_of_the_reference(subject: Subject) -> None:
    """Number, shapes and dtypes that a plan promises are those that the reference returns."""
    for world_size, rows in subject.cases():
        inputs = subject.make(world_size, rows)
        for rank in range(world_size):
            plan = subject.plan(subject.info(rank, world_size, "push"), inputs[rank])
            results = subject.plugin.reference_for(rank, inputs)
            planned = [(one.shape, torch_dtype(one.dtype)) for one in plan.outputs]
            returned = [(tuple(one.shape), one.dtype) for one in results]
            if planned != returned:
                subject.fail(
                    f"planned={planned}, returned={returned}; world_size={world_size}, "
                    f"rows={rows}, rank={rank}"
                )
            if rows and not sum(math.prod(shape) for shape, _ in returned):
                subject.fail(f"nothing is returned for rows={rows}: the example shows nothing")

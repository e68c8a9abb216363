"""One case: its contenders timed in turns, their outputs checked before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .cold import ColdStage
from .contenders import NO_PROTOCOL, Contender
from .measure import Stage, Take, take_turns
from .options import ROUTER, VRAM
from .report import COLD, EVICTION, WARM, Row
from .workload import Workload, poison
from .worlds import Worlds


def blank_row(work: Workload, worlds: Worlds) -> Row:
    """Return a row of a case without its figures."""
    memory = worlds.memory
    if work.op == ROUTER and work.devices[0].type == "cuda":
        memory = VRAM  # it uses no slab
    return Row(
        op=work.op,
        ranks=work.world_size,
        rows=work.rows,
        memory=memory,
        protocol=NO_PROTOCOL,
        contender="",
        cache=WARM,
        received_nbytes=work.received_nbytes(),
        sharers=worlds.sharers,
        samples_ns=(),
    )


def measure(
    stage: Stage, work: Workload, sides: Sequence[Contender], samples: int, template: Row
) -> list[Row]:
    """Time the contenders of a case in turns; check their outputs before and after.

    Args:
        stage: Where they run.
        work: Inputs and right outputs.
        sides: The contenders.
        samples: Of each contender.
        template: Row that holds the case.

    Returns:
        A row per contender; of cold samples one more, of the eviction alone.

    Raises:
        CommError: A call gave up.
    """
    for side in sides:
        stage.warm_up(side.local)
    takes = [stage.take_of(side.enqueue) for side in sides]
    before = [_checked(stage, work, side, take) for side, take in zip(sides, takes, strict=True)]
    for side in sides:
        poison(side.outputs)
    cold = isinstance(stage, ColdStage)
    if isinstance(stage, ColdStage):
        takes.append(stage.take_of_eviction())
    stage.settle()
    stage.spin()
    taken = take_turns(takes, samples)
    stage.settle()
    template = replace(template, cache=COLD if cold else WARM)
    evictions = taken.pop() if cold else [0.0] * samples
    rows = []
    for side, values, faults in zip(sides, taken, before, strict=True):
        for group in side.groups:
            group.check()
        own = (value - eviction for value, eviction in zip(values, evictions, strict=True))
        rows.append(
            replace(
                template,
                contender=side.name,
                protocol=side.protocol,
                samples_ns=tuple(map(round, own)),
                faults_before=tuple(faults),
                faults_after=tuple(_faults(work, side)),
            )
        )
    if cold:
        alone = tuple(map(round, evictions))
        rows.append(replace(template, contender=EVICTION, samples_ns=alone))
    return rows


def _faults(work: Workload, side: Contender) -> list[str]:
    return work.faults(side.outputs, side.ours) if side.outputs else []


def _checked(stage: Stage, work: Workload, side: Contender, take: Take) -> list[str]:
    """Poison a contender's outputs, run it once, and say what is wrong with them."""
    poison(side.outputs)
    stage.settle()
    take()
    stage.settle()
    return _faults(work, side)

"""A call that is larger than a slot, as several launches over rows, or columns, of its tensors.

All follows from shapes that every rank shares, so all ranks cut alike: as many rows a launch as its
bytes fit; where a single row does not, columns of a row. Pieces are views: addresses move on, no
byte is copied for it. Each gets the protocol of its own size. The plan of every piece names the
whole call in its facts, so ranks that disagree notice it in the first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import UnsupportedError
from ..tensors import torch_dtype
from .collective import Collective, OutputSpec, Plan, PlanInfo, TensorMeta
from .columns import row_nbytes, stride_nbytes
from .plan_checks import check_plan, make_plan
from .registry import find

MOST_ROWS = 1 << 31
"""More than any call has: the rows of a collective that can be cut are limited by nothing."""


@dataclass(frozen=True)
class Piece:
    """One launch of a call.

    Attributes:
        plan: Of the launch.
        offsets: Per input, then per output of the launch, where it begins, in bytes from the
            address of a tensor of the call.
        tensors: Which of the call's inputs and outputs those are; empty: all, in order.
    """

    plan: Plan
    offsets: tuple[int, ...]
    tensors: tuple[int, ...] = ()

    def addresses(self, of_call: Sequence[int]) -> list[int]:
        """Return the launch's addresses, given those of the call."""
        bases = [of_call[index] for index in self.tensors] if self.tensors else of_call
        return [base + offset for base, offset in zip(bases, self.offsets, strict=True)]


def owner_of(collective: Collective, plan: Plan) -> Collective:
    """Return the plugin whose kernel a launch of a call of `collective` runs."""
    op = plan.kernel.op
    return collective if op == collective.name else find(op)


def any_rows(collective: Collective, info: PlanInfo) -> PlanInfo:
    """Return `info` without a limit to rows, for a collective that can be cut."""
    return replace(info, max_rows=MOST_ROWS) if collective.row_inputs else info


def plan_call(
    collective: Collective, info: PlanInfo, tensors: Sequence[TensorMeta]
) -> tuple[Plan, tuple[Piece, ...]]:
    """Plan a call whose bytes go through slots.

    Returns:
        The plan of the whole call; and its launches, none if the plan itself is the launch.

    Raises:
        InvalidArgumentError: An input is wrong, or what cannot be cut does not fit a slot.
        UnsupportedError: The plan does not fit its channel.
    """
    info = any_rows(collective, info)
    plan = make_plan(collective, info, tensors)
    pieces = collective.plan_pieces(info, *tensors)
    if pieces is None:
        fits = not plan.exchanged or plan.staged_nbytes <= info.segment_nbytes
        if fits or not collective.row_inputs:
            check_plan(collective, plan, info, plan.staged_nbytes)  # raises if it does not fit
            return plan, ()
        pieces = tuple(_pieces(collective, info, tensors, plan))
    whole = ("of", plan.staged_nbytes, *plan.facts)
    named = {id(one.plan): _named(one.plan, whole) for one in pieces}
    return plan, tuple(replace(one, plan=named[id(one.plan)]) for one in pieces)


def _named(plan: Plan, whole: tuple[object, ...]) -> Plan:
    return replace(plan, facts=(*plan.facts, *whole))


def _pieces(
    collective: Collective, info: PlanInfo, tensors: Sequence[TensorMeta], whole: Plan
) -> Iterator[Piece]:
    """Yield the launches of a call that does not fit, in order."""
    total = tensors[collective.row_inputs[0]].shape[0]
    steps = _row_steps(collective, tensors, whole.outputs)
    rows, plan = total, whole
    while plan.staged_nbytes > info.segment_nbytes:
        if rows <= 1:
            yield from _column_pieces(collective, info, tensors, total, steps)
            return
        rows = max(1, min(rows - 1, rows * info.segment_nbytes // plan.staged_nbytes))
        plan = _plan_rows(collective, info, tensors, rows, [rows * step for step in steps])
    check_plan(collective, plan, info, plan.staged_nbytes)
    moves = [rows * step for step in steps]
    for first in range(0, total - total % rows, rows):
        yield Piece(plan, tuple(first * step for step in steps))
    if rest := total % rows:
        plan = _plan_rows(collective, info, tensors, rest, moves)
        yield Piece(plan, tuple((total - rest) * step for step in steps))


def _row_steps(
    collective: Collective, tensors: Sequence[TensorMeta], outputs: Sequence[OutputSpec]
) -> list[int]:
    """Return how far two rows are apart, in bytes, of each input and output; 0: it has no rows."""
    steps = [
        stride_nbytes(meta) if index in collective.row_inputs else 0
        for index, meta in enumerate(tensors)
    ]
    return steps + [_row_of(output) for output in outputs]


def _row_of(output: OutputSpec) -> int:
    return math.prod(output.shape[1:]) * torch_dtype(output.dtype).itemsize


def _plan_rows(
    collective: Collective,
    info: PlanInfo,
    tensors: Sequence[TensorMeta],
    rows: int,
    moves: Sequence[int],
) -> Plan:
    """Plan a launch of some rows that begins any multiple of `moves` bytes behind the tensors."""
    info = replace(info, output_alignment=_aligned_to(info, moves[len(tensors) :]))
    return make_plan(collective, info, _narrowed(collective, tensors, rows, moves))


def _narrowed(
    collective: Collective, tensors: Sequence[TensorMeta], rows: int, moves: Sequence[int]
) -> list[TensorMeta]:
    """Return the inputs of a launch of some rows; see _plan_rows."""
    metas = list(tensors)
    for index in collective.row_inputs:
        meta = tensors[index]
        shape, alignment = (rows, *meta.shape[1:]), aligned(meta.alignment, moves[index])
        metas[index] = replace(meta, shape=shape, alignment=alignment)
    return metas


def _aligned_to(info: PlanInfo, moves: Sequence[int]) -> int:
    return min([info.output_alignment, *(aligned(16, move) for move in moves)])


def aligned(alignment: int, move: int) -> int:
    """Return the alignment of an address after a move by any multiple of `move` bytes."""
    return min(alignment, move & -move) if move else alignment


def _column_pieces(
    collective: Collective,
    info: PlanInfo,
    tensors: Sequence[TensorMeta],
    rows: int,
    steps: Sequence[int],
) -> Iterator[Piece]:
    """Yield the launches of rows of which a single one does not fit.

    Raises:
        InvalidArgumentError: The collective cannot cut a row.
    """
    outs = steps[len(tensors) :] if rows > 1 else []
    info = replace(info, output_alignment=_aligned_to(info, outs))
    metas = _narrowed(collective, tensors, 1, steps if rows > 1 else [0] * len(steps))
    plan = make_plan(collective, info, metas)
    parts = -(-plan.staged_nbytes // info.segment_nbytes)
    first = collective.plan_columns(info, 0, parts, *metas)
    while first is not None and first[0].staged_nbytes > info.segment_nbytes:
        fewer, parts = parts, parts + -(-parts // 16)
        _check_parts(collective, parts, metas)
        first = collective.plan_columns(info, 0, parts, *metas)
        while first is None and parts > fewer + 1:  # too many; some number between may do
            parts -= 1
            first = collective.plan_columns(info, 0, parts, *metas)
    if first is None:
        check_plan(collective, plan, info, plan.staged_nbytes)  # raises
    plans: dict[Plan, Plan] = {}
    found = []
    for part in range(parts):
        cut = collective.plan_columns(info, part, parts, *metas)
        if cut is not None:
            found.append(Piece(plans.setdefault(cut[0], cut[0]), cut[1]))
    for plan in plans:
        check_plan(collective, plan, info, plan.staged_nbytes)
    for row in range(rows):
        for piece in found:
            offsets = zip(piece.offsets, steps, strict=True)
            yield Piece(piece.plan, tuple(place + row * step for place, step in offsets))


def _check_parts(collective: Collective, parts: int, metas: Sequence[TensorMeta]) -> None:
    """Raise if a row is cut finer than it has bytes: what is staged does not shrink with it."""
    if parts > sum(map(row_nbytes, metas)):
        raise UnsupportedError(
            f"{collective.name} does not fit a slot, however it is cut; raise Config.slot_nbytes "
            "on every rank",
            reason="a slot is too small",
            op=collective.name,
        )

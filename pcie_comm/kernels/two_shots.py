"""A large sum, in two shots: every rank sums a part, then all gather the parts.

In one shot a rank gets W - 1 times the tensor from its peers; in two shots 2 * (W - 1) / W times.
The launches are those of reduce_scatter and all_gather, pair by pair, and the first of a pair
writes where the second one reads: to the rank's part of the output. Numbers are added in the same
order and rounded once in both ways, so the bytes are the same.

A pair covers whole rows, as many for each rank; its parts are ranges of rows, so rows may be
strided, on any rank. Rows that are too large, or fewer than ranks, are covered one by one: then
parts are ranges of columns. What is left over, less than a row or 16 bytes for each rank, is summed
in one shot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ..layout import STAGED_ALIGNMENT
from ..policy import protocols_of
from .collective import Collective, Plan, PlanInfo, TensorMeta
from .columns import row_nbytes, stride_nbytes
from .pieces import Piece, aligned
from .reductions import Parts, plan_reduction
from .registry import find

SUM, GATHER = "reduce_scatter", "all_gather"
PACK = 16
"""Parts of a row are multiples of so many bytes, whatever packs a rank's addresses allow."""


def two_shots(collective: Collective, info: PlanInfo, local: TensorMeta) -> Iterator[Piece]:
    """Yield the launches of a sum, in order.

    Args:
        collective: The sum in one shot, for what is left over.
        info: Of the group.
        local: The input; the output is contiguous and of the same shape.
    """
    rows, size, stride = local.shape[0], row_nbytes(local), stride_nbytes(local)
    if rows > 1:
        info = replace(info, output_alignment=aligned(info.output_alignment, size))
        local = replace(local, alignment=aligned(local.alignment, stride))
    if rows < info.world_size or size > _most(info):
        of_row = list(_row(collective, info, local))
        for row in range(rows):
            yield from (_moved(piece, row * stride, row * size) for piece in of_row)
        return
    for piece, row in _rows(collective, info, local):
        yield _moved(piece, row * stride, row * size)


def _most(info: PlanInfo) -> int:
    """Return how many bytes a rank may sum in a launch: under pull it stages as many per rank."""
    pulls = "pull" in protocols_of(info.protocol, info.limits)
    parts = info.world_size if pulls else 1
    return info.segment_nbytes // parts // STAGED_ALIGNMENT * STAGED_ALIGNMENT


def _rows(collective: Collective, info: PlanInfo, local: TensorMeta) -> Iterator[tuple[Piece, int]]:
    """Yield launches over rows, and the row where each begins."""
    rows, size, world = local.shape[0], row_nbytes(local), info.world_size
    pairs = _Pairs(collective.name, info)
    done = 0
    while count := min(_most(info) // size, (rows - done) // world):
        part = replace(local, shape=(count, *local.shape[1:]))
        for piece in pairs.of(part, count * stride_nbytes(local)):
            yield piece, done
        done += count * world
    while count := min(info.segment_nbytes // size, rows - done):
        plan = collective.plan(info, replace(local, shape=(count, *local.shape[1:])))
        yield Piece(plan, (0, 0)), done
        done += count


def _row(collective: Collective, info: PlanInfo, local: TensorMeta) -> Iterator[Piece]:
    """Yield the launches of the first row."""
    size, world = row_nbytes(local), info.world_size
    pairs = _Pairs(collective.name, info)
    done = 0
    while part := min(_most(info), (size - done) // world // PACK * PACK):
        for piece in pairs.of(_flat(local, part), part):
            yield _moved(piece, done, done)
        done += part * world
    if rest := size - done:
        yield Piece(collective.plan(info, _flat(local, rest)), (done, done))


def _flat(row: TensorMeta, nbytes: int) -> TensorMeta:
    """Return a part of a row, as a row."""
    numbers = nbytes // row.itemsize
    return replace(row, shape=(1, numbers), strides=(numbers, 1))


def _moved(piece: Piece, source: int, output: int) -> Piece:
    """Return a launch that begins further on."""
    moves = [(source, output)[index] for index in piece.tensors or (0, 1)]
    return replace(piece, offsets=tuple(map(sum, zip(piece.offsets, moves, strict=True))))


class _Pairs:
    """Plans pairs of launches; each pair of plans once, so that launches share their arguments."""

    def __init__(self, op: str, info: PlanInfo) -> None:
        self._op, self._info = op, info
        self._known: dict[tuple[TensorMeta, int], tuple[Plan, Plan]] = {}

    def of(self, part: TensorMeta, apart: int) -> Iterator[Piece]:
        """Yield the two launches of a range of the tensor.

        Args:
            part: What a rank sums: the first rank's.
            apart: How far the parts of two ranks are apart in the input, in bytes.
        """
        if (part, apart) not in self._known:
            self._known[part, apart] = self._plan(part, apart)
        summed, gathered = self._known[part, apart]
        own = self._info.rank * part.shape[0] * row_nbytes(part)
        yield Piece(summed, (0, own))
        yield Piece(gathered, (own, 0), tensors=(1, 1))

    def _plan(self, part: TensorMeta, apart: int) -> tuple[Plan, Plan]:
        info = self._info
        parts = Parts(row_nbytes(part), apart=apart, count=info.world_size)
        summed = plan_reduction(SUM, info, part, (), parts)
        numbers = math.prod(part.shape)
        flat = TensorMeta(
            (1, numbers), part.dtype, (numbers, 1), part.itemsize, info.output_alignment
        )
        gathered = find(GATHER).plan(info, flat)
        return replace(summed, op=self._op), replace(gathered, op=self._op)

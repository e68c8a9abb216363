"""Host side of the reductions: checks, sizes and the plan that they share. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidArgumentError, UnsupportedError
from ..layout import STAGED_ALIGNMENT, align_up, divisor
from ..policy import choose_protocol, gather_grid, pace
from .collective import KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta
from .columns import check_columns, stride_nbytes

REDUCED_DTYPES = ("bfloat16", "float16", "float32")
PACKS = {"push": (16, 4), "pull": (16, 4), "tagged": (8, 4)}
"""Bytes per load and store of the own tensors: the widest that addresses and strides allow."""

UNIT = 8
"""Data bytes of a unit of tagged push, whatever packs a rank loads."""


def reduce_variants(op: str, dtypes: Sequence[str] = REDUCED_DTYPES) -> list[KernelKey]:
    """Return the kernels of a reduction."""
    return [
        KernelKey(op, (protocol, pack, dtype))
        for protocol, packs in PACKS.items()
        for pack in packs
        for dtype in dtypes
    ]


def check_reduced(
    op: str, label: str, meta: TensorMeta, max_rows: int, ndim: int | None = None
) -> None:
    """Check what every reduced tensor must be.

    Raises:
        InvalidArgumentError: Dimensions, dtype, rows, inner stride or alignment does not fit.
    """
    facts = f"shape={meta.shape}, dtype={meta.dtype}, strides={meta.strides}"
    if len(meta.shape) < 2:
        raise InvalidArgumentError(f"{label} needs two dimensions or more ({facts})", op=op)
    if meta.dtype not in REDUCED_DTYPES:
        raise InvalidArgumentError(
            f"{label} has an unsupported dtype ({facts}); use one of {', '.join(REDUCED_DTYPES)}",
            op=op,
        )
    check_columns(op, label, meta, ndim=ndim or len(meta.shape), max_rows=max_rows)


def divided(op: str, what: str, number: int, world_size: int) -> int:
    """Return a rank's share.

    Raises:
        UnsupportedError: It does not divide.
    """
    if number % world_size:
        raise UnsupportedError(
            f"{what}={number} do not divide by world_size={world_size}; pad them",
            reason=f"{number} {what} do not divide by {world_size}",
            op=op,
        )
    return number // world_size


def pack_of(op: str, protocol: str, sizes: Sequence[int], alignments: Sequence[int]) -> int:
    """Return the widest pack that suits sizes and alignments, which may be other ones elsewhere.

    Raises:
        InvalidArgumentError: None does.
    """
    limit = min(alignments)
    for pack in PACKS[protocol]:
        if pack <= limit and all(size % pack == 0 for size in sizes):
            return pack
    raise InvalidArgumentError(
        f"rows of {sizes} bytes at an alignment of {limit} cannot be moved in units of 4 bytes; "
        "pad rows of 2-byte numbers to an even count, and align them",
        op=op,
    )


@dataclass(frozen=True)
class Parts:
    """What a rank sends to each peer, and how blocks may split it.

    Attributes:
        nbytes: Of a row of a part.
        apart: How far two parts are apart in a row, if there are several.
        count: How many different parts a rank has: 1, or one for each rank.
        beside: Bytes that are staged behind each part.
        item: What a block must not split, in bytes; 0: nothing but 16-byte units.
        tagged: Whether there is a tagged form.
        others: Tensors that are loaded in the same packs.
    """

    nbytes: int
    apart: int = 0
    count: int = 1
    beside: int = 0
    item: int = 0
    tagged: bool = True
    others: tuple[TensorMeta, ...] = ()


def plan_reduction(
    op: str, info: PlanInfo, tensor: TensorMeta, outputs: tuple[OutputSpec, ...], parts: Parts
) -> Plan:
    """Plan a reduction of one tensor.

    Scalars: rows, policy.pace, those of column_scalars; if `parts` are apart, how far.
    """
    rows, world, part = tensor.shape[0], info.world_size, parts.nbytes
    staged = align_up(rows * part, STAGED_ALIGNMENT) + parts.beside
    protocol = choose_protocol(info.protocol, staged, world, info.segment_nbytes, info.limits)
    if protocol == "tagged" and (not parts.tagged or part % UNIT):
        protocol = "push"
    sizes = [part, parts.item, parts.apart, stride_nbytes(tensor)]
    sizes += [stride_nbytes(one) for one in parts.others if len(one.shape) > 1]
    alignments = [info.output_alignment, *(one.alignment for one in (tensor, *parts.others))]
    pack = pack_of(op, protocol, sizes, alignments)
    grid = gather_grid(protocol, [rows * part], world, info.max_blocks)
    blocks, chunk = grid.blocks, grid.chunks[0]
    if parts.item:
        items = max(1, rows * part // parts.item)
        blocks = min(items, info.max_blocks)
        chunk = -(-items // blocks) * parts.item
    return Plan(
        op=op,
        outputs=outputs,
        kernel=KernelKey(op, (protocol, pack, tensor.dtype)),
        grid=blocks,
        scalars=(
            rows,
            pace(protocol, staged, world, blocks, info.limits),
            part,
            stride_nbytes(tensor),
            divisor(part),
            chunk,
            divisor(chunk // (UNIT if protocol == "tagged" else pack)),
            *([parts.apart] if parts.apart else []),
        ),
        staged_nbytes=staged * {"push": 1, "pull": parts.count, "tagged": 2}[protocol],
        exchanged=(0,),
        facts=(protocol, tensor.shape, tensor.dtype),
    )

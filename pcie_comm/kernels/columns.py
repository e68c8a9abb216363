"""Host side of the column gathers: checks, sizes, grid and pack width. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidArgumentError
from ..layout import PACK_NBYTES, STAGED_ALIGNMENT, align_up, divisor
from ..policy import choose_protocol, gather_grid, pace
from .collective import KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta

PACKS = {"push": (16, 4, 1), "pull": (16, 4, 1), "tagged": (8, 1)}
"""Bytes per load and store: the widest that address, stride and row size allow is used."""

BLOCK = 288
"""Threads of a block: 256 that move bytes, and the warp that watches flags under tagged push."""

GATHERED_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")


def check_columns(
    op: str,
    label: str,
    meta: TensorMeta,
    *,
    ndim: int,
    max_rows: int,
    dtypes: Sequence[str] = GATHERED_DTYPES,
) -> None:
    """Check what every gathered tensor must be.

    Raises:
        InvalidArgumentError: Rank, dtype, rows or inner stride does not fit.
    """
    facts = f"shape={meta.shape}, dtype={meta.dtype}, strides={meta.strides}"
    if len(meta.shape) != ndim:
        raise InvalidArgumentError(f"{label} needs {ndim} dimensions ({facts})", op=op)
    if meta.dtype not in dtypes:
        raise InvalidArgumentError(
            f"{label} has an unsupported dtype ({facts}); use one of {', '.join(dtypes)}",
            op=op,
        )
    if meta.shape[0] > max_rows:
        raise InvalidArgumentError(
            f"{label} has rows={meta.shape[0]}, more than max_rows={max_rows} ({facts}); "
            "split the batch or raise Config.max_rows on every rank",
            op=op,
        )
    if 0 in meta.shape[1:]:
        raise InvalidArgumentError(f"{label} has an empty row ({facts})", op=op)
    dense = 1
    for size, stride in zip(meta.shape[:0:-1], meta.strides[:0:-1], strict=True):
        if size > 1 and stride != dense:
            raise InvalidArgumentError(
                f"{label} is not contiguous within a row ({facts}); call .contiguous()", op=op
            )
        dense *= size
    if meta.shape[0] > 1 and meta.strides[0] < dense:
        raise InvalidArgumentError(
            f"{label} has overlapping rows ({facts}); call .contiguous()", op=op
        )


def row_nbytes(meta: TensorMeta) -> int:
    """Return the bytes of one row."""
    count = 1
    for size in meta.shape[1:]:
        count *= size
    return count * meta.itemsize


def stride_nbytes(meta: TensorMeta) -> int:
    """Return the distance of two rows in bytes; of a single row, its size."""
    return meta.strides[0] * meta.itemsize if meta.shape[0] > 1 else row_nbytes(meta)


def pack_width(info: PlanInfo, protocol: str, tensors: Sequence[TensorMeta]) -> int:
    """Return the widest pack that suits every tensor and every output."""
    sizes = [size for meta in tensors for size in (row_nbytes(meta), stride_nbytes(meta))]
    limit = min([info.output_alignment, *(meta.alignment for meta in tensors)])
    return next(p for p in PACKS[protocol] if p <= limit and all(size % p == 0 for size in sizes))


def share(count: int, part: int, parts: int) -> tuple[int, int]:
    """Return where a part of `count` things begins and ends, as torch.tensor_split cuts them."""
    size, more = divmod(count, parts)
    begin = part * size + min(part, more)
    return begin, begin + size + int(part < more)


def share_of_bytes(nbytes: int, part: int, parts: int) -> tuple[int, int]:
    """Return where a part of a row begins and ends: in whole packs, but for the row's end."""
    begin, end = share(-(-nbytes // PACK_NBYTES), part, parts)
    return min(begin * PACK_NBYTES, nbytes), min(end * PACK_NBYTES, nbytes)


def gather_variants(op: str) -> list[KernelKey]:
    """Return the kernels of a plain gather."""
    return [KernelKey(op, (protocol, pack)) for protocol, packs in PACKS.items() for pack in packs]


def plan_gather(
    op: str,
    info: PlanInfo,
    tensors: Sequence[TensorMeta],
    outputs: tuple[OutputSpec, ...],
    kind: tuple[int, ...] = (),
) -> Plan:
    """Plan a gather of `tensors`, staged one behind the other. `kind` ends the kernel's variant.

    Raises:
        InvalidArgumentError: Rows differ.
    """
    rows = tensors[0].shape[0]
    if any(meta.shape[0] != rows for meta in tensors):
        raise InvalidArgumentError(
            f"the tensors have different rows={[meta.shape[0] for meta in tensors]}", op=op
        )
    sizes = [row_nbytes(meta) for meta in tensors]
    staged = sum(align_up(rows * size, STAGED_ALIGNMENT) for size in sizes)
    protocol = choose_protocol(
        info.protocol,
        staged,
        info.world_size,
        info.segment_nbytes,
        info.limits,
    )
    grid = gather_grid(protocol, [rows * size for size in sizes], info.world_size, info.max_blocks)
    paced = pace(protocol, staged, info.world_size, grid.blocks, info.limits)
    pack = pack_width(info, protocol, tensors)
    described = zip(tensors, grid.chunks, strict=True)
    per_tensor = [column_scalars(meta, protocol, chunk, pack) for meta, chunk in described]
    return Plan(
        op=op,
        outputs=outputs,
        kernel=KernelKey(op, (protocol, pack, *kind)),
        grid=grid.blocks,
        scalars=(rows, paced, *(scalar for scalars in per_tensor for scalar in scalars)),
        staged_nbytes=staged * 2 if protocol == "tagged" else staged,
        exchanged=tuple(range(len(tensors))),
        facts=(protocol, *((meta.shape, meta.dtype) for meta in tensors)),
    )


def column_scalars(
    meta: TensorMeta, protocol: str, chunk: int, pack: int
) -> tuple[int, int, int, int, int]:
    """Return what a kernel is told of a tensor of whose staged form a block moves `chunk` bytes.

    Row size and stride in bytes; the row size as a divisor; the chunk in bytes; and how many items
    that is, as a divisor: packs, or under tagged push units of 8 bytes. The chunk is a multiple of
    16, so the split of the tensor does not depend on the pack.
    """
    size = row_nbytes(meta)
    item = 8 if protocol == "tagged" else pack
    return size, stride_nbytes(meta), divisor(size), chunk, divisor(chunk // item)

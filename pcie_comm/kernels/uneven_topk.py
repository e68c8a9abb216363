"""all_gather_pair_topk where experts, or columns of the down row, do not divide by the ranks. Pure.

Ranks send logits and select from whole rows (row_kernels.py), whatever the router: groups of
experts that ranks own as a whole would not come out even. The selection is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import STAGED_ALIGNMENT, align_up, divisor
from ..policy import choose_protocol, pace, split_fused_grid
from .collective import KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta
from .uneven import UNEVEN, Shares, shapes_of, uneven_pack, uneven_scalars

PACKS = {"push": (16, 2, 1), "pull": (16, 2, 1), "tagged": (8, 2, 1)}
KIMI_PACKS = dict.fromkeys(PACKS, (2,))
"""Rows of bf16 that differ by a column allow no wider one."""

NUM_SCALARS = 20


def uneven_topk_variants(op: str, kind: str, kimi: bool) -> list[KernelKey]:
    """Return the kernels of a router."""
    return [
        KernelKey(op, (protocol, pack, kind, UNEVEN))
        for protocol, packs in (KIMI_PACKS if kimi else PACKS).items()
        for pack in packs
    ]


def plan_uneven_topk(
    op: str,
    info: PlanInfo,
    tensors: Sequence[TensorMeta],
    outputs: tuple[OutputSpec, ...],
    shares: tuple[Shares, Shares],
    kind: tuple[str, bool],
) -> Plan:
    """Plan a call; see all_gather_pair_topk for the arguments.

    Args:
        op: Name of the collective.
        info: Of the group.
        tensors: This rank's.
        outputs: Of the call.
        shares: Of the down row, and of the experts.
        kind: What tells routers apart, and whether it is that of Kimi K3.
    """
    (down, router), rows, world = tensors[:2], tensors[0].shape[0], info.world_size
    wide, experts = shares
    units = -(-experts.columns_of(0) // 2)
    down_nbytes = rows * wide.widest
    staged = align_up(rows * units * 8, STAGED_ALIGNMENT) + down_nbytes
    protocol = choose_protocol(info.protocol, staged, world, info.segment_nbytes, info.limits)
    split = split_fused_grid(protocol, rows, 1, down_nbytes, world, info.max_blocks)
    pack = uneven_pack(info, KIMI_PACKS if kind[1] else PACKS, protocol, [down], [wide])
    return Plan(
        op=op,
        outputs=outputs,
        kernel=KernelKey(op, (protocol, pack, kind[0], UNEVEN)),
        grid=split.router_blocks + split.gather.blocks,
        scalars=(
            rows,
            split.router_blocks,
            pace(protocol, staged, world, split.gather.blocks, info.limits),
            split.rows_per_block,
            experts.columns // world,
            units,
            divisor(units),
            max(world - 2, 0).bit_length(),
            router.strides[0] * router.itemsize,
            experts.extra,
            *uneven_scalars(down, wide, (0, wide.widest), protocol, split.gather.chunks[0], pack),
        ),
        staged_nbytes=staged * 2 if protocol == "tagged" else staged,
        exchanged=(0, 1),
        facts=(protocol, UNEVEN, rows, *kind, outputs[0].shape, down.dtype, split.router_blocks),
        shards=shapes_of((down, router), shares),
    )

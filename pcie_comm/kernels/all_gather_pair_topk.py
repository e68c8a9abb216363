"""all_gather_pair_kimi_topk: gather the down row and select 16 experts, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError, UnsupportedError
from ..layout import LINE_NBYTES
from ..policy import choose_protocol, pace, split_fused_grid
from .columns import BLOCK, PACKS, check_columns, column_scalars, pack_width, row_nbytes
from .registry import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta
from .router import check_router
from .router_spec import KIMI_K3, RouterSpec

if TYPE_CHECKING:
    import torch

HIDDEN = 3584
LIST_NBYTES = LINE_NBYTES
"""16 records of 8 bytes: what one group of experts contributes to a row."""


def expert_groups(num_experts: int, world_size: int) -> tuple[int, int]:
    """Return groups per rank and experts per group of the selection tree.

    16 groups of 56 where the world size divides 16, else 14 of 64: level 1 ranks at most 64
    experts in a warp, and a rank owns whole groups. The result does not depend on the choice.

    Raises:
        UnsupportedError: The experts do not divide by the world size.
    """
    for groups in (16, 14):
        if groups % world_size == 0 and num_experts % groups == 0:
            return groups // world_size, num_experts // groups
    raise UnsupportedError(
        f"world_size={world_size} does not serve num_experts={num_experts} "
        f"({num_experts} mod {world_size} = {num_experts % world_size}); "
        "use 1, 2, 4, 7, 8, 14 or 16 ranks",
        reason=f"{num_experts} experts do not divide by {world_size}",
    )


class AllGatherPairTopk(Collective):
    """down [rows, 3584/W] bf16, router [rows, 896/W] fp32, bias [896] -> down, weights, ids."""

    name = "all_gather_pair_kimi_topk"
    num_inputs = 3
    block = BLOCK

    def __init__(self, spec: RouterSpec = KIMI_K3) -> None:
        self.spec = spec

    def num_outputs(self) -> int:
        return 3

    def num_scalars(self, key: KernelKey) -> int:
        return 13

    def check_world_size(self, world_size: int) -> None:
        expert_groups(self.spec.num_experts, world_size)

    def variants(self) -> Sequence[KernelKey]:
        return [
            KernelKey(self.name, (protocol, pack, numerics))
            for protocol, packs in PACKS.items()
            for pack in packs
            for numerics in ("torch", "vllm")
        ]

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan; the scalars are those of fused_kernels.fused_kernel."""
        down, router, bias = tensors
        spec, world = self.spec, info.world_size
        groups, group_size = expert_groups(spec.num_experts, world)
        check_router(self.name, router, bias, spec.num_experts // world, spec.num_experts)
        check_columns(self.name, "local_down", down, ndim=2, max_rows=info.max_rows)
        if down.shape[1] != HIDDEN // world or down.dtype != "bfloat16":
            raise InvalidArgumentError(
                f"local_down needs shape [rows, {HIDDEN // world}] and dtype bfloat16 "
                f"(shape={down.shape}, dtype={down.dtype}, world_size={world})",
                op=self.name,
            )
        rows = down.shape[0]
        if router.shape[0] != rows:
            raise InvalidArgumentError(
                f"local_down has rows={rows}, local_router has rows={router.shape[0]}", op=self.name
            )
        down_nbytes = rows * row_nbytes(down)
        staged = rows * groups * LIST_NBYTES + down_nbytes
        protocol = choose_protocol(info.protocol, staged, world, info.segment_nbytes, info.limits)
        split = split_fused_grid(protocol, rows, groups, down_nbytes, world, info.max_blocks)
        pack = pack_width(info, protocol, [down])
        return Plan(
            op=self.name,
            outputs=self.output_specs(info, *tensors),
            kernel=KernelKey(self.name, (protocol, pack, spec.numerics)),
            grid=split.router_blocks + split.gather.blocks,
            scalars=(
                rows,
                split.router_blocks,
                pace(protocol, staged, world, split.gather.blocks, info.limits),
                split.rows_per_block,
                split.tasks_per_block,
                groups.bit_length() - 1,
                group_size,
                router.strides[0] * router.itemsize,
                *column_scalars(down, protocol, split.gather.chunks[0], pack),
            ),
            staged_nbytes=staged * 2 if protocol == "tagged" else staged,
            exchanged=(0, 1),
            facts=(protocol, rows, spec.numerics, split.router_blocks),
        )

    def output_specs(self, info: PlanInfo, *tensors: TensorMeta) -> tuple[OutputSpec, ...]:
        rows, top_k = tensors[0].shape[0], self.spec.top_k
        return (
            OutputSpec((rows, HIDDEN), "bfloat16"),
            OutputSpec((rows, top_k), "float32"),
            OutputSpec((rows, top_k), "int32"),
        )

    def kernel(self, key: KernelKey) -> Any:
        from .fused_kernels import fused_kernel

        protocol, pack, numerics = key.variant
        spec = replace(self.spec, numerics=str(numerics))
        return fused_kernel(spec, protocol=str(protocol), pack=int(pack), threads=self.block)

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        from .reference import gather_columns, router_topk

        down = gather_columns([shard[0] for shard in shards])
        router = gather_columns([shard[1] for shard in shards])
        return (down, *router_topk(router, shards[0][2], self.spec))


COLLECTIVES = (AllGatherPairTopk(),)

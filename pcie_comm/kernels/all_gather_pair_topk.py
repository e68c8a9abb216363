"""all_gather_pair_topk: gather the down row and select experts, in one launch.

With KIMI_K3 its name is all_gather_pair_kimi_topk. Routers of many experts, of which each has a
choice of its own, send what each rank selected (fused_kernels.py); others send logits and select
from whole rows (row_kernels.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError, UnsupportedError
from ..layout import LINE_NBYTES, STAGED_ALIGNMENT, align_up, divisor
from ..policy import choose_protocol, pace, split_fused_grid
from .collective import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta
from .columns import BLOCK, PACKS, check_columns, column_scalars, pack_width, row_nbytes
from .router import check_router, is_kimi, is_wide, variant_of
from .router_spec import KIMI_K3, RouterSpec
from .uneven import UNEVEN, Shares, check_share
from .uneven_topk import NUM_SCALARS, plan_uneven_topk, uneven_topk_variants

if TYPE_CHECKING:
    import torch

HIDDEN = 3584
LIST_NBYTES = LINE_NBYTES
"""16 records of 8 bytes: what one group of experts contributes to a row."""


def expert_groups(num_experts: int, world_size: int) -> tuple[int, int] | None:
    """Return groups per rank and experts per group of the selection tree; None: there are none.

    16 groups of 56 where the world size divides 16, else 14 of 64: level 1 ranks at most 64
    experts in a warp, and a rank owns whole groups. The result does not depend on the choice.
    """
    for groups in (16, 14):
        size = num_experts // groups
        if groups % world_size == 0 and num_experts % (4 * groups) == 0 and size <= 64:
            return groups // world_size, size
    return None


class AllGatherPairTopk(Collective):
    """down [rows, w], router [rows, experts/W] fp32, bias [experts] -> down, weights, ids.

    A router without a bias takes the first two alone. Kimi K3's down row is [rows, 3584/W] bf16.
    Experts that do not divide by W lie as torch.tensor_split cuts them, and so does the down row
    of Kimi K3 then.

    Args:
        spec: The router.
        width: Of the gathered down row, if its shards are those of torch.tensor_split; None: W
            times that of a rank.
    """

    block = BLOCK
    row_inputs = (0, 1)

    def __init__(self, spec: RouterSpec = KIMI_K3, width: int | None = None) -> None:
        self.spec = spec
        self.width = HIDDEN if is_kimi(spec) else width
        self.name = "all_gather_pair_kimi_topk" if is_kimi(spec) else "all_gather_pair_topk"
        if is_kimi(spec) and width not in (None, HIDDEN):
            raise InvalidArgumentError(
                f"width={width!r}, but the down row of Kimi K3 has {HIDDEN} columns; leave it out",
                op=self.name,
            )
        self.num_inputs = 3 if spec.bias else 2

    def prepared_by(self) -> str:
        if is_kimi(self.spec):
            return f'"{self.name}"'
        return str(self.spec) if self.width is None else f"{self.spec}, width={self.width}"

    def num_outputs(self) -> int:
        return 3

    def num_scalars(self, key: KernelKey) -> int:
        if UNEVEN in key.variant:
            return NUM_SCALARS
        return 13 if is_wide(self.spec) else 14

    def check_world_size(self, world_size: int) -> None:
        experts = self.spec.num_experts
        if experts < world_size:
            raise UnsupportedError(
                f"world_size={world_size} does not serve num_experts={experts}: a rank would have "
                f"none; use {experts} ranks or fewer",
                reason=f"fewer experts than {world_size} ranks",
            )

    def variants(self) -> Sequence[KernelKey]:
        kinds = ("torch", "vllm") if is_kimi(self.spec) else (variant_of(self.spec),)
        even = [
            KernelKey(self.name, (protocol, pack, kind))
            for protocol, packs in PACKS.items()
            for pack in packs
            for kind in kinds
        ]
        uneven = [uneven_topk_variants(self.name, kind, is_kimi(self.spec)) for kind in kinds]
        return [*even, *(key for keys in uneven for key in keys)]

    def needed(self, world_size: int) -> Sequence[KernelKey]:
        uneven = self._is_uneven(world_size)
        return [key for key in self.variants() if (UNEVEN in key.variant) == uneven]

    def _is_uneven(self, world_size: int) -> bool:
        """Tell whether shares differ between ranks, or no rank can own whole groups."""
        experts = self.spec.num_experts
        if experts % world_size or (self.width or 0) % world_size:
            return True
        return is_wide(self.spec) and expert_groups(experts, world_size) is None

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan; the scalars are those that the kernels state."""
        self._check(info, tensors)
        down, router = tensors[:2]
        spec, world, rows = self.spec, info.world_size, down.shape[0]
        if self._is_uneven(world):
            kind = (variant_of(spec), is_kimi(spec))
            outputs = self.output_specs(info, *tensors)
            shares = self._shares(down, world)
            return plan_uneven_topk(self.name, info, tensors, outputs, shares, kind)
        down_nbytes = rows * row_nbytes(down)
        found = expert_groups(spec.num_experts, world) if is_wide(spec) else None
        if found is not None:
            groups, group_size = found
            router_nbytes = rows * groups * LIST_NBYTES
        else:
            groups, units = 1, -(-spec.num_experts // world // 2)
            router_nbytes = align_up(rows * units * 8, STAGED_ALIGNMENT)
        staged = router_nbytes + down_nbytes
        protocol = choose_protocol(info.protocol, staged, world, info.segment_nbytes, info.limits)
        split = split_fused_grid(protocol, rows, groups, down_nbytes, world, info.max_blocks)
        pack = pack_width(info, protocol, [down])
        if found is not None:
            shape = [split.tasks_per_block, groups.bit_length() - 1, group_size]
        else:
            peer_shift = max(world - 2, 0).bit_length()
            shape = [spec.num_experts // world, units, divisor(units), peer_shift]
        return Plan(
            op=self.name,
            outputs=self.output_specs(info, *tensors),
            kernel=KernelKey(self.name, (protocol, pack, variant_of(spec))),
            grid=split.router_blocks + split.gather.blocks,
            scalars=(
                rows,
                split.router_blocks,
                pace(protocol, staged, world, split.gather.blocks, info.limits),
                split.rows_per_block,
                *shape,
                router.strides[0] * router.itemsize,
                *column_scalars(down, protocol, split.gather.chunks[0], pack),
            ),
            staged_nbytes=staged * 2 if protocol == "tagged" else staged,
            exchanged=(0, 1),
            facts=(protocol, rows, *self._facts(down), split.router_blocks),
        )

    def _facts(self, down: TensorMeta) -> tuple[object, ...]:
        """Return what must be equal on all ranks beside the rows."""
        kind = variant_of(self.spec)
        return (kind,) if is_kimi(self.spec) else (kind, down.shape, down.dtype)

    def _shares(self, down: TensorMeta, world_size: int) -> tuple[Shares, Shares]:
        """Return those of the down row and of the experts."""
        width = self.width or down.shape[1] * world_size
        experts = Shares(self.spec.num_experts, 4, world_size)
        return Shares.of(down, width, world_size), experts

    def _check(self, info: PlanInfo, tensors: Sequence[TensorMeta]) -> None:
        """Check the inputs of a call.

        Raises:
            InvalidArgumentError: Shape, dtype, stride or rows does not fit.
            UnsupportedError: There are fewer experts than ranks.
        """
        self.check_world_size(info.world_size)
        down, router = tensors[:2]
        world, rank = info.world_size, info.rank
        bias = tensors[2] if self.spec.bias else None
        check_columns(self.name, "local_down", down, ndim=2, max_rows=info.max_rows)
        wide, experts = self._shares(down, world)
        check_router(self.name, router, bias, experts.columns_of(rank), experts.columns)
        if is_kimi(self.spec) and (
            down.shape[1] != wide.columns_of(rank) or down.dtype != "bfloat16"
        ):
            raise InvalidArgumentError(
                f"local_down needs shape [rows, {wide.columns_of(rank)}] and dtype bfloat16 "
                f"(shape={down.shape}, dtype={down.dtype}, world_size={world})",
                op=self.name,
            )
        check_share(self.name, "local_down", down, wide, rank)
        rows = down.shape[0]
        if router.shape[0] != rows:
            raise InvalidArgumentError(
                f"local_down has rows={rows}, local_router has rows={router.shape[0]}", op=self.name
            )

    def output_specs(self, info: PlanInfo, *tensors: TensorMeta) -> tuple[OutputSpec, ...]:
        down, top_k = tensors[0], self.spec.top_k
        rows = down.shape[0]
        return (
            OutputSpec((rows, self.width or down.shape[1] * info.world_size), down.dtype),
            OutputSpec((rows, top_k), "float32"),
            OutputSpec((rows, top_k), "int32"),
        )

    def kernel(self, key: KernelKey) -> Any:
        protocol, pack, kind = key.variant[:3]
        how: dict[str, Any] = {"protocol": str(protocol), "pack": int(pack), "threads": self.block}
        spec = replace(self.spec, numerics=str(kind)) if is_kimi(self.spec) else self.spec
        if UNEVEN in key.variant or not is_wide(spec):
            from .row_kernels import gathered_kernel

            return gathered_kernel(spec, **how, uneven=UNEVEN in key.variant)
        from .fused_kernels import fused_kernel

        return fused_kernel(spec, **how)

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        from .reference import gather_dense, router_topk

        uneven = self._is_uneven(len(shards))
        down = gather_dense([shard[0] for shard in shards], uneven)
        router = gather_dense([shard[1] for shard in shards], uneven)
        bias = shards[0][2] if self.spec.bias else None
        return (down, *router_topk(router, bias, self.spec))


COLLECTIVES = (AllGatherPairTopk(),)

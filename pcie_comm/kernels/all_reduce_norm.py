"""all_reduce_rms_norm: a sum over ranks, the residual added, and RMSNorm of that, in one launch.

Message flow: that of all_reduce. A block adds up whole rows, writes the new residual, adds up its
squares, and reads its own numbers back to scale them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError
from .collective import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta
from .columns import BLOCK, check_columns, row_nbytes, stride_nbytes
from .reductions import Parts, check_reduced, plan_reduction, reduce_variants

if TYPE_CHECKING:
    import torch


class AllReduceRmsNorm(Collective):
    """local, residual [rows, hidden] and weight [hidden] -> normed, new residual [rows, hidden].

    The new residual is the sum over ranks, in rank order, plus the residual, all in fp32, rounded
    once. It is then normalised as it was rounded: `x / sqrt(mean(x * x) + eps) * weight`. All of
    one dtype. Equal bytes on all ranks, if residual and weight are.

    Args:
        eps: Added to the mean of the squares; registered is 1e-6.
    """

    name = "all_reduce_rms_norm"
    tolerance = 3 * 2.0**-8
    num_inputs = 3
    block = BLOCK
    row_inputs = (0, 1)

    def __init__(self, eps: float = 1e-6) -> None:
        self.eps = eps

    def num_outputs(self) -> int:
        return 2

    def num_scalars(self, key: KernelKey) -> int:
        return 11

    def variants(self) -> Sequence[KernelKey]:
        return [key for key in reduce_variants(self.name) if key.variant[0] != "tagged"]

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan; the scalars are those of norm_kernels.norm_kernel."""
        local, residual, weight = tensors
        check_reduced(self.name, "local", local, info.max_rows, ndim=2)
        check_columns(
            self.name,
            "residual",
            residual,
            ndim=2,
            max_rows=info.max_rows,
            dtypes=(local.dtype,),
        )
        hidden = local.shape[1]
        if residual.shape != local.shape:
            raise InvalidArgumentError(
                f"residual needs shape {local.shape} (shape={residual.shape})", op=self.name
            )
        if weight.shape != (hidden,) or weight.dtype != local.dtype or weight.strides != (1,):
            raise InvalidArgumentError(
                f"weight needs shape ({hidden},) and dtype {local.dtype}, contiguous "
                f"(shape={weight.shape}, dtype={weight.dtype}, strides={weight.strides})",
                op=self.name,
            )
        output = OutputSpec(local.shape, local.dtype)
        size = row_nbytes(local)
        parts = Parts(size, item=size, tagged=False, others=(residual, weight))
        plan = plan_reduction(self.name, info, local, (output, output), parts)
        per_block = plan.scalars[5] // size
        pack = int(plan.kernel.variant[1])
        facts = (stride_nbytes(residual), size // pack, per_block)
        floats = struct.unpack("<II", struct.pack("<ff", float(hidden), self.eps))
        return replace(
            plan,
            scalars=(*plan.scalars, *facts, floats[0] | floats[1] << 32),
            facts=(*plan.facts, self.eps),
        )

    def kernel(self, key: KernelKey) -> Any:
        from .norm_kernels import norm_kernel

        protocol, pack, dtype = key.variant
        return norm_kernel(str(dtype), push=protocol == "push", pack=int(pack), threads=self.block)

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        from .reference_sums import add_and_normalise, sum_of_ranks

        _, residual, weight = shards[0]
        total = sum_of_ranks([shard[0] for shard in shards])
        return add_and_normalise(total, residual, weight, self.eps)

    def example_inputs(
        self, world_size: int, rows: int, seed: int
    ) -> Sequence[Sequence[torch.Tensor]]:
        from .examples import draw

        own = draw(world_size, rows, seed, ((2048,), "bfloat16"))
        (((residual,),), ((weight,),)) = (
            draw(1, count, seed + 1, ((2048,), "bfloat16")) for count in (rows, 1)
        )
        return [[local, residual.clone(), weight[0].clone()] for (local,) in own]


COLLECTIVES = (AllReduceRmsNorm(),)

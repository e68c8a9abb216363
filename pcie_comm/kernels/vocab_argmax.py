"""vocab_argmax: the greedy token over logits that ranks hold by columns.

Message flow: a block looks for the best of each of its rows and sends a *key* of 8 bytes: the
order-preserving image of the number high, the complement of the token's id low, so that an integer
maximum prefers the lower id. NaN has image 0, below every number. Bytes on the wire per rank, row
and peer: 8, or 16 with tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..policy import choose_protocol
from .collective import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta
from .columns import BLOCK, row_nbytes, stride_nbytes
from .reductions import REDUCED_DTYPES, check_reduced, pack_of

if TYPE_CHECKING:
    import torch

KEY_NBYTES = 8


class VocabArgmax(Collective):
    """[rows, vocab/W] logits per rank -> [rows] int64 token ids, on every rank.

    The largest logit, and of those that tie the one with the lowest id. A NaN is not chosen while
    the row has a number; a row of NaN alone gives 0.
    """

    name = "vocab_argmax"
    num_inputs = 1
    block = BLOCK
    row_inputs = (0,)

    def num_scalars(self, key: KernelKey) -> int:
        return 5

    def variants(self) -> Sequence[KernelKey]:
        return [
            KernelKey(self.name, (protocol, pack, dtype))
            for protocol in ("push", "pull", "tagged")
            for pack in (16, 4)
            for dtype in REDUCED_DTYPES
        ]

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan. Scalars: rows, rows per block, row stride, packs of a row, width."""
        (logits,) = tensors
        check_reduced(self.name, "local_logits", logits, info.max_rows, ndim=2)
        rows, width = logits.shape
        staged = rows * KEY_NBYTES
        protocol = choose_protocol(
            info.protocol, staged, info.world_size, info.segment_nbytes, info.limits
        )
        sizes = (row_nbytes(logits), stride_nbytes(logits))
        pack = pack_of(self.name, "push", sizes, (logits.alignment,))
        grid = max(1, min(rows, info.max_blocks))
        return Plan(
            op=self.name,
            outputs=(OutputSpec((rows,), "int64"),),
            kernel=KernelKey(self.name, (protocol, pack, logits.dtype)),
            grid=grid,
            scalars=(rows, -(-rows // grid), sizes[1], sizes[0] // pack, width),
            staged_nbytes=staged * 2 if protocol == "tagged" else staged,
            exchanged=(0,),
            facts=(protocol, logits.shape, logits.dtype),
        )

    def kernel(self, key: KernelKey) -> Any:
        from .argmax_kernels import argmax_kernel

        protocol, pack, dtype = key.variant
        return argmax_kernel(str(dtype), protocol=str(protocol), pack=int(pack), threads=self.block)

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        from .reference_sums import largest_id

        return (largest_id([shard[0] for shard in shards]),)

    def example_inputs(
        self, world_size: int, rows: int, seed: int
    ) -> Sequence[Sequence[torch.Tensor]]:
        from .examples import draw

        return draw(world_size, rows, seed, ((1024,), "bfloat16"))


COLLECTIVES = (VocabArgmax(),)

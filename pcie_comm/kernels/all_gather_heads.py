"""all_gather_heads: attention heads, gathered along the head dimension in one launch.

[rows, heads/W, dim] is, byte for byte, a column gather of rows of heads/W * dim elements.
"""

from __future__ import annotations

from ..errors import InvalidArgumentError
from .collective import Plan, PlanInfo, TensorMeta
from .columns import check_columns
from .gathers import Gather


class AllGatherHeads(Gather):
    """[rows, heads/W, dim] per rank -> [rows, heads, dim] on every rank.

    Args:
        heads: In all, if shards are those of torch.tensor_split.
    """

    name = "all_gather_heads"
    num_inputs = 1
    row_inputs = (0,)

    def __init__(self, heads: int | None = None) -> None:
        self._take(None if heads is None else (heads,))

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan, and Gather.planned for the scalars."""
        (meta,) = tensors
        check_columns(self.name, "local_heads", meta, ndim=3, max_rows=info.max_rows)
        if meta.dtype == "float32":
            raise InvalidArgumentError(
                "local_heads has dtype=float32; heads are bf16, fp16 or fp8", op=self.name
            )
        return self.planned(info, tensors, ("local_heads",))


COLLECTIVES = (AllGatherHeads(),)

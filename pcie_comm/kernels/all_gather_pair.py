"""all_gather_pair: two tensors, gathered by columns in one launch.

Message flow: both shards are staged one behind the other in one segment, one flag per peer covers
both. Bytes on the wire per rank and peer: rows * (row_nbytes_1 + row_nbytes_2) + 8.
"""

from __future__ import annotations

from collections.abc import Sequence

from .collective import Plan, PlanInfo, TensorMeta
from .columns import check_columns
from .gathers import Gather


class AllGatherPair(Gather):
    """[rows, w1] and [rows, w2] per rank -> [rows, W*w1] and [rows, W*w2] on every rank.

    Args:
        widths: Of both gathered rows, if shards are those of torch.tensor_split.
    """

    name = "all_gather_pair"
    num_inputs = 2
    row_inputs = (0, 1)

    def __init__(self, widths: Sequence[int] | None = None) -> None:
        self._take(widths)

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """See Collective.plan, and Gather.planned for the scalars."""
        labels = ("local_first", "local_second")
        for label, meta in zip(labels, tensors, strict=True):
            check_columns(self.name, label, meta, ndim=2, max_rows=info.max_rows)
        return self.planned(info, tensors, labels)


COLLECTIVES = (AllGatherPair(),)

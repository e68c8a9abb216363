"""How bounded waits end, and what kernels of a channel with counters write down of them.

Counting is a matter of compilation: a kernel counts if it is traced with a 64-bit
`LaneArgs.signature`, and the others hold no trace of it. One warp of block 0 counts, a lane for
each rank, when the barrier behind the wait is passed: three reductions on this rank's own control
block. Launches of a channel are ordered and no two lanes share a word, so loads and stores would
do; but those wait for an answer, and reductions do not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int32, Int64, Uint32, Uint64, cute

from ..layout import ControlLayout, CountLayout
from . import primitives as prim
from . import scalars as num


class Wait(NamedTuple):
    """How a bounded wait ended: `code` 0, or a StatusLayout code with its facts.

    Attributes:
        code: 0 if the wait succeeded.
        peer: Rank that was awaited.
        seen: Flag that was seen last.
        elapsed: Units of 1,024 ns.
        took: Nanoseconds, of a wait that is counted; else 0.
    """

    code: Uint32
    peer: Int32
    seen: Uint64
    elapsed: Uint32
    took: Uint64


def no_wait() -> Wait:
    """Return the outcome of a wait that a thread does not take part in."""
    return Wait(Uint32(0), Int32(0), Uint64(0), Uint32(0), Uint64(0))


def unless(wait: Wait, code: Uint32) -> Wait:
    """Return the outcome of a wait, with `code` if it was a success."""
    return wait._replace(code=num.select(wait.code == Uint32(0), code, wait.code))


def merge_waits(first: Wait, second: Wait) -> Wait:
    """Return the first of two outcomes that gave up, without a branch."""
    failed = first.code != Uint32(0)
    return Wait(*(num.select(failed, a, b) for a, b in zip(first, second, strict=True)))


@cute.jit
def count(lane: Any, peer: Int32, ok: Uint32, took: Uint64) -> None:
    """Write down how long the wait for `peer` took; of the own rank, what the launch sent.

    Participants: a lane per rank, of one warp; others with a `peer` of no rank. Order: relaxed, and
    nothing waits for it.

    Args:
        lane: The launch.
        peer: Any rank.
        ok: 0 if the launch found its channel broken: then it did not wait.
        took: Nanoseconds.
    """
    if lane.block == Int32(0) and peer < lane.world_size and ok != Uint32(0):
        value = num.select(peer == lane.rank, lane.sent, took)
        record = lane.control + Int64(ControlLayout.COUNTS) + num.wide(peer) * CountLayout.NBYTES
        large = (value >> Uint64(32)) != Uint64(0)
        bucket = num.highest_bit(num.select(large, ~Uint32(0), Uint32(value)) | Uint32(1))
        place = Int64(CountLayout.HISTOGRAM) + num.wide(bucket) * 8
        prim.reduce_u64("add", record + Int64(CountLayout.TOTAL), value)
        prim.reduce_u64("max", record + Int64(CountLayout.LONGEST), value)
        prim.reduce_u64("add", record + place, Uint64(1))

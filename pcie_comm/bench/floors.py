"""Kernels that only the benchmark runs: two floors, and one that evicts instruction caches.

* `bench_empty` does nothing: what is left is the launch.
* `bench_handshake` raises a flag at every peer and waits for every peer's: no collective that waits
  for its peers through a flag can be faster.
* `bench_evict` is straight-line code that is larger than the instruction caches of a
  multiprocessor. After it, a kernel fetches its instructions anew, as in a decode step.

They are plugins as any other, run by `group.run`, and not registered: users have no call for them.
`pcie-comm compile --floors` builds them ahead of time. Their device code stands in this file, since
a kernel's fingerprint covers the file of its plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..kernels.collective import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta

if TYPE_CHECKING:
    import torch

EVICT_SQUARE = 60
"""Its square is the unrolled steps of `bench_evict`, of four multiply-adds each: 230 KB of code.

Two loops, since the DSL warns of a long one.
"""


class _Floor(Collective):
    """One input, of which nothing is read or sent, one block, one kernel."""

    num_inputs = 1

    def variants(self) -> Sequence[KernelKey]:
        return [KernelKey(self.name)]

    def num_scalars(self, key: KernelKey) -> int:
        return 1  # of no use; the DSL takes no empty tuple

    def num_outputs(self) -> int:
        return 0

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        return ()


class Empty(_Floor):
    """A launch without work and without communication."""

    name = "bench_empty"

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        return Plan(self.name, (), KernelKey(self.name), grid=1, scalars=(0,))

    def kernel(self, key: KernelKey) -> Any:
        from cutlass import cute

        @cute.kernel
        def empty(args: Any, tensors: Any, scalars: Any) -> None:
            cute.arch.thread_idx()

        return empty


class Handshake(_Floor):
    """A flag to every peer and a wait for every peer's, release and acquire at system scope."""

    name = "bench_handshake"

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        return Plan(self.name, (), KernelKey(self.name), grid=1, scalars=(0,), exchanged=(0,))

    def kernel(self, key: KernelKey) -> Any:
        from cutlass import cute

        from ..kernels.protocol import Lane

        threads = self.block

        @cute.kernel
        def handshake(args: Any, tensors: Any, scalars: Any) -> None:
            lane = Lane(args, threads)
            lane.enter()
            lane.exchange(lane.ok)

        return handshake


class Evict(_Floor):
    """[blocks, 4] fp32 -> the same: each thread passes through all of its code once."""

    name = "bench_evict"

    def num_outputs(self) -> int:
        return 1

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        (values,) = tensors
        outputs = (OutputSpec(values.shape, values.dtype),)
        return Plan(self.name, outputs, KernelKey(self.name), grid=values.shape[0], scalars=(0,))

    def kernel(self, key: KernelKey) -> Any:
        import cutlass
        from cutlass import Int64, cute

        from ..kernels import primitives as prim
        from ..kernels import scalars as num

        @cute.kernel
        def evict(args: Any, tensors: Any, scalars: Any) -> None:
            place = Int64(cute.arch.block_idx()[0]) * 16
            words = prim.load_v4(tensors[0] + place)
            factor = num.bits_float(words[0])
            sums = [num.bits_float(word) for word in words]
            for _ in cutlass.range_constexpr(EVICT_SQUARE):
                for _ in cutlass.range_constexpr(EVICT_SQUARE):
                    sums = [one * factor + sums[i - 1] for i, one in enumerate(sums)]
            if cute.arch.thread_idx()[0] == 0:
                for i in cutlass.range_constexpr(4):
                    prim.store_u32(tensors[1] + place + 4 * i, num.float_bits(sums[i]))

        return evict

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        return (shards[0][0].clone(),)


FLOORS: dict[str, Collective] = {one.name: one for one in (Empty(), Handshake(), Evict())}
"""By name."""

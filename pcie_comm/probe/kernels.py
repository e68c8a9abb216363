"""The probes' kernels, as the store and `pcie-comm compile --probes` know them.

They are no collectives: no group calls them. What they share with one is that they are compiled
ahead of time, kept under a fingerprint of their sources, and loaded. Device code: device.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from ..kernels.collective import Collective, KernelKey, Plan, PlanInfo, TensorMeta

if TYPE_CHECKING:
    import torch

PROTOCOLS = ("pull", "push", "tagged")


class Probe(Collective):
    """A kernel that is launched by address. Tensors and scalars: see the subclasses."""

    device_sources = (Path(__file__).with_name("device.py"), Path(__file__).with_name("sizes.py"))
    scalars: int = 0

    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        raise self._refusal()

    def _refusal(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name} is no collective; it serves `pcie-comm topo --verify`",
            reason="a probe, no collective",
        )

    def variants(self) -> Sequence[KernelKey]:
        return [KernelKey(self.name)]

    def num_scalars(self, key: KernelKey) -> int:
        return self.scalars

    def num_outputs(self) -> int:
        return 0

    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        raise self._refusal()


class Fill(Probe):
    """Target; packs, seed."""

    name = "probe_fill"
    num_inputs = 1
    scalars = 2

    def kernel(self, key: KernelKey) -> Any:
        from cutlass import Int32, Uint32, cute

        from . import device

        @cute.kernel
        def fill(args: Any, tensors: Any, scalars: Any) -> None:
            device.fill(tensors[0], Int32(scalars[0]), Uint32(scalars[1]))

        return fill


class Check(Probe):
    """Source, counts; packs, seed, seed of a stale pattern."""

    name = "probe_check"
    num_inputs = 2
    scalars = 3

    def kernel(self, key: KernelKey) -> Any:
        from cutlass import Int32, Uint32, cute

        from . import device

        @cute.kernel
        def check(args: Any, tensors: Any, scalars: Any) -> None:
            seeds = (Uint32(scalars[1]), Uint32(scalars[2]))
            device.check(tensors[0], tensors[1], Int32(scalars[0]), seeds[0], seeds[1])

        return check


class Copy(Probe):
    """Source, target; packs."""

    name = "probe_copy"
    num_inputs = 2
    scalars = 1

    def kernel(self, key: KernelKey) -> Any:
        from cutlass import Int32, cute

        from . import device

        @cute.kernel
        def copy(args: Any, tensors: Any, scalars: Any) -> None:
            device.copy(tensors[0], tensors[1], Int32(scalars[0]))

        return copy


class Chase(Probe):
    """Chain, result; hops."""

    name = "probe_chase"
    num_inputs = 2
    block = 32
    scalars = 1

    def kernel(self, key: KernelKey) -> Any:
        from cutlass import Int32, cute

        from . import device

        @cute.kernel
        def chase(args: Any, tensors: Any, scalars: Any) -> None:
            device.chase(tensors[0], tensors[1], Int32(scalars[0]))

        return chase


class PingPong(Probe):
    """Own memory, peer's memory, result; rounds, limit in nanoseconds. The rank is the lane's."""

    name = "probe_ping_pong"
    num_inputs = 3
    block = 32
    scalars = 2

    def kernel(self, key: KernelKey) -> Any:
        from cutlass import Int32, cute

        from . import device

        @cute.kernel
        def ping_pong(args: Any, tensors: Any, scalars: Any) -> None:
            own, peer, result = tensors
            device.ping_pong(own, peer, result, Int32(scalars[0]), (args.rank, scalars[1]))

        return ping_pong


class Exchange(Probe):
    """Own memory, peer's memory, result; rounds, packs a thread, seed, limit in nanoseconds.

    A variant for each protocol. The rank is the lane's.
    """

    name = "probe_exchange"
    num_inputs = 3
    scalars = 4

    def variants(self) -> Sequence[KernelKey]:
        return [KernelKey(self.name, (protocol,)) for protocol in PROTOCOLS]

    def kernel(self, key: KernelKey) -> Any:
        from cutlass import cute

        from . import device

        (protocol,) = key.variant

        @cute.kernel
        def exchange(args: Any, tensors: Any, scalars: Any) -> None:
            device.Trial(args, tensors, scalars).play(protocol)

        return exchange


PROBES: dict[str, Collective] = {
    one.name: one for one in (Fill(), Check(), Copy(), Chase(), PingPong(), Exchange())
}
"""By name."""

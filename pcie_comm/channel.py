"""Channel: one ordered lane of a group. Plans calls, checks them, hands them to its engine.

A channel has slabs, flags and an epoch of its own, so calls on two channels are independent of
each other. Calls on one channel are ordered, on every rank in the same order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import interop, ranges, tracing
from .calls import Calls, fused_collective
from .cuda_engine import BoundLaunch, CudaEngine
from .errors import BrokenError, ClosedError, InvalidArgumentError, UnsupportedError
from .kernels.collective import Collective, Plan, PlanInfo
from .kernels.launch import LoadedKernel
from .kernels.pieces import Piece, any_rows, owner_of, plan_call
from .kernels.plan_checks import check_plan, make_plan
from .kernels.router_spec import KIMI_K3, RouterSpec
from .piece_launches import PieceLaunches
from .policy import explain
from .reference_engine import ReferenceEngine
from .stats import ChannelStats, channel_stats
from .tensors import (
    ForeignError,
    alignment_of,
    check_inputs,
    check_outputs,
    data_ptr,
    key_of,
    meta_of,
    torch_dtype,
)

REMEMBERED_CALLS = 4096
"""Distinct calls whose checks are remembered; then the memory starts anew."""

KNOWN_PROTOCOLS = {"pull", "push", "tagged"}


@dataclass(frozen=True)
class Call:
    """A checked and planned call: what is left to do is to launch it, or to run it on the host.

    Attributes:
        outputs: Shape and dtype of each output.
        pieces: Its launches, if one does not do; see kernels/pieces.py.
        kernel, launch: On a GPU, unless there is nothing to do; the arguments of a launch whose
            outputs are allocated per call point nowhere yet.
        addresses, lives: Of inputs and given outputs: what a remembered call is recognised by.
    """

    collective: Collective
    plan: Plan
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    pieces: tuple[Piece, ...]
    kernel: LoadedKernel | None
    launch: BoundLaunch | PieceLaunches | None
    addresses: list[int] = field(default_factory=list)
    lives: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    @property
    def plans(self) -> list[Plan]:
        """Of its launches."""
        return [piece.plan for piece in self.pieces] or [self.plan]


def _as_tuple(collective: Collective, out: Any) -> tuple[torch.Tensor, ...]:
    """Return `out=` as a tuple.

    Raises:
        InvalidArgumentError: Neither a tensor nor a sequence.
    """
    if isinstance(out, (tuple, list)):
        return tuple(out)
    if isinstance(out, torch.Tensor) or hasattr(out, "__dlpack__"):
        return (out,)
    raise InvalidArgumentError(
        f"out={type(out).__name__} is neither a tensor nor a tuple or list of them",
        op=collective.name,
    )


def _remember(calls: dict[Any, Call], key: object, call: Call) -> None:
    if len(calls) >= REMEMBERED_CALLS:
        calls.clear()
    calls[key] = call


class Collectives(Calls):
    """The collectives as methods of a group and of a channel.

    Tensors may also be arrays of another library (CuPy, NumPy, anything with DLPack); results are
    then of the caller's kind, and nothing is copied: see interop.py.

    Attributes:
        handle: Names the channel that serves the calls, to operators of `torch.ops.pcie_comm`.
        _issue: `Channel.issue` of the channel that serves the calls. An attribute rather than a
            method: a call passes through as few frames as possible.
    """

    handle: str
    _issue: Callable[[Collective, tuple[torch.Tensor, ...], Any], Any]

    def all_gather_pair_kimi_topk(
        self,
        local_down: torch.Tensor,
        local_router: torch.Tensor,
        correction_bias: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        *,
        spec: RouterSpec = KIMI_K3,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gather the down row and select 16 of 896 experts, in one launch.

        Collective, on the current stream, capturable after `prepare`. Ids and weights are those of
        `kimi_topk16` on the gathered router row, bit for bit, and byte-equal on all ranks.

        Args:
            local_down: [rows, 3584/W] bf16; rows at any stride. What does not divide by W lies as
                torch.tensor_split cuts it.
            local_router: [rows, 896/W] fp32 logits, likewise; rows at any stride.
            correction_bias: [896] fp32, the same on every rank.
            out: down [rows, 3584] bf16, weights [rows, 16] fp32, ids [rows, 16] int32.
            spec: The router; `RouterSpec(..., numerics="vllm")` for vLLM's sigmoid.

        Returns:
            down, weights, ids; the latter two best first.

        Raises:
            InvalidArgumentError: Shape, dtype, device, stride or size; nothing was enqueued.
            BrokenError: The channel failed earlier.
        """
        tensors = (local_down, local_router, correction_bias)
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
            tracing.call_fused(self, spec, tensors, out)
            if is_dynamo_compiling()
            else self._issue(fused_collective(spec), tensors, out)
        )
        return results


class Channel(Collectives):
    """One ordered lane; made by `PcieDcpGroup.channel`, never directly.

    Args:
        name: Of the lane; the group's own is "default".
        info: Group facts for plans.
        device: Of every tensor.
        engine: Runs the calls.
    """

    def __init__(
        self, name: str, info: PlanInfo, device: torch.device, engine: CudaEngine | ReferenceEngine
    ) -> None:
        self.name = name
        self.info = info
        self.device = device
        self.engine = engine
        self.closed = False
        self._planned: dict[tuple[object, ...], Call] = {}
        self._bound: dict[tuple[object, ...], Call] = {}
        self._issuing = threading.Lock()
        self._issue = self.issue
        self._broken = engine.broken
        self.handle = tracing.publish(name, self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return (
            f"<Channel {self.name!r} rank={self.info.rank} world_size={self.info.world_size} "
            f"device={self.device} {state}>"
        )

    def issue(self, collective: Collective, tensors: tuple[torch.Tensor, ...], out: Any) -> Any:
        """Check, plan and launch a call; what has been checked once is only looked up."""
        if self.closed or self._broken[0]:
            self._check_usable()
        try:
            if out is None:
                return self._run_allocating(collective, tensors)
            targets = out if type(out) is tuple else _as_tuple(collective, out)
            every = tensors + targets
            key = (collective, *map(id, every))
            call = self._bound.get(key)
            if call is None or call.addresses != [*map(data_ptr, every)]:
                call = self._bind(key, collective, tensors, targets)
        except ForeignError:
            return interop.issue(self, collective, tensors, out)
        if call.launch is not None:
            call.launch.enqueue()
        else:
            self._run_on_host(call, tensors, targets)
        return out

    def _run_allocating(self, collective: Collective, tensors: tuple[torch.Tensor, ...]) -> Any:
        call = self._planned_call(collective, tensors, 16)
        outputs = [
            torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in call.outputs
        ]
        if call.launch is not None:
            addresses = [tensor.data_ptr() for tensor in (*tensors, *outputs)]
            with self._issuing:
                call.launch.arguments.point_to(addresses)
                call.launch.enqueue()
        else:
            self._run_on_host(call, tensors, outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def result_dtypes(
        self, collective: Collective, tensors: tuple[torch.Tensor, ...]
    ) -> list[torch.dtype]:
        """Check a call that allocates its outputs, and return their dtypes."""
        return [dtype for _, dtype in self._planned_call(collective, tensors, 16).outputs]

    def _run_on_host(
        self, call: Call, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        engine = self.engine
        if call.plan.grid and isinstance(engine, ReferenceEngine):
            with ranges.around(call.plan.op) if engine.nvtx else nullcontext():
                engine.execute(call.collective, call.plan, tensors, outputs)

    def _planned_call(
        self, collective: Collective, tensors: tuple[torch.Tensor, ...], alignment: int
    ) -> Call:
        """Return a call for tensors like these and outputs of this alignment."""
        try:
            key = (collective, alignment, *map(key_of, tensors))
        except (AttributeError, TypeError, RuntimeError):
            check_inputs(collective.name, tensors, collective.num_inputs, self.device)
            raise
        call = self._planned.get(key)
        if call is None:
            call = self._make_call(collective, tensors, alignment)
            _remember(self._planned, key, call)
        return call

    def _make_call(
        self, collective: Collective, tensors: tuple[torch.Tensor, ...], alignment: int
    ) -> Call:
        """Check and plan a call; load its kernel."""
        check_inputs(collective.name, tensors, collective.num_inputs, self.device)
        info = replace(self.info, output_alignment=alignment)
        metas = [meta_of(tensor) for tensor in tensors]
        pieces: tuple[Piece, ...] = ()
        if isinstance(self.engine, ReferenceEngine):  # no call is too large for it
            plan = make_plan(collective, any_rows(collective, info), metas)
            check_plan(collective, plan, info, 0 if collective.row_inputs else plan.staged_nbytes)
        else:
            plan, pieces = plan_call(collective, info, metas)
        outputs = tuple((spec.shape, torch_dtype(spec.dtype)) for spec in plan.outputs)
        call = Call(collective, plan, outputs, pieces, None, None)
        return self._pointed(call, [0] * (len(tensors) + len(outputs)))

    def _pointed(self, call: Call, addresses: list[int]) -> Call:
        """Return a call with what launches it on these addresses; as it is without a GPU."""
        engine, plan = self.engine, call.plan
        if not isinstance(engine, CudaEngine) or not plan.grid:
            return call
        if call.pieces:

            def bind(plan: Plan) -> BoundLaunch:
                kernel = engine.kernel_for(owner_of(call.collective, plan), plan)
                return engine.bind(kernel, plan, [0] * len(addresses))

            return replace(call, launch=PieceLaunches(call.pieces, bind, addresses))
        kernel = call.kernel or engine.kernel_for(call.collective, plan)
        return replace(call, kernel=kernel, launch=engine.bind(kernel, plan, addresses))

    def _bind(
        self,
        key: tuple[object, ...],
        collective: Collective,
        tensors: tuple[torch.Tensor, ...],
        targets: tuple[torch.Tensor, ...],
    ) -> Call:
        """Check a call with given outputs; remember it for as long as its tensors live.

        A remembered call is recognised by the tensor objects and their addresses. That misses a
        tensor whose shape was changed in place and whose memory was not.
        """
        check_inputs(collective.name, tensors, collective.num_inputs, self.device)
        alignment = min(map(alignment_of, targets), default=16)
        call = self._planned_call(collective, tensors, alignment)
        check_outputs(call.plan.op, targets, call.plan.outputs, tensors)
        addresses = [tensor.data_ptr() for tensor in (*tensors, *targets)]
        call = self._pointed(call, addresses)
        bound = self._bound

        def forget(_: object) -> None:
            bound.pop(key, None)

        lives = [weakref.ref(tensor, forget) for tensor in (*tensors, *targets)]
        call = replace(call, addresses=addresses, lives=lives)
        _remember(bound, key, call)
        return call

    def protocols(self) -> list[str]:
        """Return the protocols of the calls so far; before the first, what was asked for."""
        if isinstance(self.engine, ReferenceEngine):
            return [self.engine.protocol]
        plans = [plan for call in list(self._planned.values()) for plan in call.plans]
        used = {name for plan in plans for name in plan.kernel.variant}
        return sorted(KNOWN_PROTOCOLS & used) or [self.info.protocol]

    def choices(self, source: str) -> dict[str, list[str]]:
        """Return which protocols the calls so far got, and why, by operation.

        Args:
            source: Of the limits of `auto`.
        """
        found: dict[str, dict[str, None]] = {}
        for call in list(self._planned.values()):
            for plan in call.plans if call.plan.exchanged else ():
                found.setdefault(plan.op, {})[self._reason(plan, source)] = None
        return {op: list(reasons) for op, reasons in found.items()}

    def _reason(self, plan: Plan, source: str) -> str:
        if isinstance(self.engine, ReferenceEngine):
            return f"{self.engine.protocol}: {self.engine.why}"
        info = self.info
        protocol = next((name for name in plan.kernel.variant if name in KNOWN_PROTOCOLS), None)
        if protocol is None:
            return "the plugin's own"
        staged = plan.staged_nbytes // (2 if protocol == "tagged" else 1)
        received = staged * info.world_size
        return explain(info.protocol, str(protocol), received, info.limits, source)

    def stats(self) -> ChannelStats:
        """Return what this rank has counted on this channel. Does not synchronise the device.

        Local, from any thread; also of a broken channel.

        Raises:
            ClosedError: The channel is closed.
            UnsupportedError: `Config.stats` is off.
            CudaError: The device did not answer.
        """
        self._check_open()
        rank, counters = self.info.rank, self.engine.counters
        if counters is None:
            raise UnsupportedError(
                "nothing is counted; set Config.stats=True, or PCIE_COMM_STATS=1, on this rank",
                reason="Config.stats is off",
                rank=rank,
            )
        return channel_stats(self.name, rank, self.info.world_size, counters.read())

    def check(self) -> None:
        """Raise what broke the channel, if anything did. Does not synchronise the device.

        Raises:
            ClosedError: The channel is closed.
            PeerTimeoutError, MismatchError, PeerAbortedError, PeerDiedError, BusyError: A launch
                gave up, or
                would: a peer died, or a rank aborted.
        """
        self._check_open()
        failure = self.engine.failure()
        if failure is not None:
            raise failure

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"channel {self.name!r} is closed", rank=self.info.rank)

    def _check_usable(self) -> None:
        self._check_open()
        failure = self.engine.failure()
        if failure is not None:
            raise BrokenError(
                f"channel {self.name!r} is broken since {type(failure).__name__}: {failure}; "
                "close the group and build a new one",
                rank=self.info.rank,
            ) from failure

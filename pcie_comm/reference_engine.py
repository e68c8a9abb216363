"""Calls whose results are the plugin's reference in plain torch, however the bytes come together.

An engine derives from this one and says in `_exchange` how every rank's inputs get to this rank:
through slabs (host_engine.py), or through torch.distributed (dist_engine.py).
"""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import torch

from .counters import HostCounters
from .errors import BusyError, ClosedError, CommError
from .kernels.collective import Collective, Plan
from .kernels.plan_checks import run_reference
from .layout import STAGED_ALIGNMENT, align_up
from .tensors import byte_view
from .watch.cause import Cause


class ReferenceEngine(ABC):
    """Runs calls of one rank, synchronously: a call returns when its outputs are written.

    Args:
        rank: Group rank.
        timeout_s: Longest wait for a peer.

    Attributes:
        protocol, why: What `describe` says of every call.
        counters: None if nothing is counted.
        nvtx: Whether calls are marked for profilers.
        waits_jointly: Calls wait for all peers at once.
    """

    waits_jointly = False

    def __init__(self, rank: int, timeout_s: float, protocol: str, why: str) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self.protocol = protocol
        self.why = why
        self.epoch = 0
        self.peer_state: Callable[[int], str] = lambda peer: ""
        self._cause: Cause | None = None
        self._failure: CommError | None = None
        self.broken = [0]  # not 0 once the channel is: read before every call
        self._in_use = threading.Lock()
        self._ended = False
        self.counters: HostCounters | None = None
        self.nvtx = False

    def observe(self, stats: bool, nvtx: bool) -> None:
        """Count calls and waits from now on, or mark calls for profilers, or both."""
        self.counters = HostCounters(self.rank, self.waits_jointly) if stats else None
        self.nvtx = nvtx

    def prepare(self, collective: Collective, protocols: Collection[str]) -> None:  # noqa: B027
        """Nothing to load: the reference is the kernel."""

    def failed(self) -> bool:
        """Tell whether the channel is broken."""
        return self.broken[0] != 0

    def failure(self) -> CommError | None:
        """Return what broke the channel, or None."""
        if self._failure is None and self._cause is not None:
            return self._cause.error(self.rank)
        return copy.copy(self._failure)  # a raised error collects frames, one more each time

    def abort(self, cause: Cause) -> None:
        """Make a waiting call raise `cause`, and every later one fail; the first one stays."""
        self._cause = self._cause or cause
        self.broken[0] = 1

    def seed_epoch(self, epoch: int) -> None:
        """Set the counter, on every rank alike; for tests of its wrap."""
        self.epoch = epoch

    def execute(
        self,
        collective: Collective,
        plan: Plan,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Run one call; return when the outputs are written.

        Raises:
            PeerTimeoutError: A peer did not arrive within the timeout.
            MismatchError: A peer made another call.
            PeerAbortedError, PeerDiedError: `abort` was called.
            BusyError: Another thread is in a call on this channel; nothing was done.
            ClosedError: The channel was closed meanwhile; nothing was done.
            UnsupportedError: The plugin's reference fails, or does not return what was planned.
        """
        shards: Sequence[Sequence[torch.Tensor]] = [inputs]
        if plan.exchanged:
            if not self._in_use.acquire(blocking=False):
                raise BusyError(
                    f"{plan.op} was called while another thread is in a call on this channel; "
                    "make them one after another, or give each thread a channel",
                    rank=self.rank,
                    op=plan.op,
                )
            try:
                if self._ended:
                    raise ClosedError(
                        "the channel was closed; build a new group", rank=self.rank, op=plan.op
                    )
                shards = self._exchange_or_break(plan, inputs)
            finally:
                self._in_use.release()
        with torch.inference_mode():  # as kernels do: bytes are written, gradients are not tracked
            results = run_reference(collective, self.rank, shards, outputs)
            for output, value in zip(outputs, results, strict=True):
                output.copy_(value)

    def _exchange_or_break(
        self, plan: Plan, inputs: Sequence[torch.Tensor]
    ) -> list[Sequence[torch.Tensor]]:
        try:
            return self._exchange(plan, inputs)
        except BaseException as error:
            # Whatever ended it, peers may still read this epoch's slot: no later call may run.
            # The frames of a raised error hold views of the slabs: a copy is kept.
            self._failure = (
                copy.copy(error) if isinstance(error, CommError) else _interrupted(error)
            )
            self.broken[0] = 1
            raise

    @abstractmethod
    def _exchange(self, plan: Plan, inputs: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """Return every rank's inputs, in rank order; what is not exchanged is the own."""

    def synchronize(self) -> None:
        """Wait for a call of another thread, and begin no further one.

        Bounded, since every call is.
        """
        there = self._in_use.acquire(timeout=self.timeout_s + 1.0)
        self._ended = True
        if there:
            self._in_use.release()

    @abstractmethod
    def close(self) -> None:
        """Give back what the engine holds. Requires: `synchronize` came before. Idempotent."""


def likes(plan: Plan, payload: Sequence[torch.Tensor], ranks: int) -> list[list[torch.Tensor]]:
    """Return by rank tensors that are shaped as those it exchanges; without memory, if not own."""
    if not plan.shards:
        return [list(payload)] * ranks
    return [
        [
            torch.empty(shape, dtype=one.dtype, device="meta")
            for shape, one in zip(shapes, payload, strict=True)
        ]
        for shapes in plan.shards
    ]


def packed_nbytes(payload: Sequence[torch.Tensor]) -> int:
    """Return the bytes of tensors that lie one behind the other, each on a boundary of its own."""
    sizes = (tensor.numel() * tensor.itemsize for tensor in payload)
    return sum(align_up(size, STAGED_ALIGNMENT) for size in sizes)


def pack(payload: Sequence[torch.Tensor], row: torch.Tensor) -> None:
    """Write the bytes of dense tensors to a row of bytes; see packed_nbytes."""
    offset = 0
    for tensor in payload:
        data = byte_view(tensor)
        row[offset : offset + len(data)] = data
        offset += align_up(len(data), STAGED_ALIGNMENT)


def unpack(row: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in a row of bytes, of the shapes and dtypes of others, as views."""
    found, offset = [], 0
    for tensor in like:
        nbytes = tensor.numel() * tensor.itemsize
        found.append(row[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape))
        offset += align_up(nbytes, STAGED_ALIGNMENT)
    return found


def _interrupted(error: BaseException) -> CommError:
    return CommError(f"a call was interrupted by {type(error).__name__}: {error}")

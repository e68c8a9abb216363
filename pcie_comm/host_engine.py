"""A channel's calls without a GPU: the protocol of kernels/protocol.py, spoken by the host.

Bytes are staged in the slabs, flags are raised and awaited exactly as kernels do it; what comes
out is handed to the plugin's reference in plain torch.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from .errors import BusyError, CommError, MismatchError, PeerTimeoutError
from .kernels.plan_checks import run_reference
from .kernels.registry import Collective, Plan
from .layout import (
    EPOCH_MASK,
    STAGED_ALIGNMENT,
    SlabLayout,
    align_up,
    flag_value,
    next_epoch,
    slot_of,
)
from .tensors import byte_view, dense
from .transport.base import PeerMap
from .watch.cause import Cause, doubts

SPINS_BEFORE_SLEEP = 200
SLEEP_S = 20e-6


class HostEngine:
    """Runs calls of one rank on the CPU.

    Args:
        rank: Group rank.
        layout: Of every slab.
        peers: The mapped slabs.
        protocol: `pull`; every other one is a push here.
        timeout_s: Longest wait for a peer.
    """

    def __init__(
        self, rank: int, layout: SlabLayout, peers: PeerMap, protocol: str, timeout_s: float
    ) -> None:
        self.rank = rank
        self.layout = layout
        self.push = protocol != "pull"
        self.timeout_s = timeout_s
        self.epoch = 0
        self.peer_state: Callable[[int], str] = lambda peer: ""
        self._cause: Cause | None = None
        self._failure: CommError | None = None
        self.broken = [0]  # not 0 once the channel is: read before every call
        self._bytes = [np.frombuffer(view, dtype=np.uint8) for view in peers.views]
        self._fence = threading.Lock()
        self._in_use = threading.Lock()

    def prepare(self, collective: Collective, protocols: Collection[str]) -> None:
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
                shards = self._exchange(plan, inputs)
            except BaseException as error:
                # Whatever ended it, peers may still read this epoch's slot: no later call may run.
                # The frames of a raised error hold views of the slabs: a copy is kept.
                self._failure = (
                    copy.copy(error) if isinstance(error, CommError) else _interrupted(error)
                )
                self.broken[0] = 1
                raise
            finally:
                self._in_use.release()
        with torch.inference_mode():  # as kernels do: bytes are written, gradients are not tracked
            results = run_reference(collective, self.rank, shards, outputs)
            for output, value in zip(outputs, results, strict=True):
                output.copy_(value)

    def payload_nbytes(self, plan: Plan, inputs: Sequence[torch.Tensor]) -> int:
        """Return the bytes a rank stages here: whole inputs, where a kernel may stage less."""
        sizes = (inputs[i].numel() * inputs[i].itemsize for i in plan.exchanged)
        return sum(align_up(size, STAGED_ALIGNMENT) for size in sizes)

    def _exchange(self, plan: Plan, inputs: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        self.epoch = next_epoch(self.epoch)
        slot = slot_of(self.epoch)
        push = self.push
        payload = [dense(inputs[i]) for i in plan.exchanged]
        for target in range(len(self._bytes)) if push else (self.rank,):
            writer = self.rank if push else 0
            self._write(target, self.layout.segment_offset(slot, writer), payload)
        value = flag_value(self.epoch, plan.signature)
        with self._fence:  # an atomic read-modify-write: the payload is visible before the flags
            pass
        for peer in range(len(self._bytes)):
            self._flag(peer, slot, self.rank)[0] = value
        self._await_all(plan, slot, value)
        with self._fence:
            pass
        shards: list[Sequence[torch.Tensor]] = []
        for peer in range(len(self._bytes)):
            source, writer = (self.rank, peer) if push else (peer, 0)
            fetched = self._read(source, self.layout.segment_offset(slot, writer), payload)
            shard = list(inputs)
            for index, tensor in zip(plan.exchanged, fetched, strict=True):
                shard[index] = tensor
            shards.append(shard)
        return shards

    def _flag(self, owner: int, slot: int, writer: int) -> np.ndarray:
        offset = self.layout.flag_offset(slot, 0, writer)
        return self._bytes[owner][offset : offset + 8].view(np.uint64)

    def _write(self, target: int, offset: int, payload: Sequence[torch.Tensor]) -> None:
        for tensor in payload:
            data = byte_view(tensor).numpy()
            self._bytes[target][offset : offset + data.size] = data
            offset += align_up(data.size, STAGED_ALIGNMENT)

    def _read(self, source: int, offset: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        fetched = []
        for tensor in like:
            copy = torch.empty_like(tensor)  # dense, as `tensor` is
            view = byte_view(copy).numpy()
            view[:] = self._bytes[source][offset : offset + view.size]
            fetched.append(copy)
            offset += align_up(view.size, STAGED_ALIGNMENT)
        return fetched

    def _await_all(self, plan: Plan, slot: int, value: int) -> None:
        started = time.monotonic_ns()
        for peer in range(len(self._bytes)):
            flag = self._flag(self.rank, slot, peer)
            spins = 0
            while int(flag[0]) != value:
                spins += 1
                if spins > SPINS_BEFORE_SLEEP:
                    self._check_hope(plan, slot, peer, time.monotonic_ns() - started)
                    time.sleep(SLEEP_S)

    def _check_hope(self, plan: Plan, slot: int, peer: int, elapsed_ns: int) -> None:
        """Raise if waiting on for `peer` makes no sense."""
        self._check_same_call(plan, slot, peer)
        cause, late = self._cause, elapsed_ns > self.timeout_s * 1e9
        if cause is None and not late:
            return
        for other in range(len(self._bytes)):  # a mismatch says more than what followed from it
            self._check_same_call(plan, slot, other)
        if cause is not None:
            raise cause.error(self.rank, plan.op, self.epoch)
        seen = int(self._flag(self.rank, slot, peer)[0]) & EPOCH_MASK
        raise PeerTimeoutError(
            f"rank {peer} did not arrive in time: wanted epoch={self.epoch}, seen={seen}, "
            f"elapsed_s={elapsed_ns / 1e9:.3f}; {doubts(self.peer_state(peer))}",
            wanted=self.epoch,
            seen=seen,
            elapsed_ns=elapsed_ns,
            rank=self.rank,
            peer=peer,
            op=plan.op,
            epoch=self.epoch,
        )

    def _check_same_call(self, plan: Plan, slot: int, peer: int) -> None:
        """Raise if `peer` has made another call at this epoch."""
        seen = int(self._flag(self.rank, slot, peer)[0])
        if not seen or seen & EPOCH_MASK != self.epoch or seen >> 32 == plan.signature:
            return
        raise MismatchError(
            f"rank {self.rank} called {plan.op}, rank {peer} made another call, or one with "
            "other shapes; all ranks must make the same calls in the same order",
            values={self.rank: plan.signature, peer: seen >> 32},
            rank=self.rank,
            peer=peer,
            op=plan.op,
            epoch=self.epoch,
        )

    def synchronize(self) -> None:
        """Wait for a call of another thread; bounded, since every call is."""
        if self._in_use.acquire(timeout=self.timeout_s + 1.0):
            self._in_use.release()

    def close(self) -> None:
        """Drop the views of the slabs, so that the transport can unmap them."""
        self._bytes = []


def _interrupted(error: BaseException) -> CommError:
    return CommError(f"a call was interrupted by {type(error).__name__}: {error}")

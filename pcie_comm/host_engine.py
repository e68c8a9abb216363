"""A channel's calls without a GPU: the protocol of kernels/protocol.py, spoken by the host.

Bytes are staged in the slabs, flags are raised and awaited exactly as kernels do it; what comes
out is handed to the plugin's reference in plain torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch

from .counters import HostCounters
from .errors import MismatchError, PeerTimeoutError
from .kernels.collective import Plan
from .layout import (
    EPOCH_MASK,
    STAGED_ALIGNMENT,
    SlabLayout,
    align_up,
    flag_value,
    next_epoch,
    slot_of,
)
from .reference_engine import ReferenceEngine, likes, pack, packed_nbytes, unpack
from .tensors import byte_view, dense
from .transport.base import PeerMap
from .watch.cause import doubts

SPINS_BEFORE_SLEEP = 200
SLEEP_S = 20e-6


class HostEngine(ReferenceEngine):
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
        self.push = protocol != "pull"
        spoken = "push" if self.push else "pull"
        super().__init__(rank, timeout_s, spoken, "on a CPU, push unless pull is asked for")
        self.layout = layout
        self._bytes = [np.frombuffer(view, dtype=np.uint8) for view in peers.views]
        self._fence = threading.Lock()

    def _exchange(self, plan: Plan, inputs: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        payload = [dense(inputs[i]) for i in plan.exchanged]
        like = likes(plan, payload, len(self._bytes))
        nbytes = max(map(packed_nbytes, like))
        if nbytes <= self.layout.segment_nbytes:
            brought = self._round(plan, payload, like)
        else:
            brought = self._rounds(plan, payload, like, nbytes)
        shards: list[Sequence[torch.Tensor]] = []
        for fetched in brought:
            shard = list(inputs)
            for index, tensor in zip(plan.exchanged, fetched, strict=True):
                shard[index] = tensor
            shards.append(shard)
        return shards

    def _rounds(
        self,
        plan: Plan,
        payload: Sequence[torch.Tensor],
        like: Sequence[Sequence[torch.Tensor]],
        nbytes: int,
    ) -> list[list[torch.Tensor]]:
        """Exchange what is larger than a slot: the same, slot by slot, an epoch for each.

        The first flag names the whole call, as every one does.
        """
        own = torch.empty(nbytes, dtype=torch.uint8)
        pack(payload, own)
        rows = [torch.empty_like(own) for _ in self._bytes]
        step = self.layout.segment_nbytes
        for begin in range(0, nbytes, step):
            data = [own[begin : begin + step]]
            brought = self._round(plan, data, [data] * len(rows))
            for row, (piece,) in zip(rows, brought, strict=True):
                row[begin : begin + step] = piece
        return [unpack(row, shapes) for row, shapes in zip(rows, like, strict=True)]

    def _round(
        self,
        plan: Plan,
        payload: Sequence[torch.Tensor],
        like: Sequence[Sequence[torch.Tensor]],
    ) -> list[list[torch.Tensor]]:
        """Exchange what fits a slot; return every rank's, in rank order, shaped as `like`."""
        self.epoch = next_epoch(self.epoch)
        slot = slot_of(self.epoch)
        push = self.push
        for target in range(len(self._bytes)) if push else (self.rank,):
            writer = self.rank if push else 0
            self._write(target, self.layout.segment_offset(slot, writer), payload)
        value = flag_value(self.epoch, plan.signature)
        if self.counters is not None:
            peers = len(self._bytes) - 1
            self.counters.note_call(packed_nbytes(payload) * peers)
        with self._fence:  # an atomic read-modify-write: the payload is visible before the flags
            pass
        for peer in range(len(self._bytes)):
            self._flag(peer, slot, self.rank)[0] = value
        if self.counters is None:
            self._await_all(plan, slot, value)
        else:
            self._await_each(plan, slot, value, self.counters)
        with self._fence:
            pass
        brought = []
        for peer in range(len(self._bytes)):
            source, writer = (self.rank, peer) if push else (peer, 0)
            offset = self.layout.segment_offset(slot, writer)
            brought.append(self._read(source, offset, like[peer]))
        return brought

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
            copy = torch.empty_like(tensor, device="cpu")  # dense, as `tensor` is
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

    def _await_each(self, plan: Plan, slot: int, value: int, counters: HostCounters) -> None:
        """As `_await_all`, but side by side, so that each wait is timed; a wait in vain counts."""
        started = time.monotonic_ns()
        missing = {p: self._flag(self.rank, slot, p) for p in range(len(self._bytes))}
        spins = 0
        try:
            while missing:
                for peer in [p for p, flag in missing.items() if int(flag[0]) == value]:
                    del missing[peer]
                    if peer != self.rank:
                        counters.note_wait(peer, time.monotonic_ns() - started)
                spins += 1
                if missing and spins > SPINS_BEFORE_SLEEP:
                    elapsed_ns = time.monotonic_ns() - started
                    self._check_hope(plan, slot, next(iter(missing)), elapsed_ns)
                    time.sleep(SLEEP_S)
        finally:
            for peer in missing:
                counters.note_wait(peer, time.monotonic_ns() - started)

    def _check_hope(self, plan: Plan, slot: int, peer: int, elapsed_ns: int) -> None:
        """Raise if waiting on for `peer` makes no sense."""
        for other in range(len(self._bytes)):  # first: it says more than what follows from it
            self._check_same_call(plan, slot, other)
        cause, late = self._cause, elapsed_ns > self.timeout_s * 1e9
        if cause is None and not late:
            return
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

    def close(self) -> None:
        """Drop the views of the slabs, so that the transport can unmap them."""
        self._bytes = []

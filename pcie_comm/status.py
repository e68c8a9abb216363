"""The status record of a channel: how a launch on the device tells the host why it gave up."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from . import driver
from .errors import (
    BusyError,
    CommError,
    MismatchError,
    PeerAbortedError,
    PeerTimeoutError,
)
from .layout import TIMER_SHIFT, StatusLayout
from .watch.cause import Cause, doubts


@dataclass(frozen=True)
class Failure:
    """The facts of a status record; see StatusLayout."""

    code: int
    peer: int
    epoch: int
    wanted_signature: int
    seen_epoch: int
    seen_signature: int
    elapsed_ns: int
    block: int

    def error(
        self, rank: int, ops: dict[int, str], cause: Cause | None = None, peer_state: str = ""
    ) -> CommError:
        """Return the failure as the error the user sees.

        Args:
            rank: The rank that reports.
            ops: Signature -> operation, of the calls this rank made.
            cause: Why the host set the abort word, if it did.
            peer_state: How the peer fares, in words, if that is known.
        """
        if self.code == StatusLayout.CODE_ABORTED_BY_HOST:
            return (
                cause.error(rank) if cause else PeerAbortedError("the group was aborted", rank=rank)
            )
        op = ops.get(self.wanted_signature)
        if self.code == StatusLayout.CODE_ABORTED and cause is not None:
            return cause.error(rank, op, self.epoch)
        if self.code == StatusLayout.CODE_BUSY:
            return BusyError(
                f"two launches of one channel ran at the same time, one of them {op}: replays, or "
                "a replay and a call, on streams that do not wait for each other. Outputs since "
                "the last check are not to be trusted. Order them by events, or use two channels",
                rank=rank,
                op=op,
                epoch=self.epoch,
            )
        facts: dict[str, Any] = {"rank": rank, "peer": self.peer, "op": op, "epoch": self.epoch}
        elapsed = f"elapsed_s={self.elapsed_ns / 1e9:.3f}"
        if self.code == StatusLayout.CODE_MISMATCH:
            other = ops.get(self.seen_signature, f"a call with signature {self.seen_signature:#x}")
            return MismatchError(
                f"rank {rank} called {op}, rank {self.peer} called {other} with other shapes or "
                "arguments at the same epoch; all ranks must make the same calls in the same order",
                values={rank: self.wanted_signature, self.peer: self.seen_signature},
                **facts,
            )
        if self.code == StatusLayout.CODE_ABORTED:
            return PeerAbortedError(f"the wait was aborted, {elapsed}", **facts)
        return PeerTimeoutError(
            f"rank {self.peer} did not arrive in time: wanted epoch={self.epoch}, "
            f"seen={self.seen_epoch}, {elapsed}; {doubts(peer_state)}",
            wanted=self.epoch,
            seen=self.seen_epoch,
            elapsed_ns=self.elapsed_ns,
            **facts,
        )


class StatusRecord:
    """One status record in pinned host memory, written by kernels, read without synchronising.

    Raises:
        CudaError: Pinned memory is not to be had.
    """

    def __init__(self) -> None:
        flags = 0x01 | 0x02  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
        self._pointer = int(driver.call("cuMemHostAlloc", StatusLayout.NBYTES, flags))
        ctypes.memset(self._pointer, 0, StatusLayout.NBYTES)
        self.device_address = int(driver.call("cuMemHostGetDevicePointer", self._pointer, 0))
        buffer = (ctypes.c_uint32 * (StatusLayout.NBYTES // 4)).from_address(self._pointer)
        self.words = memoryview(buffer).cast("B").cast("I")

    @property
    def abort_address(self) -> int:
        """Device address of the abort word."""
        return self.device_address + StatusLayout.ABORT

    def failed(self) -> bool:
        """Tell whether a launch gave up, or the channel was aborted. A read of one word."""
        return self.words[StatusLayout.CODE // 4] != StatusLayout.CODE_OK

    def abort(self) -> None:
        """Make every waiting launch give up, and mark the channel as broken."""
        self.words[StatusLayout.ABORT // 4] = 1
        if not self.failed():
            self.words[StatusLayout.CODE // 4] = StatusLayout.CODE_ABORTED_BY_HOST

    def read(self) -> Failure | None:
        """Return what broke the channel, or None."""
        word = self.words
        if not self.failed():
            return None

        def at(offset: int) -> int:
            return int(word[offset // 4])

        return Failure(
            code=at(StatusLayout.CODE),
            peer=at(StatusLayout.PEER),
            epoch=at(StatusLayout.EPOCH),
            wanted_signature=at(StatusLayout.WANTED_SIGNATURE),
            seen_epoch=at(StatusLayout.SEEN_EPOCH),
            seen_signature=at(StatusLayout.SEEN_SIGNATURE),
            elapsed_ns=at(StatusLayout.ELAPSED) << TIMER_SHIFT,
            block=at(StatusLayout.BLOCK),
        )

    def free(self) -> None:
        """Give the memory back. Requires: no launch of the channel is pending."""
        pointer, self._pointer = self._pointer, 0
        if pointer:
            self.words = memoryview(bytearray(StatusLayout.NBYTES)).cast("I")
            driver.call("cuMemFreeHost", pointer)

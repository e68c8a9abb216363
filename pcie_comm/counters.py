"""Where a channel's counters are kept and how they are read: on the host, or on the device."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from . import driver
from .errors import ClosedError, CudaError
from .layout import MAX_WORLD, CountLayout
from .stats import WORDS, Records
from .transport.cuda_memory import CudaDevice

READ_TIMEOUT_S = 2.0
"""Longest that a copy from the device may take: it waits for no kernel."""

_PAUSE_S = 20e-6
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_TOTAL, _LONGEST, _HISTOGRAM = (
    offset // 8 for offset in (CountLayout.TOTAL, CountLayout.LONGEST, CountLayout.HISTOGRAM)
)


class HostCounters:
    """Counters of calls that the host makes itself. Written by one call at a time.

    Args:
        rank: The own rank.
        joint: Whether calls wait for all peers at once.
    """

    def __init__(self, rank: int, joint: bool) -> None:
        self._rank = rank
        self._by_rank = np.zeros((MAX_WORLD, WORDS), np.uint64)
        self._joint = np.zeros(WORDS, np.uint64) if joint else None

    def note_call(self, sent_nbytes: int) -> None:
        """Count a call of the own rank."""
        _count(self._by_rank[self._rank], sent_nbytes)

    def note_wait(self, peer: int, took_ns: int) -> None:
        """Count a wait for a peer, or for all where they are joint."""
        _count(self._by_rank[peer] if self._joint is None else self._joint, took_ns)

    def read(self) -> Records:
        """Return a copy of the records."""
        return Records(self._by_rank.copy(), None if self._joint is None else self._joint.copy())


def _count(record: np.ndarray, value: int) -> None:
    """Do what waits.count does on a device."""
    record[_TOTAL] += np.uint64(value)
    record[_LONGEST] = max(int(record[_LONGEST]), value)
    bucket = min(max(value, 1).bit_length() - 1, CountLayout.BUCKETS - 1)
    record[_HISTOGRAM + bucket] += np.uint64(1)


class DeviceCounters:
    """Counters that kernels write, read by a copy on a stream of its own.

    The copy waits for no kernel and no other stream. Words are copied whole, one after another,
    while launches may add to them: those of one record can be a launch apart.

    Args:
        device: Whose memory it is.
        address: Of the records.

    Raises:
        CudaError: Pinned memory or a stream is not to be had.
    """

    def __init__(self, device: CudaDevice, address: int) -> None:
        self._device = device
        self._address = address
        self._nbytes = MAX_WORLD * CountLayout.NBYTES
        self._reading = threading.Lock()
        self._pending = False
        with device.current():
            _, greatest = driver.call("cuCtxGetStreamPriorityRange")
            self._stream = driver.call("cuStreamCreateWithPriority", 1, greatest)  # NON_BLOCKING
            self._pinned = int(driver.call("cuMemHostAlloc", self._nbytes, 0x01))  # PORTABLE

    def read(self) -> Records:
        """Return a copy of the records, as the device has them now.

        Raises:
            ClosedError: `close` was called.
            CudaError: The context is lost, or the copy does not end within READ_TIMEOUT_S.
        """
        with self._reading, self._device.current(), _relaxed():
            if not self._pinned:
                raise ClosedError("the group was closed while its counters were read")
            deadline = time.monotonic() + READ_TIMEOUT_S
            self._finish(deadline)  # of a reading that gave up
            driver.call(
                "cuMemcpyDtoHAsync", self._pinned, self._address, self._nbytes, self._stream
            )
            self._pending = True
            self._finish(deadline)
            words = ctypes.string_at(self._pinned, self._nbytes)
        return Records(np.frombuffer(words, np.uint64).reshape(MAX_WORLD, WORDS))

    def _finish(self, deadline: float) -> None:
        """Wait for the copy that is under way, if one is."""
        while self._pending:
            (status,) = driver.bindings().cuStreamQuery(self._stream)
            if int(status) != _NOT_READY:
                driver.check("cuStreamQuery", (status,))
                self._pending = False
            elif time.monotonic() > deadline:
                raise CudaError(
                    f"the counters did not come from the device within {READ_TIMEOUT_S} s; "
                    "try again, or see whether the device hangs",
                    name="CUDA_ERROR_NOT_READY",
                    call="cuStreamQuery",
                )
            else:
                time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Give stream and pinned memory back. Requires: no reading is to come. Idempotent."""
        with self._reading:
            pinned, self._pinned = self._pinned, 0
            if pinned:
                with self._device.current():
                    driver.call("cuStreamDestroy", self._stream)
                    driver.call("cuMemFreeHost", pinned)


@contextmanager
def _relaxed() -> Iterator[None]:
    """Let this thread query a stream though another one may be capturing.

    A capture in the default mode forbids queries in every thread, and fails if one is made.
    """
    modes = driver.bindings().CUstreamCaptureMode
    before = driver.call("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        driver.call("cuThreadExchangeStreamCaptureMode", before)

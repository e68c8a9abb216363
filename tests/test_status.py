"""The status record of a channel, without a GPU: the driver's memory is this process's own."""

from __future__ import annotations

import ctypes

import pytest

from pcie_comm import BusyError, MismatchError, PeerAbortedError, PeerTimeoutError, driver
from pcie_comm.layout import TIMER_SHIFT, StatusLayout
from pcie_comm.status import Failure, StatusRecord


@pytest.fixture
def memory(monkeypatch):
    """Serve pinned memory from a buffer full of garbage; note what is freed."""
    buffer = ctypes.create_string_buffer(b"\xff" * StatusLayout.NBYTES, StatusLayout.NBYTES)
    freed = []
    answers = {
        "cuMemHostAlloc": lambda nbytes, flags: ctypes.addressof(buffer),
        "cuMemHostGetDevicePointer": lambda pointer, flags: pointer + (1 << 40),
        "cuMemFreeHost": freed.append,
    }
    monkeypatch.setattr(driver, "call", lambda name, *arguments: answers[name](*arguments))
    return buffer, freed


def write(buffer, **fields: int) -> None:
    """Write as the first device thread that gives up does."""
    for name, value in fields.items():
        place = ctypes.addressof(buffer) + getattr(StatusLayout, name)
        ctypes.memmove(place, value.to_bytes(4, "little"), 4)


def test_a_new_record_is_clean(memory):
    record = StatusRecord()
    assert not record.failed()
    assert record.read() is None
    assert record.abort_address == record.device_address + StatusLayout.ABORT


def test_what_a_kernel_wrote_becomes_an_error(memory):
    record = StatusRecord()
    write(memory[0], PEER=3, EPOCH=9, WANTED_SIGNATURE=0xABCD, SEEN_EPOCH=7, SEEN_SIGNATURE=0xEF)
    write(memory[0], ELAPSED=5_000_000_123 >> TIMER_SHIFT, BLOCK=2, CODE=StatusLayout.CODE_TIMEOUT)
    assert record.failed()
    failure = record.read()
    assert failure == Failure(StatusLayout.CODE_TIMEOUT, 3, 9, 0xABCD, 7, 0xEF, 4_999_999_488, 2)
    error = failure.error(1, {0xABCD: "all_gather_pair"})
    assert isinstance(error, PeerTimeoutError)
    assert (error.rank, error.peer, error.op, error.epoch) == (1, 3, "all_gather_pair", 9)
    assert (error.wanted, error.seen, error.elapsed_ns) == (9, 7, 4_999_999_488)
    assert "rank 3 did not arrive in time: wanted epoch=9, seen=7, elapsed_s=5.000" in str(error)


def test_launches_that_overlapped_are_told_without_a_peer(memory):
    record = StatusRecord()
    write(memory[0], PEER=1, EPOCH=9, WANTED_SIGNATURE=0xABCD, CODE=StatusLayout.CODE_BUSY)
    error = record.read().error(1, {0xABCD: "all_gather_pair"})
    assert isinstance(error, BusyError)
    assert (error.rank, error.peer, error.op, error.epoch) == (1, None, "all_gather_pair", 9)
    assert "one of them all_gather_pair" in str(error)
    assert "use two channels" in str(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (StatusLayout.CODE_MISMATCH, MismatchError),
        (StatusLayout.CODE_ABORTED, PeerAbortedError),
        (StatusLayout.CODE_ABORTED_BY_HOST, PeerAbortedError),
        (StatusLayout.CODE_TIMEOUT, PeerTimeoutError),
    ],
)
def test_every_code_is_a_class(code, kind):
    error = Failure(code, 1, 4, 10, 4, 20, 0, 0).error(0, {10: "mine", 20: "theirs"})
    assert type(error) is kind
    if kind is MismatchError:
        assert error.values == {0: 10, 1: 20}
        assert "rank 0 called mine, rank 1 called theirs" in str(error)


def test_abort_marks_the_record_and_spares_what_a_kernel_wrote(memory):
    record = StatusRecord()
    record.abort()
    assert record.words[StatusLayout.ABORT // 4] == 1
    assert record.read().code == StatusLayout.CODE_ABORTED_BY_HOST
    write(memory[0], CODE=StatusLayout.CODE_TIMEOUT)
    record.abort()
    assert record.read().code == StatusLayout.CODE_TIMEOUT


def test_a_record_that_was_freed_can_still_be_asked_and_aborted(memory):
    """`group.abort()` may come from another thread, after `close`."""
    record = StatusRecord()
    record.free()
    record.free()
    assert len(memory[1]) == 1
    ctypes.memset(memory[0], 0xFF, StatusLayout.NBYTES)
    assert not record.failed()
    record.abort()
    assert memory[0].raw == b"\xff" * StatusLayout.NBYTES, "freed memory was written to"

"""Which stream a launch goes to and what it waits for, on streams that exist only here."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from launcher import run_threads, succeeded

from pcie_comm import BusyError, cuda_engine
from pcie_comm.cuda_engine import CudaEngine

SUCCESS, INVALID_CONTEXT = 0, 201


class FakeStream:
    """A stream that notes what was enqueued on it."""

    def __init__(self, handle: int, log: list) -> None:
        self.cuda_stream = handle
        self.capturing = False
        self._log = log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append((self.cuda_stream, "waits for", other.cuda_stream))


class Fakes:
    """Streams, a current one per thread, and an engine whose launches are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list = []
        self.streams = {handle: FakeStream(handle, self.log) for handle in range(1, 5)}
        self._here = threading.local()
        self.answers: list[int] = []
        self.launching = lambda: None
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(
            cuda_engine, "current_stream_handle", lambda index: self.current.cuda_stream
        )
        monkeypatch.setattr(cuda_engine, "is_capturing", lambda: self.current.capturing)
        monkeypatch.setattr(cuda_engine.driver, "call", lambda name, *rest: self._launch(*rest))

    @property
    def current(self) -> FakeStream:
        return self._here.stream

    @contextlib.contextmanager
    def on(self, stream: FakeStream):
        before = getattr(self._here, "stream", None)
        self._here.stream = stream
        yield
        self._here.stream = before

    def _launch(self, function, *rest) -> tuple[int]:
        self.launching()
        self.log.append((rest[7], "launches", function))
        return (self.answers.pop(0) if self.answers else SUCCESS,)

    def engine(self, overlaps: bool = False) -> CudaEngine:
        engine = CudaEngine.__new__(CudaEngine)
        engine.rank, engine.world_size, engine.device = 0, 2, torch.device("cuda", 0)
        engine._control, engine._index, engine.overlaps = 1 << 20, 0, overlaps
        engine.captured = False
        engine._launching = threading.Lock()
        engine._last_stream, engine._last_handle = None, -1
        engine._cuda = SimpleNamespace(current=contextlib.nullcontext)
        return engine

    def launch(self, engine: CudaEngine, name: str, exchanged: tuple[int, ...] = (0,)):
        """Return what enqueues a launch."""
        kernel = SimpleNamespace(
            entry_point=self._launch,
            function=name,
            block=256,
            launch_overlapping=lambda arguments, grid, stream: self.log.append(
                (stream, "launches overlapping", name)
            ),
        )
        plan = SimpleNamespace(op="op", signature=7, exchanged=exchanged, grid=1, scalars=(0,))
        return engine.bind(kernel, plan, []).enqueue  # type: ignore[arg-type]


@pytest.fixture
def fakes(monkeypatch) -> Fakes:
    return Fakes(monkeypatch)


def test_b07_a_launch_on_another_stream_waits_for_the_last_one(fakes):
    engine = fakes.engine()
    first, second = fakes.launch(engine, "first"), fakes.launch(engine, "second")
    for handle, call in ((1, first), (1, second), (2, second), (2, first), (1, first)):
        with fakes.on(fakes.streams[handle]):
            call()
    assert fakes.log == [
        (1, "launches", "first"),
        (1, "launches", "second"),
        (2, "waits for", 1),
        (2, "launches", "second"),
        (2, "launches", "first"),
        (1, "waits for", 2),
        (1, "launches", "first"),
    ]


def test_a_launch_without_peers_waits_for_nobody(fakes):
    call = fakes.launch(fakes.engine(), "router", exchanged=())
    for handle in (1, 2):
        with fakes.on(fakes.streams[handle]):
            call()
    assert fakes.log == [(1, "launches", "router"), (2, "launches", "router")]


def test_b07_no_thread_comes_between_the_wait_and_the_launch_of_another(fakes):
    engine = fakes.engine()
    call = fakes.launch(engine, "op")
    inside, most, changing = [0], [0], threading.Lock()

    def launching() -> None:
        with changing:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        threading.Event().wait(0.002)
        with changing:
            inside[0] -= 1

    fakes.launching = launching

    def calls(number: int) -> None:
        with fakes.on(fakes.streams[1 + number]):
            for _ in range(20):
                call()

    succeeded(run_threads(calls, 3))
    assert most == [1]
    last = waited = fakes.log[0][0]
    for stream, what, other in fakes.log:
        if what == "waits for":
            assert other == last
            waited = stream
        else:
            assert stream in (last, waited), "it waited for the stream that launched last"
            last = stream
    assert len(fakes.log) > 60


@pytest.mark.parametrize("overlaps", [False, True])
def test_b30_a_captured_call_is_no_eager_one(fakes, overlaps):
    """It neither waits for the last eager call nor becomes it."""
    engine = fakes.engine(overlaps)
    call = fakes.launch(engine, "op")
    fakes.streams[2].capturing = True
    for handle in (1, 2, 1):
        with fakes.on(fakes.streams[handle]):
            call()
    kind = "launches overlapping" if overlaps else "launches"
    assert fakes.log == [(1, "launches", "op"), (2, kind, "op"), (1, "launches", "op")]
    assert engine.captured


def test_b30_an_eager_call_does_not_join_a_capture(fakes):
    engine = fakes.engine()
    call = fakes.launch(engine, "op")
    with fakes.on(fakes.streams[1]):
        call()
    fakes.streams[1].capturing = True
    with fakes.on(fakes.streams[2]), pytest.raises(BusyError, match=r"stream=0x1, which is being"):
        call()
    assert fakes.log == [(1, "launches", "op")]
    fakes.streams[1].capturing = False
    with fakes.on(fakes.streams[2]):
        call()
    assert fakes.log[1:] == [(2, "waits for", 1), (2, "launches", "op")]


def test_a_thread_without_the_context_launches_again_with_it(fakes):
    call = fakes.launch(fakes.engine(), "op")
    fakes.answers = [INVALID_CONTEXT]
    with fakes.on(fakes.streams[1]):
        call()
    assert fakes.log == [(1, "launches", "op")] * 2

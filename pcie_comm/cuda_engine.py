"""A channel's calls on a GPU: control block, status record, loaded kernels, launches."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from . import driver, ranges
from .config import Config
from .counters import DeviceCounters
from .errors import BusyError, CommError, CompileError, CudaError, UnsupportedError
from .kernels.collective import Collective, KernelKey, Plan
from .kernels.launch import Arguments, LoadedKernel, load
from .kernels.plan_checks import blaming, variants_of
from .kernels.store import KernelStore
from .layout import MAX_BLOCKS, TIMER_SHIFT, ControlLayout, SlabLayout, StatusLayout
from .policy import launches_at_once, places
from .status import StatusRecord
from .tensors import current_stream_handle, is_capturing
from .transport.base import PeerMap
from .transport.cuda_memory import CudaDevice
from .watch.cause import Cause

WRONG_CONTEXT = (201, 400, 709)
"""CUDA_ERROR_INVALID_CONTEXT, INVALID_HANDLE, CONTEXT_IS_DESTROYED: what a launch returns in a
thread whose current context is not the stream's."""


def sent_nbytes(plan: Plan, world_size: int) -> int:
    """Return the payload that leaves a rank in one call; see ChannelStats."""
    return plan.staged_nbytes * (world_size - 1)


class BoundLaunch(NamedTuple):
    """A launch and its arguments: `enqueue()` launches, `arguments` may be pointed elsewhere."""

    enqueue: Callable[[], None]
    arguments: Arguments


class CudaEngine:
    """Runs calls of one rank on its device. Launches go to torch's current stream.

    Args:
        rank: Group rank.
        layout: Of every slab.
        peers: The mapped slabs; None for an engine without communication.
        device: The rank's device.
        config: Settings.
        store: Where kernels come from.
        sharers: Ranks of the group that use this device.

    Attributes:
        counters: None if nothing is counted.
        nvtx: Whether calls are marked for profilers.
    """

    counters: DeviceCounters | None = None
    nvtx = False

    def __init__(
        self,
        rank: int,
        layout: SlabLayout | None,
        peers: PeerMap | None,
        device: torch.device,
        config: Config,
        store: KernelStore,
        sharers: int = 1,
    ) -> None:
        self.rank = rank
        self.world_size = len(peers.addresses) if peers else 1
        self.device = device
        self.store = store
        self.captured = False
        properties = torch.cuda.get_device_properties(device)
        self.capability = (properties.major, properties.minor)
        self.multiprocessors = properties.multi_processor_count
        self._kernels: dict[KernelKey, LoadedKernel] = {}
        self._ops: dict[int, str] = {}
        self._launching = threading.Lock()
        self._last_stream: torch.cuda.Stream | None = None
        self._last_handle = -1
        self._cause: Cause | None = None
        self.peer_state: Callable[[int], str] = lambda peer: ""
        self._control = 0
        self.overlaps = config.overlap and self.capability >= (9, 0)
        self._spares = sharers > 1 and config.max_blocks is None
        self._at_once = launches_at_once(sharers, config.overlap)
        self._index: int = device.index
        self._cuda = CudaDevice.at(device.index)
        self.status: StatusRecord | None = None
        self.broken: Sequence[int] = (0,)  # not 0 once the channel is: read before every call
        self.nvtx = config.nvtx
        if layout is not None and peers is not None:
            with self._cuda.current():
                self.status = StatusRecord()
                mirrored = layout.slot_nbytes + layout.segment_nbytes if peers.views else 0
                nbytes = ControlLayout.NBYTES + mirrored
                self._control = int(driver.call("cuMemAlloc", nbytes))
                driver.call("cuMemsetD32", self._control, 0, nbytes // 4)
                self._write_control(layout, peers, config)
            if config.stats:
                self.counters = DeviceCounters(self._cuda, self._control + ControlLayout.COUNTS)
            self.broken = self.status.words

    def _write_control(self, layout: SlabLayout, peers: PeerMap, config: Config) -> None:
        assert self.status is not None
        block = bytearray(ControlLayout.NBYTES)
        struct.pack_into("<I", block, ControlLayout.SLOT_NBYTES, layout.slot_nbytes)
        struct.pack_into("<I", block, ControlLayout.SEGMENT_NBYTES, layout.segment_nbytes)
        struct.pack_into("<I", block, ControlLayout.RELAYS, int(bool(peers.views)))
        timeout = math.ceil(config.timeout_s * 1e9) >> TIMER_SHIFT
        struct.pack_into("<I", block, ControlLayout.TIMEOUT, timeout)
        struct.pack_into("<Q", block, ControlLayout.ABORT, self.status.abort_address)
        struct.pack_into("<Q", block, ControlLayout.STATUS, self.status.device_address)
        mirror = peers.addresses[self.rank]
        if peers.views:  # in host memory: what a rank sends itself stays behind the control block
            mirror = self._control + ControlLayout.NBYTES - layout.tagged_offset(0, self.rank)
        struct.pack_into("<Q", block, ControlLayout.MIRROR, mirror % (1 << 64))
        for rank, address in enumerate(peers.addresses):
            struct.pack_into("<Q", block, ControlLayout.PEERS + 8 * rank, address)
        driver.call("cuMemcpyHtoD", self._control, bytes(block), len(block))
        driver.call("cuStreamSynchronize", 0)  # or a kernel on another stream could come before it

    def seed_epoch(self, epoch: int) -> None:
        """Set every block's counter, on every rank alike; for tests of its wrap."""
        count = ControlLayout.EPOCH_NBYTES // 4 * MAX_BLOCKS
        with self._cuda.current():
            driver.call("cuMemsetD32", self._control + ControlLayout.EPOCHS, epoch, count)
            driver.call("cuCtxSynchronize")

    def prepare(self, collective: Collective, protocols: Collection[str]) -> None:
        """Compile or load every kernel a call of `collective` may need under these protocols."""
        others = {"push", "pull", "tagged"} - set(protocols)
        for plain in variants_of(collective, self.rank, self.world_size):
            key = self._variant(collective, plain)
            if others.isdisjoint(key.variant) and key not in self._kernels:
                self._load(collective, key)

    def _variant(self, collective: Collective, key: KernelKey) -> KernelKey:
        """Return which kernel runs for a plan's: the one with counters, if there are any."""
        counts = self.counters is not None and collective.communicates
        return replace(key, stats=True) if counts else key

    def _load(self, collective: Collective, key: KernelKey) -> LoadedKernel:
        with blaming(collective, "has no kernel to load", self.rank):
            compiled = self.store.get(collective, key, self.capability)
        with self._cuda.current():
            kernel = load(compiled, self._cuda.handle)
        self._kernels[key] = kernel
        return kernel

    def kernel_for(self, collective: Collective, plan: Plan) -> LoadedKernel:
        """Return the loaded kernel of a plan, loading it unless a capture is under way.

        Raises:
            CompileError: It is not loaded and the current stream is capturing.
            UnsupportedError: Its grid does not fit the device at once.
        """
        key = self._variant(collective, plan.kernel)
        kernel = self._kernels.get(key)
        if kernel is None:
            with torch.cuda.device(self.device):
                capturing = torch.cuda.is_current_stream_capturing()
            if capturing:
                prepare = f"group.prepare({collective.prepared_by()})"
                remedy = prepare if self.status else f"{plan.op} once"
                raise CompileError(
                    f"kernel {key} is not loaded and the current stream is capturing; "
                    f"call {remedy} before the capture",
                    rank=self.rank,
                    op=plan.op,
                )
            kernel = self._load(collective, key)
        if plan.exchanged:
            self._ops[plan.signature] = plan.op
            with self._cuda.current():
                per_unit = kernel.blocks_per_unit()
            resident = places(self.multiprocessors, per_unit, self._spares) if per_unit else 0
            if plan.grid * self._at_once > resident:
                raise UnsupportedError(
                    f"{plan.op} needs grid={plan.grid} blocks at once, of each of "
                    f"{self._at_once} launches; the device has room for {resident}",
                    reason="the launch would wait for blocks that cannot start",
                    rank=self.rank,
                    op=plan.op,
                )
        return kernel

    def bind(self, kernel: LoadedKernel, plan: Plan, addresses: Sequence[int]) -> BoundLaunch:
        """Return a call with its arguments packed: calling it enqueues a launch.

        The launch goes to torch's current stream of this device. A channel's eager launches are
        ordered: when the current stream changed since the last one, an event makes the new stream
        wait for the old one. Threads take turns, so that none comes between that and the launch.
        """
        sent = sent_nbytes(plan, self.world_size) if self.counters else 0
        lane = (self._control, self.rank, self.world_size, plan.signature, sent)
        arguments = Arguments(lane, addresses, plan.scalars)
        launch, function, block = kernel.entry_point, kernel.function, kernel.block
        index, communicates, grid = self._index, bool(plan.exchanged), plan.grid
        where, launching = arguments.address, self._launching

        def launch_in_context(status: Any) -> None:
            # This thread has no context, or another's; or the default stream, whose handle does
            # not say whose default stream it is.
            if int(status) not in (*WRONG_CONTEXT, 0):
                driver.check("cuLaunchKernel", (status,))
            stream = current_stream_handle(index)
            with self._cuda.current():
                driver.call(
                    "cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, stream, where, 0
                )

        def enqueue() -> None:
            status: Any = 0
            stream = current_stream_handle(index)
            if is_capturing():
                self.captured = True
                if self.overlaps:
                    kernel.launch_overlapping(arguments, grid, stream)
                    return
                if stream:
                    (status,) = launch(function, grid, 1, 1, block, 1, 1, 0, stream, where, 0)
                    if not status:
                        return
                launch_in_context(status)
                return
            with launching:  # no function call more than it takes: host time is what counts here
                if stream != self._last_handle and communicates:
                    self._move_to(stream)
                if stream:
                    (status,) = launch(function, grid, 1, 1, block, 1, 1, 0, stream, where, 0)
                    if not status:
                        return
                launch_in_context(status)

        return BoundLaunch(ranges.marked(enqueue, plan.op) if self.nvtx else enqueue, arguments)

    def _move_to(self, handle: int) -> None:
        """Make the current stream wait for the last one. Requires: `_launching` is held.

        Raises:
            BusyError: A capture has begun on the last one since.
        """
        stream, last = torch.cuda.current_stream(self.device), self._last_stream
        if last is not None:
            with torch.cuda.stream(last):
                if is_capturing():  # waiting for it would put this call into that graph
                    raise BusyError(
                        f"the last eager call ran on stream={last.cuda_stream:#x}, which is being "
                        f"captured now; this one on stream={handle:#x} cannot wait for it. Capture "
                        "on a stream of its own, or call on another channel",
                        rank=self.rank,
                    )
            stream.wait_stream(last)
        self._last_stream, self._last_handle = stream, handle

    def failed(self) -> bool:
        """Tell whether the channel is broken. A read of one word of host memory."""
        return self.status is not None and self.status.failed()

    def failure(self) -> CommError | None:
        """Return what broke the channel, or None. Does not synchronise."""
        if self.status is None:
            return None
        found = self.status.read()
        if found is None:
            return None
        state = self.peer_state(found.peer) if found.code == StatusLayout.CODE_TIMEOUT else ""
        return found.error(self.rank, self._ops, self._cause, state)

    def abort(self, cause: Cause) -> None:
        """Make every waiting launch give up, for `cause`; the first one stays."""
        self._cause = self._cause or cause
        if self.status is not None:
            self.status.abort()

    def synchronize(self) -> None:
        """Wait for the device; bounded, since every launch is.

        Raises:
            CudaError: The context is lost.
        """
        try:
            torch.cuda.synchronize(self.device)  # leaves the interpreter to the watchdog
        except RuntimeError as error:
            raise CudaError(
                f"the device did not finish its work: {str(error).partition(chr(10))[0]}",
                name=type(error).__name__,
                call="torch.cuda.synchronize",
                rank=self.rank,
            ) from error

    def close(self) -> None:
        """Give control block and status record back. Requires: `synchronize` came before."""
        control, self._control = self._control, 0
        if self.counters is not None:
            self.counters.close()
        with self._cuda.current():
            if control:
                driver.call("cuMemFree", control)
            if self.status is not None:
                self.status.free()

"""Worlds inside one machine: all ranks as threads of this process, or as child processes."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import NoReturn, TypeVar

import torch

from .bootstrap import ThreadBootstrap
from .config import Config, request_hardware_queues
from .errors import ClosedError, CommError, InvalidArgumentError, PeerError, UnsupportedError
from .group import PcieDcpGroup
from .layout import MAX_WORLD

Result = TypeVar("Result")

HARDWARE_QUEUES = 32

PATIENCE_S = 1.0
"""How long ranks may go on after another one raised, before their groups are aborted."""


class LocalWorld:
    """All ranks of a group in one process, one thread and (on a GPU) one stream each.

    Attributes:
        groups: The ranks' groups, in rank order.
        streams: The ranks' CUDA streams; empty without a GPU.
    """

    def __init__(self, groups: list[PcieDcpGroup], streams: list[torch.cuda.Stream]) -> None:
        self.groups = groups
        self.streams = streams
        self._threads = ThreadPoolExecutor(len(groups), thread_name_prefix="pcie_comm.rank")
        self._closed = False
        _worlds.add(self)

    def run(self, fn: Callable[[PcieDcpGroup], Result]) -> list[Result]:
        """Call `fn(group)` on every rank at once; return the results in rank order.

        On a GPU each call runs with its rank's stream as torch's current stream, and this method
        returns after all streams have finished and every group passed `check`.

        Raises:
            InvalidArgumentError: `fn` cannot be called.
            ClosedError: The world is closed.
            Exception: The first rank's error that is not about a peer. Ranks that still wait for
                it a second later are aborted; the world is then of no further use.
        """
        task: object = fn
        if not callable(task):
            raise InvalidArgumentError(f"fn={fn!r} is no function; give one that takes a group")
        if self._closed:
            raise ClosedError("the world is closed")

        def on_rank(rank: int) -> Result:
            group = self.groups[rank]
            if not self.streams:
                return fn(group)
            with torch.cuda.device(group.device), torch.cuda.stream(self.streams[rank]):
                self.streams[rank].wait_stream(torch.cuda.default_stream(group.device))
                result = fn(group)
                self.streams[rank].synchronize()
                group.check()
                return result

        return _first_error_or_results(
            self._threads, on_rank, len(self.groups), self._abort, patience_s=PATIENCE_S
        )

    def _abort(self) -> None:
        for group in self.groups:
            group.abort()

    def close(self) -> None:
        """Close every group. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            _first_error_or_results(
                self._threads, lambda rank: self.groups[rank].close(), len(self.groups), self._abort
            )
        finally:
            self._threads.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a LocalWorld can be neither copied nor pickled: it owns threads")


def _first_error_or_results(
    threads: ThreadPoolExecutor,
    fn: Callable[[int], Result],
    count: int,
    abort: Callable[[], None],
    patience_s: float | None = None,
) -> list[Result]:
    """Run `fn` on every rank. Raises the first error that is not about a peer: others are its echo.

    Args:
        threads: One for each rank.
        fn: Gets the rank.
        count: Number of ranks.
        abort: Makes ranks that wait give up: called `patience_s` after one raised, and when this
            thread is interrupted.
        patience_s: None: for ever.
    """
    futures = [threads.submit(fn, rank) for rank in range(count)]
    try:
        waiting = wait(futures, return_when=FIRST_EXCEPTION).not_done
        if waiting and wait(futures, timeout=patience_s).not_done:
            abort()
        wait(futures)
    except BaseException:  # Ctrl-C
        abort()
        raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerError)), errors[0])
    return [future.result() for future in futures]


def _devices(world_size: int, device: str | torch.device | None) -> list[str]:
    """Return the device of each rank: `cuda` deals the GPUs out in turn, `cuda:N` takes one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = str(device)
    if name != "cuda":
        return [name] * world_size
    count = max(torch.cuda.device_count(), 1)
    return [f"cuda:{rank % count}" for rank in range(world_size)]


_worlds: weakref.WeakSet[LocalWorld] = weakref.WeakSet()


def _forget_worlds() -> None:
    """Close the worlds of a forked child: their threads are the parent's."""
    for world in list(_worlds):
        world._closed = True


os.register_at_fork(after_in_child=_forget_worlds)


class _Opening(contextlib.AbstractContextManager[LocalWorld]):
    """Builds a world on entering and closes it on leaving.

    Not a generator: one that is collected would close the world from a finaliser, which may run
    anywhere and must not wait for ranks.
    """

    def __init__(self, build: Callable[[], LocalWorld]) -> None:
        self._build = build
        self._world: LocalWorld | None = None

    def __enter__(self) -> LocalWorld:
        self._world = self._build()
        return self._world

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"local_world(...) has no {name!r}: enter it first, `with local_world(...) as world:`"
        )

    def __exit__(self, *exc: object) -> None:
        world, self._world = self._world, None
        if world is None:
            return
        if exc[0] is None:
            world.close()
            return
        world._abort()  # ranks may still be in calls
        with contextlib.suppress(CommError):  # the block's own exception is the one that counts
            world.close()


def local_world(
    world_size: int,
    device: str | torch.device | None = None,
    transport: str = "auto",
    config: Config | None = None,
) -> contextlib.AbstractContextManager[LocalWorld]:
    """Run all ranks of a group in this process.

    Kernels only see addresses, so N ranks may share one device: the same kernels, the same
    protocol, on N streams. Load and warm up everything else you run beside a collective first:
    a lazily loaded module waits for kernels that wait for their peers. So does, in the driver, a
    copy between a device and memory that is not pinned, and it keeps other threads from launching:
    wait for the rank's stream first (docs/graphs.md).

    Args:
        world_size: 1 to 16.
        device: `cpu`; `cuda:N` for one device; `cuda` deals all visible GPUs out in turn.
        transport: As for PcieDcpGroup.
        config: As for PcieDcpGroup.

    Returns:
        A context manager: the world is built on entering and closed on leaving the block.

    Raises:
        InvalidArgumentError: World size, device or transport.
        UnsupportedError: More ranks than this process has hardware queues for.
    """
    _check_world_size(world_size)
    return _Opening(lambda: open_world(_devices(world_size, device), transport, config))


def _check_world_size(world_size: object) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise InvalidArgumentError(
            f"world_size={world_size!r} is no integer; give 1 to {MAX_WORLD}"
        )
    if not 1 <= world_size <= MAX_WORLD:
        raise InvalidArgumentError(
            f"world_size={world_size} is out of range; give 1 to {MAX_WORLD}"
        )


def open_world(devices: Sequence[str], transport: str, config: Config | None) -> LocalWorld:
    """Build the group of every rank, each on its device; the caller closes the world.

    Args:
        devices: Of the ranks: `cpu` for all, or `cuda:N` for each.
        transport: As for PcieDcpGroup.
        config: As for PcieDcpGroup.

    Raises:
        CommError: As local_world.
    """
    world_size = len(devices)
    if devices[0].startswith("cuda"):
        queues = request_hardware_queues(HARDWARE_QUEUES)
        if queues < world_size + 1:
            raise UnsupportedError(
                f"world_size={world_size} streams of one process need {world_size + 1} hardware "
                f"queues, CUDA_DEVICE_MAX_CONNECTIONS={queues}; set it to {HARDWARE_QUEUES}",
                reason="too few hardware queues",
            )
    bootstraps = ThreadBootstrap.create(world_size)

    def build(rank: int) -> PcieDcpGroup:
        return PcieDcpGroup.from_bootstrap(bootstraps[rank], devices[rank], transport, config)

    def abort() -> None:
        for bootstrap in bootstraps:
            bootstrap.abort("the process was interrupted")

    with ThreadPoolExecutor(world_size, thread_name_prefix="pcie_comm.build") as threads:
        groups = _first_error_or_results(threads, build, world_size, abort)
    streams: list[torch.cuda.Stream] = []
    if groups[0].device.type == "cuda":
        for group in groups:
            streams.append(torch.cuda.Stream(group.device))  # type: ignore[no-untyped-call]
    return LocalWorld(groups, streams)

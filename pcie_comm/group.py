"""PcieDcpGroup: the ranks of a group as one object. Lifecycle here, calls in channel.py."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch

from . import closing
from .bootstrap import Bootstrap, agree, compare, open_bootstrap
from .calls import fused_collective
from .channel import Channel, Collectives
from .closing import Estate
from .config import Config, settings_of
from .cuda_engine import CudaEngine
from .dist_engine import DistEngine
from .dist_opening import Opening, board_of, facts_of, open_engine
from .errors import (
    BrokenError,
    ClosedError,
    CommError,
    CommWarning,
    InvalidArgumentError,
    PeerTimeoutError,
)
from .host_engine import HostEngine
from .kernels.collective import Collective, PlanInfo, check_collective
from .kernels.plan_checks import blaming, check_rows
from .kernels.registry import find, for_count
from .kernels.router_spec import RouterSpec
from .kernels.store import KernelStore
from .layout import SlabLayout
from .meeting import meet
from .policy import protocols_of
from .ranges import check_nvtx
from .reference_engine import ReferenceEngine
from .stats import ChannelStats
from .transport import load
from .transport.base import PeerMap, Transport, TransportInfo
from .watch.cause import Cause
from .watch.watch import Watch, open_watch

Engine = CudaEngine | HostEngine | DistEngine

_groups: WeakSet[PcieDcpGroup] = WeakSet()


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= 100:
        raise InvalidArgumentError(f"name={name!r} is no channel name; give 1 to 100 characters")


class PcieDcpGroup(Collectives):
    """A communicator of 1 to 16 ranks, on one host or over several (docs/hosts.md).

    Collective: every rank constructs it, in the same order relative to other groups. If one rank
    fails, all raise with its reason and nothing stays mapped.

    Ownership: slabs, flags and control blocks are the group's own allocations; user tensors are
    never exported. `close` gives them back; so does leaving the `with` block.

    Args:
        ranks: World size, or the global ranks of this group in group-rank order.
        device: `cuda:N`, a torch.device, or `cpu`; the current GPU if None, else the CPU.
        process_group: A torch process group of exactly these ranks; None: torch.distributed's
            default group, or the environment of torchrun.
        transport: `auto`, or a name from `pcie_comm.transport`; over several hosts, what runs
            inside each, or `torch_dist` for nothing but torch.distributed.
        config: Settings; None: the defaults and the PCIE_COMM_* variables.

    Raises:
        InvalidArgumentError: An argument is wrong.
        UnsupportedError: This machine lacks what was asked for.
        MismatchError: The ranks' versions or settings differ.
        PeerAbortedError: Another rank failed; the message has its reason.
        PeerTimeoutError: A rank did not come within `Config.setup_timeout_s`.
        PeerDiedError: The process of a rank ended meanwhile.
    """

    def __init__(
        self,
        ranks: int | Sequence[int],
        device: str | torch.device | None = None,
        process_group: Any = None,
        transport: str = "auto",
        config: Config | None = None,
    ) -> None:
        self._closed = True
        settings = settings_of(config)
        bootstrap = open_bootstrap(ranks, process_group, settings)
        self._start(bootstrap, device, transport, settings)

    @classmethod
    def from_bootstrap(
        cls,
        bootstrap: Bootstrap,
        device: str | torch.device | None = None,
        transport: str = "auto",
        config: Config | None = None,
    ) -> PcieDcpGroup:
        """Build a rank's group over a rendezvous of one's own. Takes ownership of `bootstrap`.

        Raises:
            InvalidArgumentError: No Bootstrap; and all that the constructor raises.
        """
        given: object = bootstrap
        if not isinstance(given, Bootstrap):
            raise InvalidArgumentError(f"bootstrap={given!r} is no Bootstrap; derive from it")
        group = cls.__new__(cls)
        group._closed = True
        group._start(bootstrap, device, transport, settings_of(config))
        return group

    def _start(
        self,
        bootstrap: Bootstrap,
        device: str | torch.device | None,
        transport: str,
        config: Config,
    ) -> None:
        self.rank = bootstrap.rank
        self.world_size = bootstrap.world_size
        self.config = config
        self._bootstrap = bootstrap
        self._channels: dict[str, Channel] = {}
        self._transports: dict[str, Transport] = {}
        closing.reclaim()
        try:
            self._watch = self._open_watch(config.setup_timeout_s)
            self._settle(device, transport)
        except BaseException:
            bootstrap.close()
            raise
        _groups.add(self)

    def _open_watch(self, timeout_s: float) -> Watch:
        channels = self._channels  # and not self: the watch must not keep the group alive

        def end_waits(cause: Cause) -> None:
            for channel in list(channels.values()):
                channel.engine.abort(cause)

        return open_watch(self._bootstrap, end_waits, timeout_s)

    def _settle(self, device: str | torch.device | None, transport: str) -> None:
        """Agree on everything and open the first channel; tell the peers at once if that fails."""
        try:
            watch = self._watch
            self._terms = meet(
                self._bootstrap, watch.one_process, watch.span, device, transport, self.config
            )
            if watch.span.count > 1:
                watch.see_far(board_of(self._bootstrap, watch.group))
            self.device = self._terms.device
            if self.config.nvtx:
                check_nvtx()
            self._store = KernelStore(self.config.kernels_dir, self.config.cache_dir)
            self._closed = False
            default = self._open_channel("default")
            self._issue, self.handle = default.issue, default.handle
        except BaseException as error:
            self._closed = True
            self._watch.abort(f"{type(error).__name__}: {error}")
            self._watch.leave()
            raise

    def _open_channel(self, name: str) -> Channel:
        """Allocate, exchange and map a channel's slabs. Collective."""
        layout = SlabLayout(self.config.slot_nbytes, self.world_size)
        index = self.device.index if self.device.type == "cuda" else None
        transport = load(self._terms.transport)(TransportInfo(self.rank, self.world_size, index))
        timeout_s = self.config.setup_timeout_s
        engines: list[Engine] = []

        def allocate() -> bytes:
            named = json.dumps({"channel": name, "group": self._watch.group})
            return named.encode() + b"\n" + transport.allocate(layout.nbytes)

        def map_peers() -> bytes:
            peers = transport.map([record.partition(b"\n")[2] for record in records])
            engines.append(self._engine(name, layout, peers))
            return b""

        def seal() -> bytes:
            transport.seal()
            return b""

        try:
            records = agree(self._bootstrap, f"slab of channel {name!r}", allocate, timeout_s)
            compare([record.partition(b"\n")[0] for record in records], "the channel")
            agree(self._bootstrap, f"mapping of channel {name!r}", map_peers, timeout_s)
            agree(self._bootstrap, f"check of channel {name!r}", seal, timeout_s)
        except BaseException:
            for engine in engines:
                engine.close()
            failure = self._bootstrap.failure
            if isinstance(failure, PeerTimeoutError):  # who comes later shall not wait, too
                self._bootstrap.abort(f"it gave up channel {name!r}: {failure}")
            self._discard(transport)
            raise
        info = PlanInfo(
            rank=self.rank,
            world_size=self.world_size,
            protocol=self.config.protocol,
            segment_nbytes=layout.segment_nbytes,
            max_rows=self.config.max_rows,
            max_blocks=self._terms.max_blocks,
            limits=self._terms.crossovers.limits(self._terms.transport, self._terms.sharers),
        )
        channel = Channel(name, info, self.device, engines[0])
        self._channels[name] = channel
        self._transports[name] = transport
        if self._watch.cause is not None:  # found before the channel was there to be told
            channel.engine.abort(self._watch.cause)
        return channel

    def _engine(self, name: str, layout: SlabLayout, peers: PeerMap) -> Engine:
        """Return what runs the calls of a channel."""
        config = self.config
        engine: Engine
        if self._terms.transport == "torch_dist":
            made = (self._bootstrap, self._terms, config, self._watch.group, name)
            engine = open_engine(Opening(*made, layout.segment_nbytes, type(self).from_bootstrap))
        elif self.device.type == "cpu":
            engine = HostEngine(self.rank, layout, peers, config.protocol, config.timeout_s)
        else:
            sharers = self._terms.sharers
            engine = CudaEngine(self.rank, layout, peers, self.device, config, self._store, sharers)
        if isinstance(engine, ReferenceEngine):
            engine.observe(config.stats, config.nvtx)
        engine.peer_state = self._watch.describe
        return engine

    def _discard(self, transport: Transport) -> None:
        """Take back a half-open channel; the error that led here is the one that counts."""
        with contextlib.suppress(CommError):
            transport.unmap()
        with contextlib.suppress(CommError):
            agree(self._bootstrap, "clean-up", lambda: b"", closing.CLOSE_TIMEOUT_S)
        with contextlib.suppress(CommError):
            transport.free()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the group is closed", rank=getattr(self, "rank", None))

    def channel(self, name: str) -> Channel:
        """Return an independent lane with the same methods; made at its first use.

        Collective at first use: every rank asks for the same names in the same order.

        Raises:
            InvalidArgumentError: No name. The other ranks wait for this one.
            MismatchError: The ranks asked for different names.
            PeerAbortedError, PeerTimeoutError: Another rank failed, or did not come.
            PeerDiedError: A rank's process ended meanwhile.
            BrokenError: A rank died or aborted before.
        """
        self._check_open()
        _check_name(name)
        if name in self._channels:
            return self._channels[name]
        lost = self._watch.error()
        if lost is not None:
            raise BrokenError(
                f"the group is broken since {type(lost).__name__}: {lost}", rank=self.rank
            ) from lost
        return self._open_channel(name)

    def prepare(
        self,
        op: str | Collective | RouterSpec,
        rows: int | None = None,
        tensors: int | None = None,
        *,
        width: int | None = None,
    ) -> None:
        """Compile or load all that calls of `op` need, so that they can be captured.

        Local: ranks need not call it together.

        Args:
            op: Name of a registered collective, a plugin, or a router: `all_gather_pair_topk` then.
            rows: Most rows of the calls to come: any number, but for a plugin that cannot be cut.
            tensors: How many tensors a call will take, of an op that takes any number.
            width: As of the calls to come, if `op` is a router.

        Raises:
            InvalidArgumentError: Unknown op, no plugin, too many tensors, no number of rows, or
                more of them than `Config.max_rows` for a plugin whose calls cannot be cut.
            UnsupportedError: The op does not serve this world size.
            CompileError: A kernel is missing or does not compile.
        """
        self._check_open()
        collective = find(op) if isinstance(op, str) else op
        if isinstance(collective, RouterSpec):
            collective = fused_collective(collective, width)
        elif width is not None:
            raise InvalidArgumentError(f"width={width!r} goes with a RouterSpec; leave it out")
        check_collective(collective)
        if tensors is not None:
            collective = for_count(collective, tensors)
        if rows is not None:
            check_rows(rows, collective, self.config.max_rows)
        with blaming(collective, "failed to judge a world size", self.rank):
            collective.check_world_size(self.world_size)
        for channel in list(self._channels.values()):
            info = channel.info
            for one in (collective, *map(find, collective.made_of)):
                channel.engine.prepare(one, protocols_of(info.protocol, info.limits))

    def check(self) -> None:
        """Raise what broke the group, if anything did. Does not synchronise the device.

        Raises:
            ClosedError: The group is closed.
            PeerTimeoutError, MismatchError, BusyError: A call gave up, or two ran at once.
            PeerDiedError, PeerAbortedError: A rank died or aborted, whether or not a call waited.
        """
        self._check_open()
        for channel in list(self._channels.values()):
            channel.check()

    def stats(self) -> dict[str, ChannelStats]:
        """Return what every channel has counted, by its name. Does not synchronise the device.

        Local, from any thread, whatever the device or a stream is doing; also of a broken channel.

        Raises:
            ClosedError: The group is closed.
            UnsupportedError: `Config.stats` is off.
            CudaError: The device did not answer.
        """
        self._check_open()
        return {name: channel.stats() for name, channel in list(self._channels.items())}

    def abort(self) -> None:
        """Make every waiting call of every rank give up, and every later one fail.

        Local: returns at once, and may be called from any thread. The peers raise PeerAbortedError
        with this rank as `peer`, within 100 ms.
        """
        if not self._closed:
            self._watch.abort("abort() was called")

    def describe(self) -> dict[str, object]:
        """Return what runs and why, as plain values."""
        terms = self._terms
        facts: dict[str, object] = {
            "rank": self.rank,
            "world_size": self.world_size,
            "device": str(self.device),
            "transport": terms.transport,
            "transport_reason": terms.transport_reason,
            "hosts": [list(ranks) for ranks in self._watch.span.members],
            "max_blocks": terms.max_blocks,
            "crossovers": {"source": terms.crossovers.source, **terms.crossovers.contract()},
            "config": {**self.config.contract(), "kernels_dir": str(self.config.kernels_dir)},
            "kernels": dict(self._store.sources),
            "closed": self._closed,
            "peers": {f"rank {r}": self._watch.describe(r) for r in range(self.world_size)},
        }
        for name, channel in list(self._channels.items()):
            facts[f"channel {name}"] = {
                "protocol": ", ".join(channel.protocols()),
                "calls": channel.choices(terms.crossovers.source),
                "segment_nbytes": channel.info.segment_nbytes,
                **self._transports[name].describe(),
                **facts_of(channel.engine),
            }
        return facts

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._terms.transport
        return f"<PcieDcpGroup rank={self.rank} world_size={self.world_size} {state}>"

    def close(self) -> None:
        """Stop, unmap, agree that all have unmapped, then free. Collective. Idempotent.

        In a group that failed, or of which a rank dies or aborts meanwhile, every rank closes
        alone and says nothing of it: `check` comes before `close`.

        Capture: what a captured graph addresses is kept until the process ends, so that a late
        replay never touches freed memory.

        Raises:
            PeerTimeoutError: A rank that lives did not come; the group is broken then, and this
                rank has closed alone.
            PeerAbortedError: Another rank could not unmap; likewise.
            CudaError: The driver failed; what it could not give back is kept.
        """
        if self._closed:
            return
        try:
            closing.close(self._end(), self._bootstrap, self.config.setup_timeout_s)
        finally:
            self._bootstrap.close()

    def _end(self) -> Estate:
        """Refuse further calls; return what there is to give back."""
        self._closed = True
        for channel in self._channels.values():
            channel.closed = True
        return Estate(self._channels, self._transports, self._watch)

    def __enter__(self) -> PcieDcpGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.close()
            return
        if not self._closed:
            kind = getattr(exc[0], "__name__", "an exception")
            self._watch.abort(f"it left the block by {kind}: {exc[1]}")
        with contextlib.suppress(CommError):
            self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            # No peer is talked to and nothing is freed here: a collection may run anywhere.
            name = repr(self)
            closing.keep(self._end())
            warnings.warn(f"{name} was never closed", CommWarning, stacklevel=2)


def _forget_groups() -> None:
    """Close the groups of a forked child, which are the parent's, without a word to anybody."""
    for group in list(_groups):
        group._end()


os.register_at_fork(after_in_child=_forget_groups)

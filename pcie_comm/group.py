"""PcieDcpGroup: the ranks of one host as one object. Lifecycle here, calls in channel.py."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from .bootstrap import Bootstrap, agree, compare, open_bootstrap
from .channel import Channel, Collectives
from .config import Config
from .cuda_engine import CudaEngine
from .errors import (
    ClosedError,
    CommError,
    CommWarning,
    InvalidArgumentError,
    UnsupportedError,
)
from .host_engine import HostEngine
from .kernels.compile import fingerprint
from .kernels.registry import Collective, PlanInfo, check_collective, collectives, find
from .kernels.store import KernelStore
from .layout import MAX_BLOCKS, SlabLayout
from .policy import choose_transport, protocols_of, resident_budget
from .policy_file import load_crossovers
from .rank_facts import RankFacts, resolve_device
from .transport import load
from .transport.base import Transport, TransportInfo

PROTOCOL_VERSION = 1
"""Version of slab layout and flag format; ranks with different ones refuse each other."""

CLOSE_TIMEOUT_S = 5.0
"""Longest wait of `close` for peers once the group is broken."""

_kept: list[object] = []
"""What captured graphs may still address after `close`: released when the process ends."""


def _settings(config: object) -> Config:
    """Return the settings of a group: the given ones, else those of the environment.

    Raises:
        InvalidArgumentError: Neither None nor a Config.
    """
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise InvalidArgumentError(
            f"config={config!r} is no Config; give pcie_comm.Config(...), or None"
        )
    return config


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= 100:
        raise InvalidArgumentError(f"name={name!r} is no channel name; give 1 to 100 characters")


class PcieDcpGroup(Collectives):
    """A communicator of 1 to 16 ranks on one host.

    Collective: every rank constructs it, in the same order relative to other groups. If one rank
    fails, all raise with its reason and nothing stays mapped.

    Ownership: slabs, flags and control blocks are the group's own allocations; user tensors are
    never exported. `close` gives them back; so does leaving the `with` block.

    Args:
        ranks: World size, or the global ranks of this group in group-rank order.
        device: `cuda:N`, a torch.device, or `cpu`; the current GPU if None, else the CPU.
        process_group: A torch process group of exactly these ranks; None: torch.distributed's
            default group, or the environment of torchrun.
        transport: `auto`, or a name from `pcie_comm.transport`.
        config: Settings; None: the defaults and the PCIE_COMM_* variables.

    Raises:
        InvalidArgumentError: An argument is wrong.
        UnsupportedError: This machine lacks what was asked for.
        MismatchError: The ranks' versions or settings differ.
        PeerAbortedError: Another rank failed; the message has its reason.
        PeerTimeoutError: A rank did not come within `Config.setup_timeout_s`.
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
        settings = _settings(config)
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
        """Build a rank's group over a rendezvous of one's own. Takes ownership of `bootstrap`."""
        group = cls.__new__(cls)
        group._closed = True
        group._start(bootstrap, device, transport, _settings(config))
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
        try:
            self._meet(device, transport)
            self._closed = False
            self._issue = self._open_channel("default").issue
        except BaseException:
            self._closed = True
            bootstrap.close()
            raise

    def _meet(self, device: str | torch.device | None, transport: str) -> None:
        """Exchange facts; settle device, transport and grid limit, alike on all ranks."""

        def introduce() -> bytes:
            self.device = resolve_device(device)
            if transport != "auto":
                load(transport)
            self._crossovers = load_crossovers(self.config.policy_file)
            return RankFacts.gather(self.device, self._contract(transport)).encode()

        timeout_s = self.config.setup_timeout_s
        records = agree(self._bootstrap, "introduction", introduce, timeout_s)
        facts = [RankFacts.decode(record) for record in records]
        contracts = [json.dumps(fact.contract).encode() for fact in facts]
        compare(contracts, "the group's settings")
        if len({fact.host for fact in facts}) > 1:
            raise UnsupportedError(
                f"the ranks are on {len({f.host for f in facts})} hosts; a group spans one host",
                reason="ranks on several hosts",
                rank=self.rank,
            )
        devices = [fact.device for fact in facts]
        self._transport_name, self._transport_reason = choose_transport(
            transport,
            on_gpu="cpu" not in devices,
            one_process=len({fact.process for fact in facts}) == 1,
            peers_reachable=all(d in fact.reachable for fact in facts for d in devices),
        )
        if ("cpu" in devices) != (self._transport_name == "host_shm"):
            raise UnsupportedError(
                f"transport={self._transport_name!r} does not serve device={self.device}; "
                "host_shm is for device='cpu', the others are for GPUs",
                reason="transport and device do not fit",
                rank=self.rank,
            )
        sharers = Counter(devices)
        self._sharers = max(sharers.values())
        self._max_blocks = resident_budget(
            [f.multiprocessors or MAX_BLOCKS * self.world_size for f in facts],
            [sharers[d] for d in devices],
            self.config.overlap,
            MAX_BLOCKS,
        )
        self._store = KernelStore(self.config.kernels_dir, self.config.cache_dir)

    def _contract(self, transport: str) -> dict[str, object]:
        from . import __version__

        return {
            "version": __version__,
            "protocol_version": PROTOCOL_VERSION,
            "world_size": self.world_size,
            "transport": transport,
            "device_type": self.device.type,
            "kernels": {op: fingerprint(plugin)[:16] for op, plugin in collectives().items()},
            "crossovers": self._crossovers.contract(),
            **self.config.contract(),
        }

    def _open_channel(self, name: str) -> Channel:
        """Allocate, exchange and map a channel's slabs. Collective."""
        layout = SlabLayout(self.config.slot_nbytes, self.world_size)
        index = self.device.index if self.device.type == "cuda" else None
        transport = load(self._transport_name)(TransportInfo(self.rank, self.world_size, index))
        timeout_s = self.config.setup_timeout_s
        engines: list[CudaEngine | HostEngine] = []

        def allocate() -> bytes:
            return (
                json.dumps({"channel": name}).encode() + b"\n" + transport.allocate(layout.nbytes)
            )

        def map_peers() -> bytes:
            peers = transport.map([record.partition(b"\n")[2] for record in records])
            if self.device.type == "cpu":
                engine: CudaEngine | HostEngine = HostEngine(
                    self.rank, layout, peers, self.config.protocol, self.config.timeout_s
                )
            else:
                engine = CudaEngine(
                    self.rank,
                    layout,
                    peers,
                    self.device,
                    self.config,
                    self._store,
                    self._sharers,
                )
            engines.append(engine)
            return b""

        try:
            records = agree(self._bootstrap, f"slab of channel {name!r}", allocate, timeout_s)
            compare([record.partition(b"\n")[0] for record in records], "the channel's name")
            agree(self._bootstrap, f"mapping of channel {name!r}", map_peers, timeout_s)
        except BaseException:
            for engine in engines:
                engine.close()
            self._discard(transport)
            raise
        transport.seal()
        info = PlanInfo(
            rank=self.rank,
            world_size=self.world_size,
            protocol=self.config.protocol,
            segment_nbytes=layout.segment_nbytes,
            max_rows=self.config.max_rows,
            max_blocks=self._max_blocks,
            limits=self._crossovers.limits(self._transport_name, self._sharers),
        )
        channel = Channel(name, info, self.device, engines[0])
        self._channels[name] = channel
        self._transports[name] = transport
        return channel

    def _discard(self, transport: Transport) -> None:
        """Take back a half-open channel; the error that led here is the one that counts."""
        with contextlib.suppress(CommError):
            transport.unmap()
        with contextlib.suppress(CommError):
            agree(self._bootstrap, "clean-up", lambda: b"", CLOSE_TIMEOUT_S)
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
        """
        self._check_open()
        _check_name(name)
        return self._channels.get(name) or self._open_channel(name)

    def prepare(self, op: str | Collective, rows: int | None = None) -> None:
        """Compile or load all that calls of `op` need, so that they can be captured.

        Local: ranks need not call it together.

        Args:
            op: Name of a registered collective, or a plugin.
            rows: Most rows of the calls to come; checked against the capacity.

        Raises:
            InvalidArgumentError: Unknown op, no plugin, or more rows than `Config.max_rows`.
            UnsupportedError: The op does not serve this world size.
            CompileError: A kernel is missing or does not compile.
        """
        self._check_open()
        collective = find(op) if isinstance(op, str) else op
        check_collective(collective)
        if rows is not None:
            self._check_rows(rows, collective.name)
        collective.check_world_size(self.world_size)
        for channel in self._channels.values():
            info = channel.info
            channel.engine.prepare(collective, protocols_of(info.protocol, info.limits))

    def _check_rows(self, rows: object, op: str) -> None:
        limit = self.config.max_rows
        if isinstance(rows, bool) or not isinstance(rows, int) or not 0 <= rows <= limit:
            raise InvalidArgumentError(
                f"rows={rows!r} is outside 0 to max_rows={limit}; raise Config.max_rows on every "
                "rank",
                op=op,
            )

    def check(self) -> None:
        """Raise what broke the group, if anything did. Does not synchronise the device.

        Raises:
            ClosedError: The group is closed.
            PeerTimeoutError, MismatchError, PeerAbortedError: A call gave up.
        """
        self._check_open()
        for channel in self._channels.values():
            channel.check()

    def abort(self) -> None:
        """Make every waiting call of this rank give up, and every later one fail."""
        for channel in self._channels.values():
            channel.abort()

    def describe(self) -> dict[str, object]:
        """Return what runs and why, as plain values."""
        facts: dict[str, object] = {
            "rank": self.rank,
            "world_size": self.world_size,
            "device": str(self.device),
            "transport": self._transport_name,
            "transport_reason": self._transport_reason,
            "max_blocks": self._max_blocks,
            "crossovers": {"source": self._crossovers.source, **self._crossovers.contract()},
            "config": {**self.config.contract(), "kernels_dir": str(self.config.kernels_dir)},
            "kernels": dict(self._store.sources),
            "closed": self._closed,
        }
        for name, channel in self._channels.items():
            facts[f"channel {name}"] = {
                "protocol": ", ".join(channel.protocols()),
                "calls": channel.choices(self._crossovers.source),
                "segment_nbytes": channel.info.segment_nbytes,
                **self._transports[name].describe(),
            }
        return facts

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._transport_name
        return f"<PcieDcpGroup rank={self.rank} world_size={self.world_size} {state}>"

    def close(self) -> None:
        """Stop, unmap, agree that all have unmapped, then free. Collective. Idempotent.

        Capture: what a captured graph addresses is kept until the process ends, so that a late
        replay never touches freed memory.

        Raises:
            PeerTimeoutError: A rank did not come; this rank's slabs are kept, for its sake.
        """
        if self._closed:
            return
        broken = any(channel.engine.failed() for channel in self._channels.values())
        self._closed = True
        for channel in self._channels.values():
            channel.closed = True
        try:
            self._release(CLOSE_TIMEOUT_S if broken else self.config.setup_timeout_s)
        except CommError:
            _kept.append((self._channels, self._transports))
            if not broken:
                raise
        finally:
            self._bootstrap.close()

    def _release(self, timeout_s: float) -> None:
        """Free everything once no rank can address it; keep all if any rank captured a graph."""
        captured = any(getattr(c.engine, "captured", False) for c in self._channels.values())
        flags = agree(self._bootstrap, "close", lambda: b"%d" % captured, timeout_s)
        if b"1" in flags:
            _kept.append((self._channels, self._transports))
            return

        def let_go() -> bytes:
            for channel in self._channels.values():
                channel.engine.synchronize()
                channel.engine.close()
            for transport in self._transports.values():
                transport.unmap()
            return b""

        agree(self._bootstrap, "unmapping", let_go, timeout_s)
        for transport in self._transports.values():
            transport.free()

    def __enter__(self) -> PcieDcpGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.close()
            return
        with contextlib.suppress(CommError):
            self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            # No peer is talked to and nothing is freed here: a collection may run anywhere.
            _kept.append((self._channels, self._transports))
            warnings.warn(f"{self!r} was never closed", CommWarning, stacklevel=2)

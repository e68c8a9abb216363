"""What the ranks of a group agree on before anything is shared: device, transport, grid limit."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .bootstrap import Bootstrap, agree, compare
from .config import Config
from .crossovers import Crossovers, from_limits
from .errors import CommWarning, CompileError, UnsupportedError
from .kernels.collective import Collective
from .kernels.compile import fingerprint
from .kernels.registry import collectives
from .layout import MAX_BLOCKS
from .policy import choose_transport, resident_budget
from .policy_file import load_crossovers
from .rank_facts import RankFacts, resolve_device
from .span import Span
from .topology.advice import Advice, load_advice
from .topology.collect import collect
from .transport import load
from .transport.torch_dist import backends_for, choose_backend

PROTOCOL_VERSION = 2
"""Version of slab layout and flag format; ranks with different ones refuse each other."""


@dataclass(frozen=True)
class Terms:
    """What a group's ranks agreed on, the same on all of them except for `device`.

    Attributes:
        device: This rank's.
        transport, transport_reason: Its name, and why.
        sharers: Most ranks on one device.
        max_blocks: Largest grid of a launch.
        crossovers: When `auto` takes which protocol.
        span: Where the ranks are, as far as a transport goes; see DistEngine.
        inner: Transport asked for inside each host.
        backend: Of torch.distributed, for transport torch_dist.
    """

    device: torch.device
    transport: str
    transport_reason: str
    sharers: int
    max_blocks: int
    crossovers: Crossovers
    span: Span
    inner: str
    backend: str


_warned: set[str] = set()


def meet(
    bootstrap: Bootstrap,
    one_process: bool,
    span: Span,
    device: str | torch.device | None,
    transport: str,
    config: Config,
) -> Terms:
    """Exchange facts; settle the terms, alike on all ranks. Collective.

    Raises:
        InvalidArgumentError, UnsupportedError: Device or transport.
        MismatchError: The ranks' versions or settings differ.
        PeerError: Another rank failed, died or did not come.
    """
    own: list[tuple[torch.device, Crossovers, Advice | None]] = []
    one_host = span.count == 1  # else each host has advice of its own

    def introduce() -> bytes:
        resolved = resolve_device(device)
        wanted: object = transport
        if not isinstance(wanted, str) or wanted != "auto":
            load(transport)
        advice = None if config.advice is None else load_advice(config.advice, collect())
        own.append((resolved, _crossovers(config, advice), advice))
        contract = {
            "world_size": bootstrap.world_size,
            "transport": transport,
            "device_type": resolved.type,
            "crossovers": own[0][1].contract(),
            "vetoes": [veto.__dict__ for veto in advice.vetoes] if advice and one_host else [],
            **_versions(),
            **config.contract(),
        }
        offers = backends_for(resolved, bootstrap.process_group)
        return replace(RankFacts.gather(resolved, contract), backends=offers).encode()

    records = agree(bootstrap, "introduction", introduce, config.setup_timeout_s)
    facts = [RankFacts.decode(record, peer) for peer, record in enumerate(records)]
    compare([json.dumps(fact.contract).encode() for fact in facts], "the group's settings")
    about = (one_process, span.count, bootstrap.rank)
    name, reason = _transport_for(transport, facts, about, own[0])
    sharers, max_blocks = _places(facts, config)
    return Terms(
        device=own[0][0],
        transport=name,
        transport_reason=reason,
        sharers=sharers,
        max_blocks=max_blocks,
        crossovers=own[0][1],
        span=span.apart() if one_host or transport == "torch_dist" else span,
        inner=transport,
        backend=choose_backend([f.backends for f in facts], _named(facts)),
    )


def _places(facts: Sequence[RankFacts], config: Config) -> tuple[int, int]:
    """Return the most ranks on one device, and the largest grid of a launch."""
    sharers = Counter(fact.device for fact in facts)
    max_blocks = resident_budget(
        [fact.multiprocessors or MAX_BLOCKS * len(facts) for fact in facts],
        [sharers[fact.device] for fact in facts],
        config.overlap,
        config.max_blocks,
    )
    return max(sharers.values()), max_blocks


def _named(facts: Sequence[RankFacts]) -> list[str]:
    """Return a name of each rank's device; CPUs are shared by nobody."""
    return [f"{rank}" if f.device == "cpu" else f.device for rank, f in enumerate(facts)]


def _crossovers(config: Config, advice: Advice | None) -> Crossovers:
    """Return when `auto` takes which protocol: by a policy file, else by advice, else as built."""
    if config.policy_file is None and advice is not None and advice.crossovers is not None:
        return from_limits(advice.crossovers, f"advice {advice.source}")
    return load_crossovers(config.policy_file)


def _transport_for(
    wanted: str,
    facts: Sequence[RankFacts],
    about: tuple[bool, int, int],
    own: tuple[torch.device, Crossovers, Advice | None],
) -> tuple[str, str]:
    """Return name of the transport and why; every rank comes to the same answer."""
    device, _, advice = own
    one_process, hosts, rank = about
    devices = [fact.device for fact in facts]
    name, reason = choose_transport(
        wanted,
        on_gpu="cpu" not in devices,
        one_process=one_process,
        peers_reachable=all(d in fact.reachable for fact in facts for d in devices),
        veto=None if advice is None else advice.veto_among(devices),
        pins=all(fact.pins for fact in facts),
        hosts=hosts,
    )
    if name == "torch_dist":
        if wanted == "auto" and hosts == 1 and reason not in _warned:
            _warned.add(reason)
            warnings.warn(f"transport=torch_dist is slow: {reason}", CommWarning, stacklevel=2)
        return name, reason
    if ("cpu" in devices) != (name == "host_shm"):
        raise UnsupportedError(
            f"transport={name!r} does not serve device={device}; "
            "host_shm is for device='cpu', the others are for GPUs",
            reason="transport and device do not fit",
            rank=rank,
        )
    return name, reason


def _versions() -> dict[str, object]:
    from . import __version__

    return {
        "version": __version__,
        "protocol_version": PROTOCOL_VERSION,
        "kernels": {op: _fingerprint(plugin) for op, plugin in collectives().items()},
    }


def _fingerprint(plugin: Collective) -> str:
    """Return what ranks compare of a plugin's sources; one without them fails when it is called."""
    try:
        return fingerprint(plugin)[:16]
    except CompileError:
        return "unreadable"

"""What the ranks of a group agree on before anything is shared: device, transport, grid limit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .bootstrap import Bootstrap, agree, compare
from .config import Config
from .crossovers import Crossovers, from_limits
from .errors import UnsupportedError
from .kernels.compile import fingerprint
from .kernels.registry import collectives
from .layout import MAX_BLOCKS
from .policy import choose_transport, resident_budget
from .policy_file import load_crossovers
from .rank_facts import RankFacts, resolve_device
from .topology.advice import Advice, load_advice
from .topology.collect import collect
from .transport import load

PROTOCOL_VERSION = 1
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
    """

    device: torch.device
    transport: str
    transport_reason: str
    sharers: int
    max_blocks: int
    crossovers: Crossovers


def meet(
    bootstrap: Bootstrap,
    one_process: bool,
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
            "vetoes": [] if advice is None else [veto.__dict__ for veto in advice.vetoes],
            **_versions(),
            **config.contract(),
        }
        return RankFacts.gather(resolved, contract).encode()

    records = agree(bootstrap, "introduction", introduce, config.setup_timeout_s)
    facts = [RankFacts.decode(record, peer) for peer, record in enumerate(records)]
    compare([json.dumps(fact.contract).encode() for fact in facts], "the group's settings")
    name, reason = _transport_for(transport, facts, one_process, own[0], bootstrap.rank)
    sharers = Counter(fact.device for fact in facts)
    max_blocks = resident_budget(
        [fact.multiprocessors or MAX_BLOCKS * bootstrap.world_size for fact in facts],
        [sharers[fact.device] for fact in facts],
        config.overlap,
        config.max_blocks,
    )
    return Terms(own[0][0], name, reason, max(sharers.values()), max_blocks, own[0][1])


def _crossovers(config: Config, advice: Advice | None) -> Crossovers:
    """Return when `auto` takes which protocol: by a policy file, else by advice, else as built."""
    if config.policy_file is None and advice is not None and advice.crossovers is not None:
        return from_limits(advice.crossovers, f"advice {advice.source}")
    return load_crossovers(config.policy_file)


def _transport_for(
    wanted: str,
    facts: Sequence[RankFacts],
    one_process: bool,
    own: tuple[torch.device, Crossovers, Advice | None],
    rank: int,
) -> tuple[str, str]:
    """Return name of the transport and why; every rank comes to the same answer."""
    device, _, advice = own
    devices = [fact.device for fact in facts]
    name, reason = choose_transport(
        wanted,
        on_gpu="cpu" not in devices,
        one_process=one_process,
        peers_reachable=all(d in fact.reachable for fact in facts for d in devices),
        veto=None if advice is None else advice.veto_among(devices),
    )
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
        "kernels": {op: fingerprint(plugin)[:16] for op, plugin in collectives().items()},
    }

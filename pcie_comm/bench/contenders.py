"""What is measured side by side: this library's ways to do a thing, torch's ways, and floors.

A contender is something that a rank enqueues on its current stream, with outputs of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..channel import KNOWN_PROTOCOLS
from ..errors import CompileError
from ..group import PcieDcpGroup
from ..kernels.collective import Collective
from ..kernels.plan_checks import make_plan
from ..kernels.registry import find
from ..local import LocalWorld
from ..standalone import kimi_topk16
from ..tensors import meta_of
from .floors import Empty, Handshake
from .options import FUSED, OPERATIONS, PAIR, ROUTER
from .torch_group import TorchGroups
from .workload import Tensors, Workload
from .worlds import Worlds

OURS, OVERLAPPING, UNFUSED = "ours", "ours, overlapping", "ours, unfused"
PLAIN, TORCH, DISTRIBUTED = "gather + torch", "torch", "torch.distributed"
EMPTY, HANDSHAKE = "empty kernel", "handshake"
FLOORS = (EMPTY, HANDSHAKE)
ALONE = (OURS, OVERLAPPING, *FLOORS)
NO_PROTOCOL = "-"


@dataclass(frozen=True)
class Contender:
    """One way to do an operation, or a floor.

    Attributes:
        name: What it is.
        protocol: Of its collectives, or NO_PROTOCOL.
        enqueue: Given a rank, enqueues one operation of it; on a CPU, carries it out.
        outputs: Per rank; empty for a floor.
        ours: Its router weights have the bits of this library's.
        groups: Whose failures are its own.
        local: Given a rank, runs what it does beside communication, so that nothing is loaded or
            allocated while ranks wait for each other.
    """

    name: str
    protocol: str
    enqueue: Callable[[int], object]
    outputs: list[Tensors] = field(default_factory=list)
    ours: bool = True
    groups: Sequence[PcieDcpGroup] = ()
    local: Callable[[int], object] = lambda rank: None


def torch_router(logits: torch.Tensor, bias: torch.Tensor, out: Tensors) -> None:
    """Select experts as one would in torch: sigmoid, stable sort, gather. Finite inputs only."""
    weights, ids = out
    score = torch.sigmoid(logits)
    chosen = torch.sort(score + bias, dim=1, descending=True, stable=True).indices[:, :16]
    picked = score.gather(1, chosen)
    torch.div(picked, picked.sum(1, keepdim=True) + 1e-20, out=weights)
    ids.copy_(chosen)


Router = Callable[[torch.Tensor, torch.Tensor, Tensors], object]


def _our_router(logits: torch.Tensor, bias: torch.Tensor, out: Tensors) -> None:
    kimi_topk16(logits, bias, out=(out[0], out[1]))


def one_launch(name: str, protocol: str, world: LocalWorld, work: Workload) -> Contender:
    """The operation as this library's single launch."""
    collective, outputs = find(work.op), work.outputs()
    for group in world.groups:
        group.prepare(collective, rows=work.rows)

    def enqueue(rank: int) -> None:
        world.groups[rank].run(collective, *work.inputs[rank], out=outputs[rank])

    return Contender(name, protocol, enqueue, outputs, groups=world.groups)


def gather_then(
    name: str, protocol: str, world: LocalWorld, work: Workload, router: Router
) -> Contender:
    """The fused operation in two steps: all_gather_pair, then a router."""
    outputs = work.outputs()
    gathered = [_gathered_logits(work, rank) for rank in range(work.world_size)]
    for group in world.groups:
        group.prepare(PAIR, rows=work.rows)

    def local(rank: int) -> None:
        router(gathered[rank], work.inputs[rank][2], outputs[rank][1:])

    def enqueue(rank: int) -> None:
        down, logits, _ = work.inputs[rank]
        pair = (outputs[rank][0], gathered[rank])
        world.groups[rank].all_gather_pair(down, logits, out=pair)
        local(rank)

    ours = router is _our_router
    return Contender(name, protocol, enqueue, outputs, ours, world.groups, local)


def _gathered_logits(work: Workload, rank: int) -> torch.Tensor:
    logits = work.inputs[rank][1]
    return logits.new_zeros(logits.shape[0], logits.shape[1] * work.world_size)


def router_alone(name: str, work: Workload, router: Router) -> Contender:
    """The router on one rank, which talks to nobody."""
    (logits, bias), outputs = work.inputs[0], work.outputs()

    def enqueue(rank: int) -> None:
        router(logits, bias, outputs[0])

    return Contender(name, NO_PROTOCOL, enqueue, outputs, router is _our_router, local=enqueue)


def distributed(groups: TorchGroups, work: Workload) -> Contender:
    """The operation with torch.distributed's all-gather, and torch's router where it selects."""
    outputs, count = work.outputs(), 2 if work.op in (FUSED, PAIR) else 1
    gathered = [
        (outputs[rank][0], _gathered_logits(work, rank)) if work.op == FUSED else outputs[rank]
        for rank in range(work.world_size)
    ]
    room = [
        [
            torch.empty(
                (work.world_size, work.rows, one.view(torch.uint8).numel() // work.rows),
                dtype=torch.uint8,
                device=one.device,
            )
            for one in tensors[:count]
        ]
        for tensors in work.inputs
    ]

    def local(rank: int) -> None:
        if work.op == FUSED:
            torch_router(gathered[rank][1], work.inputs[rank][2], outputs[rank][1:])

    def enqueue(rank: int) -> None:
        for place in range(count):
            shard = work.inputs[rank][place]
            groups.gather_columns(rank, shard, room[rank][place], gathered[rank][place])
        local(rank)

    return Contender(DISTRIBUTED, NO_PROTOCOL, enqueue, outputs, False, (), local)


def _floor(
    world: LocalWorld, plugin: Collective, tokens: Sequence[torch.Tensor]
) -> Callable[[int], object]:
    return lambda rank: world.groups[rank].run(plugin, tokens[rank], out=())


def floors(world: LocalWorld, work: Workload) -> tuple[list[Contender], str]:
    """Return the floors, and why they are left out; empty if they are not.

    An empty kernel, and a handshake where the operation communicates.
    """
    plugins: dict[str, Collective] = {EMPTY: Empty()}
    if work.op != ROUTER:
        plugins[HANDSHAKE] = Handshake()
    tokens = [torch.zeros(4, device=device) for device in work.devices]
    found = []
    for name, plugin in plugins.items():
        try:
            for group in world.groups:
                group.prepare(plugin)
        except CompileError as error:
            return [], str(error)

        enqueue = _floor(world, plugin, tokens)
        found.append(Contender(name, NO_PROTOCOL, enqueue, groups=world.groups))
    return found, ""


def spoken(work: Workload, by_protocol: Mapping[str, LocalWorld]) -> Mapping[str, LocalWorld]:
    """Return the worlds of protocols that an operation speaks; all, if it speaks none of them.

    Plugins may take another one than they are asked for, which is then measured under its own name.
    """
    if work.op in OPERATIONS:
        return by_protocol
    kept = {}
    for protocol, world in by_protocol.items():
        info = world.groups[0]._channels["default"].info
        plan = make_plan(find(work.op), info, [meta_of(one) for one in work.inputs[0]])
        if protocol == "auto" or (KNOWN_PROTOCOLS - {protocol}).isdisjoint(plan.kernel.variant):
            kept[protocol] = world
    return kept or by_protocol


def of_case(work: Workload, worlds: Worlds, torch_groups: TorchGroups | None) -> list[Contender]:
    """Return all contenders of an operation but the floors."""
    if work.op == ROUTER:
        return [router_alone(OURS, work, _our_router), router_alone(TORCH, work, torch_router)]
    found = []
    for protocol, world in spoken(work, worlds.plain).items():
        found.append(one_launch(OURS, protocol, world, work))
        if work.op == FUSED:
            found.append(gather_then(UNFUSED, protocol, world, work, _our_router))
            found.append(gather_then(PLAIN, protocol, world, work, torch_router))
    for protocol, world in spoken(work, worlds.overlapping).items():
        found.append(one_launch(OVERLAPPING, protocol, world, work))
    if torch_groups is not None and work.op in OPERATIONS:
        found.append(distributed(torch_groups, work))
    return found

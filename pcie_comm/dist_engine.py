"""A channel's calls over torch.distributed: on one host as the last resort, or from host to host.

A call's exchanged inputs become one row of bytes with a header. Rails carry it from host to host
(span.py says which), then the ranks of a host share what came, through a group of their own with
slabs. On one host every rank counts as a host: there is one rail, and nothing to share.

Every header must name the same call, in the rails before anything else is sent, and again once all
rows are there. So no rank computes with bytes of another call. The result is the plugin's
reference.

Calls are synchronous, on a GPU too, and cannot be captured.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .dist_blame import Blame
from .errors import CommError, MismatchError, PeerError, UnsupportedError
from .layout import next_epoch
from .reference_engine import ReferenceEngine, likes, pack, packed_nbytes, unpack
from .span import Span
from .tensors import dense, is_capturing
from .transport.torch_dist import HEADER_NBYTES, Flight, Rail
from .watch.board import Board
from .watch.cause import Cause

if TYPE_CHECKING:
    from .group import PcieDcpGroup
    from .kernels.collective import Collective, Plan

SPINS_BEFORE_SLEEP = 50
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 20e-6, 1e-3

SLOW_S = 0.05
"""A wait that lasts so long is noted on the board, so that peers can tell who is missing."""

_HEADER = struct.Struct("<IIII")  # epoch, signature, 1 + rank or 0 for a filler, bytes of payload
assert _HEADER.size == HEADER_NBYTES

LENGTHS = 1 << 32
"""A header tells the bytes of a payload modulo this; the signature tells them, too."""


@dataclass
class Times:
    """Where the calls of a channel spent their time, in nanoseconds.

    Attributes:
        calls: How many there were.
        across_ns: In rails, from the first header sent to the last payload received.
        inside_ns: Sharing within the host.
    """

    calls: int = 0
    across_ns: int = 0
    inside_ns: int = 0


@dataclass
class Route:
    """How a rank's channel reaches the others.

    Attributes:
        span: Where the ranks are; on one host, apart.
        rails: Those that this rank serves, by number.
        inner: The ranks of this host as a group of their own; None if it is the only one.
        board: Notes for the group's ranks.
        lane: Name of the channel, for notes.
        backend: Of the rails, for people.
    """

    span: Span
    rails: dict[int, Rail]
    inner: PcieDcpGroup | None
    board: Board
    lane: str
    backend: str
    times: Times = field(default_factory=Times)


class DistEngine(ReferenceEngine):
    """Runs calls of one rank through rails.

    Args:
        rank: Group rank.
        device: Of every tensor.
        timeout_s: Longest wait for a peer.
        route: How to reach the others; owned from here on.
    """

    waits_jointly = True

    def __init__(self, rank: int, device: torch.device, timeout_s: float, route: Route) -> None:
        shared = "" if route.inner is None else ", shared inside each host"
        super().__init__(rank, timeout_s, "torch_dist", f"gathered by {route.backend}{shared}")
        self.device = device
        self.route = route
        self._host = route.span.hosts[rank]
        self.members = route.span.members[self._host]
        self._blame = Blame(self)

    @property
    def cause(self) -> Cause | None:
        """What the watch found, or None."""
        return self._cause

    def execute(
        self,
        collective: Collective,
        plan: Plan,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Run one call; see ReferenceEngine.

        Raises:
            UnsupportedError: The current stream is capturing; nothing was recorded.
        """
        if self.device.type == "cuda" and is_capturing():
            raise UnsupportedError(
                f"{plan.op} cannot be captured: transport=torch_dist waits for its peers on the "
                "host; make the call outside of the graph, or use a transport with slabs",
                reason="torch_dist under capture",
                rank=self.rank,
                op=plan.op,
            )
        super().execute(collective, plan, inputs, outputs)

    def abort(self, cause: Cause) -> None:
        """See ReferenceEngine. Also ends a wait inside the host."""
        super().abort(cause)
        if self.route.inner is not None:
            for channel in list(self.route.inner._channels.values()):
                channel.engine.abort(cause)

    def _exchange(self, plan: Plan, inputs: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        self.epoch = next_epoch(self.epoch)
        payload = [dense(inputs[i]) for i in plan.exchanged]
        try:
            rows = self._gather(plan, payload)
        except BaseException as error:
            self._blame.tell(error)
            raise
        shards: list[Sequence[torch.Tensor]] = []
        for row, like in zip(rows, likes(plan, payload, len(rows)), strict=True):
            shard = list(inputs)
            for index, tensor in zip(plan.exchanged, unpack(row, like), strict=True):
                shard[index] = tensor
            shards.append(shard)
        return shards

    def _gather(self, plan: Plan, payload: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return every rank's payload as a row of bytes, in rank order."""
        most = max(map(packed_nbytes, likes(plan, payload, 1)))
        own = _packed(payload, most, self.device)
        started = time.perf_counter_ns()
        held = self._across(plan, own)
        crossed = time.perf_counter_ns()
        shared = self._inside(plan, held)
        times = self.route.times
        times.calls += 1
        times.across_ns += crossed - started
        arrived = time.perf_counter_ns()
        times.inside_ns += arrived - crossed
        if self.counters is not None:
            peers = len(self.route.span.hosts) - 1
            self.counters.note_call((len(own) - HEADER_NBYTES) * peers)
            self.counters.note_wait(self.rank, arrived - started)
        span, rows = self.route.span, []
        for rank in range(len(span.hosts)):
            rows.append(shared[span.found(rank, self._host)])
        told = torch.stack([row[:HEADER_NBYTES] for row in rows]).cpu()
        for rank, header in enumerate(told):
            self._check_header(plan, header, rank, len(own))
        return [row[HEADER_NBYTES:] for row in rows]

    def _header(self, plan: Plan, rank: int | None, nbytes: int) -> torch.Tensor:
        who = 0 if rank is None else 1 + rank
        signed = _HEADER.pack(self.epoch, plan.signature, who, nbytes % LENGTHS)
        return torch.frombuffer(bytearray(signed), dtype=torch.uint8)

    def _check_header(self, plan: Plan, header: torch.Tensor, rank: int, nbytes: int) -> None:
        """Raise if `rank` has made another call than this one."""
        epoch, signature, _, length = _HEADER.unpack(header.numpy().tobytes())
        if (epoch, signature, length) == (self.epoch, plan.signature, nbytes % LENGTHS):
            return
        raise MismatchError(
            f"rank {self.rank} called {plan.op}, rank {rank} made another call, or one with "
            "other shapes; all ranks must make the same calls in the same order",
            values={self.rank: plan.signature, rank: signature},
            rank=self.rank,
            peer=rank,
            op=plan.op,
            epoch=self.epoch,
        )

    def _across(self, plan: Plan, own: torch.Tensor) -> torch.Tensor:
        """Return what the rails brought: [rails of each rank here, hosts, bytes].

        All rails are under way at once. What a frame has no room for follows when the frames have
        shown that everybody sends as much: backends may end the process over unequal lengths.
        """
        route, nbytes = self.route, len(own)
        deadline = time.monotonic() + self.timeout_s
        local = route.span.local(self.rank)
        own[:HEADER_NBYTES] = self._header(plan, self.rank, nbytes).to(self.device)
        filler = torch.zeros_like(own) if len(route.rails) > 1 else own
        filler[:HEADER_NBYTES] = self._header(
            plan, self.rank if filler is own else None, nbytes
        ).to(self.device)
        rows = {number: own if number == local else filler for number in route.rails}
        frames, rests, brought = {}, {}, []
        try:
            for number, rail in route.rails.items():
                frames[number] = rail.send_frame(rows[number], self.timeout_s)
        except RuntimeError as error:
            raise self._blame.broke(plan, number, error) from error
        for number, rail in route.rails.items():
            came = self._land(plan, frames[number], deadline, number)
            for host, frame in enumerate(came):
                peer = route.span.keeper(host, number)
                self._check_header(plan, frame[:HEADER_NBYTES], peer, nbytes)
            brought.append(torch.stack(came)[:, :nbytes].to(self.device))
            if nbytes > rail.frame_nbytes:
                rests[number] = rail.send_rest(rows[number], self.timeout_s)
        for index, (number, rest) in enumerate(rests.items()):
            came = self._land(plan, rest, deadline, number)
            brought[index] = torch.cat([brought[index], torch.stack(came)], dim=1)
        missing = route.span.most_served(self._host) - len(brought)
        brought.extend(torch.zeros_like(brought[0]) for _ in range(missing))
        return torch.stack(brought)

    def _inside(self, plan: Plan, held: torch.Tensor) -> torch.Tensor:
        """Return what every rank of this host holds: [local ranks, rails, hosts, bytes]."""
        inner = self.route.inner
        if inner is None:
            return held.unsqueeze(0)
        row = held.reshape(1, 1, -1).view(torch.float8_e4m3fn)  # a dtype that gathers take
        try:
            shared = inner.all_gather_heads(row)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
                inner.check()
        except CommError as error:
            raise self._blame.translated(plan, error) from error
        return shared.view(torch.uint8).reshape(len(self.members), *held.shape)

    def _land(self, plan: Plan, flight: Flight, deadline: float, rail: int) -> list[torch.Tensor]:
        """Wait for a gather and return what came."""
        spins, pause_s, noted = 0, SHORTEST_SLEEP_S, False
        slow = time.monotonic() + SLOW_S
        while not flight.landed():
            spins += 1
            if spins <= SPINS_BEFORE_SLEEP:
                continue
            if self._cause is not None:
                raise self._cause.error(self.rank, plan.op, self.epoch)
            now = time.monotonic()
            if now > slow and not noted:
                noted = True
                self._blame.note_waiting()
            if now > deadline:
                raise self._blame.late(plan, rail, deadline)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_SLEEP_S)
        try:
            return flight.result()
        except RuntimeError as error:
            raise self._blame.broke(plan, rail, error) from error

    def close(self) -> None:
        """Hang up, and close the group inside the host. See ReferenceEngine."""
        for rail in self.route.rails.values():
            rail.drop()
        inner = self.route.inner
        if inner is None:
            return
        if self.failed():
            inner.abort()
        with suppress(PeerError):  # the outer group has agreed already, or has failed
            inner.close()


def _packed(payload: Sequence[torch.Tensor], nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a header's place and `nbytes` bytes, those of dense tensors first."""
    row = torch.zeros(HEADER_NBYTES + nbytes, dtype=torch.uint8, device=device)
    pack(payload, row[HEADER_NBYTES:])
    return row

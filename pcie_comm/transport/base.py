"""The interface that a channel sees of a transport, and what it gets from it.

The life of a slab, on every rank:

    record = transport.allocate(nbytes)   own slab: zeroed, fenced, then its identity is returned
    ... the ranks exchange their records ...
    peers = transport.map(records)        every rank's slab becomes addressable
    transport.seal()                      all have mapped: their writes arrived, names may go
    ... launches ...
    transport.unmap()                     this rank stops addressing its peers
    ... the ranks agree that all have unmapped ...
    transport.free()                      own slab goes back; nothing of it is left on the host

A transport never talks to peers itself: the caller owns every rendezvous, so a failure on one rank
can be told to all. Every method may be called again after it failed, `unmap` and `free` are
idempotent, and both tolerate a half-finished `allocate` or `map`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import InvalidArgumentError


@dataclass(frozen=True)
class PeerMap:
    """What a rank may address of its group, in group-rank order; its own slab included.

    Attributes:
        addresses: Address of each rank's slab as kernels of this rank's device see it; all 0 on a
            transport that no GPU can address.
        views: Host view of each rank's slab, or empty where the host cannot address it.
    """

    addresses: tuple[int, ...]
    views: tuple[memoryview, ...] = ()


@dataclass(frozen=True)
class TransportInfo:
    """What a transport knows of its rank.

    Attributes:
        rank: Group rank.
        world_size: Number of ranks.
        device_index: CUDA ordinal in this process, or None for a rank without a GPU.
    """

    rank: int
    world_size: int
    device_index: int | None = None


class Transport(ABC):
    """Own one slab and map the slabs of the peers. See the module docstring for the order."""

    name: str = ""

    mappings_keep_memory: bool = False
    """A peer's own mapping keeps a slab alive, so that `free` needs no proof from the caller."""

    def __init__(self, info: TransportInfo) -> None:
        self.info = info

    @abstractmethod
    def allocate(self, nbytes: int) -> bytes:
        """Allocate this rank's slab, zero it, fence it, and return the record to publish.

        The record holds all that a peer needs (`encode_record`). The slab starts with its magic
        and a random nonce, which `map` of a peer checks: a stale or foreign handle is refused.

        Raises:
            CudaError: The device has not enough memory, or cannot export it.
            UnsupportedError: This machine lacks what the transport needs.
        """

    @abstractmethod
    def map(self, records: Sequence[bytes]) -> PeerMap:
        """Make the slabs behind `records` (group-rank order, own included) addressable.

        Raises:
            InvalidArgumentError: A record is not one of this transport, or names another slab.
            UnsupportedError: A peer cannot be reached; names both devices.
            CudaError: The driver refused a handle.
        """

    def seal(self) -> None:  # noqa: B027 - most have nothing to do
        """Check what peers wrote while they mapped; drop what only served that, as a file's name.

        Every peer has mapped.

        Raises:
            UnsupportedError: What a peer wrote did not arrive.
        """

    @abstractmethod
    def unmap(self) -> None:
        """Stop addressing the peers."""

    @abstractmethod
    def free(self) -> None:
        """Give the own slab back. The caller proves that every peer has unmapped it.

        Without proof it may be called where `mappings_keep_memory`.
        """

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Return facts for people: memory kind, devices, names."""


@dataclass(frozen=True)
class SlabRecord:
    """What a rank publishes of its slab: plain JSON, never pickled.

    Attributes:
        transport: Name of the transport that made it.
        nbytes: Size of the slab.
        nonce: 16 random bytes, in hex, that stand behind the slab's magic.
        facts: What the transport needs to map it: strings and integers.
    """

    transport: str
    nbytes: int
    nonce: str
    facts: Mapping[str, str | int] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the record as bytes."""
        return json.dumps(
            {
                "transport": self.transport,
                "nbytes": self.nbytes,
                "nonce": self.nonce,
                "facts": dict(self.facts),
            },
            sort_keys=True,
        ).encode()

    @classmethod
    def decode(cls, data: bytes, *, transport: str, peer: int) -> SlabRecord:
        """Read a record and check that it is one of `transport`.

        Raises:
            InvalidArgumentError: The bytes are no record, or one of another transport.
        """
        try:
            raw = json.loads(data)
            record = cls(str(raw["transport"]), int(raw["nbytes"]), str(raw["nonce"]), raw["facts"])
            if not isinstance(record.facts, dict) or len(bytes.fromhex(record.nonce)) != 16:
                raise ValueError("facts or nonce malformed")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidArgumentError(
                f"the slab record of rank {peer} is malformed ({error}); "
                "do all ranks run the same version of pcie_comm?",
                peer=peer,
            ) from error
        if record.transport != transport:
            raise InvalidArgumentError(
                f"rank {peer} published a slab of transport={record.transport!r}, "
                f"expected {transport!r}; give every rank the same transport",
                peer=peer,
            )
        return record

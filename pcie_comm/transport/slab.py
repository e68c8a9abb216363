"""The steps that every transport takes with its slab, whatever memory it lies in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ..errors import CommError, InvalidArgumentError
from ..layout import SlabLayout
from .base import PeerMap, SlabRecord, Transport
from .identity import decode_records, new_header

_SMALLEST = SlabLayout.HEADER_NBYTES


class SlabTransport(Transport):
    """A Transport in four smaller steps: create, attach, detach, destroy.

    `_detach` and `_destroy` tolerate anything half done, do nothing where nothing is left, and keep
    hold of what they could not give back, so that they can be called again.
    """

    _record: SlabRecord | None = None
    _mapped = False

    def allocate(self, nbytes: int) -> bytes:
        """Allocate, zero and fence the own slab; return its record. See Transport."""
        if self._record is not None:
            raise InvalidArgumentError(
                f"transport={self.name!r} already owns a slab; free it first", rank=self.info.rank
            )
        if type(nbytes) is not int or nbytes < _SMALLEST:
            raise InvalidArgumentError(
                f"slab nbytes={nbytes!r} is too small; give at least {_SMALLEST} bytes",
                rank=self.info.rank,
            )
        header = new_header()
        try:
            facts = self._create(nbytes, header)
        except BaseException:
            with suppress(CommError):  # the first error counts; free() can try again
                self._destroy()
            raise
        nonce = header[SlabLayout.NONCE_OFFSET :].hex()
        self._record = SlabRecord(self.name, nbytes, nonce, {"rank": self.info.rank, **facts})
        return self._record.encode()

    def map(self, records: Sequence[bytes]) -> PeerMap:
        """Make every rank's slab addressable, or leave nothing mapped. See Transport."""
        if self._record is None or self._mapped:
            state = "already mapped its peers; unmap" if self._mapped else "owns no slab; allocate"
            raise InvalidArgumentError(
                f"transport={self.name!r} {state} first", rank=self.info.rank
            )
        decoded = decode_records(records, self._record, self.info)
        try:
            peers = self._attach(decoded)
        except BaseException:
            with suppress(CommError):  # the first error counts; unmap() can try again
                self._detach()
            raise
        self._mapped = True
        return peers

    def unmap(self) -> None:
        """Stop addressing the peers. Idempotent."""
        self._detach()
        self._mapped = False

    def free(self) -> None:
        """Give the own slab back. Idempotent; unmaps first where that was not done."""
        self.unmap()
        self._destroy()
        self._record = None

    def describe(self) -> dict[str, object]:
        """Return facts for people."""
        facts: dict[str, object] = {"transport": self.name, "memory": self._memory()}
        if self._record is not None:
            facts["slab_nbytes"] = self._record.nbytes
        return facts

    @abstractmethod
    def _create(self, nbytes: int, header: bytes) -> Mapping[str, str | int]:
        """Create a zeroed slab that starts with `header`; return the facts of its record."""

    @abstractmethod
    def _attach(self, records: Sequence[SlabRecord]) -> PeerMap:
        """Address every slab, check its header, and return the map."""

    @abstractmethod
    def _detach(self) -> None:
        """Undo `_attach`."""

    @abstractmethod
    def _destroy(self) -> None:
        """Undo `_create`."""

    @abstractmethod
    def _memory(self) -> str:
        """Say what the slab lies in."""

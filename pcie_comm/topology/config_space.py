"""Reads PCI configuration space as bytes. It is never written.

Without root Linux shows the first 64 bytes, in which no capability list can be followed; a longer
file still shows only what it has. Layout: PCI Express Base Specification, chapter 7.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from .model import BRIDGE, DOWNSTREAM, ENDPOINT, ROOT_PORT, UPSTREAM, Acs, Link

STATUS, CAPABILITY_POINTER = 0x06, 0x34
STATUS_HAS_CAPABILITIES = 0x10
EXPRESS = 0x10
EXTENDED_START, EXTENDED_END = 0x100, 0x1000
AER, ACS = 0x0001, 0x000D

ACS_BITS = (
    "SrcValid",
    "TransBlk",
    "ReqRedir",
    "CmpltRedir",
    "UpstreamFwd",
    "EgressCtrl",
    "DirectTrans",
)
ROLE_BY_TYPE = {
    0x0: ENDPOINT,
    0x1: ENDPOINT,
    0x4: ROOT_PORT,
    0x5: UPSTREAM,
    0x6: DOWNSTREAM,
    0x7: BRIDGE,
    0x8: BRIDGE,
    0x9: ENDPOINT,
}
SPEED_GTS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}

UNCORRECTABLE = {
    4: "DLP",
    5: "SDES",
    12: "TLP",
    13: "FCP",
    14: "CmpltTO",
    15: "CmpltAbrt",
    16: "UnxCmplt",
    17: "RxOF",
    18: "MalfTLP",
    19: "ECRC",
    20: "UnsupReq",
    21: "ACSViol",
}
CORRECTABLE = {
    0: "RxErr",
    6: "BadTLP",
    7: "BadDLLP",
    8: "Rollover",
    12: "Timeout",
    13: "AdvNonFatalErr",
}


class ConfigSpace:
    """The configuration space of one device, as far as it could be read.

    Args:
        data: From offset 0; 64, 256 or 4096 bytes, or any other number.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def reason(self) -> str:
        """Why capabilities are unknown, or nothing if the basic list can be followed."""
        if len(self._data) <= 64:
            return f"only {len(self._data)} bytes of the configuration space are readable (no root)"
        return ""

    def _word(self, offset: int, layout: str) -> int | None:
        if offset + struct.calcsize(layout) > len(self._data):
            return None
        return int(struct.unpack_from(layout, self._data, offset)[0])

    def _capabilities(self) -> Iterator[tuple[int, int]]:
        """Yield number and offset of the capabilities in the first 256 bytes."""
        status = self._word(STATUS, "<H") or 0
        offset = self._word(CAPABILITY_POINTER, "<B") if status & STATUS_HAS_CAPABILITIES else 0
        seen: set[int] = set()
        while offset and (offset := offset & 0xFC) >= 0x40 and offset not in seen:
            seen.add(offset)
            number, following = self._word(offset, "<B"), self._word(offset + 1, "<B")
            if number is None or number == 0xFF:
                return
            yield number, offset
            offset = following

    def _extended(self) -> Iterator[tuple[int, int]]:
        """Yield number and offset of the capabilities from byte 256 on."""
        offset, seen = EXTENDED_START, set[int]()
        while EXTENDED_START <= offset < EXTENDED_END and offset not in seen:
            seen.add(offset)
            header = self._word(offset, "<I")
            if header in (None, 0, 0xFFFFFFFF):
                return
            assert header is not None  # for the type checker; the line above returned
            yield header & 0xFFFF, offset
            offset = header >> 20 & 0xFFC

    def _express(self) -> int | None:
        return next((at for number, at in self._capabilities() if number == EXPRESS), None)

    def role(self) -> str | None:
        """Return the role that the PCI Express capability states, None if it cannot be read."""
        at = self._express()
        flags = None if at is None else self._word(at + 2, "<H")
        return None if flags is None else ROLE_BY_TYPE.get(flags >> 4 & 0xF)

    def link(self) -> Link | None:
        """Return speeds and widths of the PCI Express capability, None if it cannot be read."""
        at = self._express()
        if at is None:
            return None
        capable, status = self._word(at + 0x0C, "<I"), self._word(at + 0x12, "<H")
        if capable is None or status is None:
            return None
        return Link(
            speed_gts=SPEED_GTS.get(status & 0xF),
            max_speed_gts=SPEED_GTS.get(capable & 0xF),
            width=(status >> 4 & 0x3F) or None,
            max_width=(capable >> 4 & 0x3F) or None,
            unknown={"*": "the registers hold no value of the specification"},
        )

    def acs(self) -> Acs | None:
        """Return the access control services; None if extended space cannot be read."""
        if len(self._data) <= EXTENDED_START:
            return None
        at = next((at for number, at in self._extended() if number == ACS), None)
        if at is None:
            return Acs(present=False)
        capable, control = self._word(at + 4, "<H"), self._word(at + 6, "<H")
        if capable is None or control is None:
            return None
        return Acs(True, _names(capable), _names(control))

    def aer_status(self) -> tuple[str, ...] | None:
        """Return the error bits that are set; None if there is no such capability to read."""
        if len(self._data) <= EXTENDED_START:
            return None
        at = next((at for number, at in self._extended() if number == AER), None)
        if at is None:
            return None
        worse, lesser = self._word(at + 0x04, "<I"), self._word(at + 0x10, "<I")
        if worse is None or lesser is None:
            return None
        found = [name for bit, name in UNCORRECTABLE.items() if worse >> bit & 1]
        return (*found, *(name for bit, name in CORRECTABLE.items() if lesser >> bit & 1))


def _names(bits: int) -> tuple[str, ...]:
    return tuple(name for position, name in enumerate(ACS_BITS) if bits >> position & 1)

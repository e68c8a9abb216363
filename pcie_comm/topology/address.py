"""PCI addresses: one spelling for all that tools print."""

from __future__ import annotations

import re

_ADDRESS = re.compile(
    r"(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{1,2}):(?P<device>[0-9a-f]{1,2})\.(?P<function>[0-7])",
    re.IGNORECASE,
)


def normalise(text: str) -> str | None:
    """Return an address as Linux spells it, `0000:3b:00.0`; None if the text is no address.

    NVML prints eight digits of domain, lspci none where it is 0; VMD domains need five.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    domain = int(match["domain"] or "0", 16)
    device = int(match["device"], 16)
    if device > 0x1F:
        return None
    return f"{domain:04x}:{int(match['bus'], 16):02x}:{device:02x}.{match['function']}"


def bus_of(address: str) -> str:
    """Return domain and bus of an address that `normalise` returned: `0000:3b`."""
    return address.rsplit(":", 1)[0]


def root_name(bus: str) -> str:
    """Return the name that Linux gives to the root complex of a root bus: `pci0000:3b`."""
    return f"pci{bus}"


def sort_key(address: str) -> tuple[int, int, int, int]:
    """Return what sorts addresses in the order of buses."""
    match = _ADDRESS.fullmatch(
        address.removeprefix("pci") + (":00.0" if "." not in address else "")
    )
    if match is None:
        return (1 << 32, 0, 0, 0)
    numbers = [int(match[name] or "0", 16) for name in ("domain", "bus", "device", "function")]
    return (numbers[0], numbers[1], numbers[2], numbers[3])

"""Which machine code runs on which GPU. Pure."""

from __future__ import annotations

import re


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Tell whether machine code for `arch` runs on a device of compute capability `capability`."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if match is None:
        return False
    major, minor = int(match[1]), int(match[2])
    if match[3] == "a":
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


def native_arch(capability: tuple[int, int]) -> str:
    """Return the target to compile for on a device: with its own instructions from Hopper on."""
    suffix = "a" if capability[0] >= 9 else ""
    return f"sm_{capability[0]}{capability[1]}{suffix}"

"""Versions of what the package needs, without importing any of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path

from .facts import MISSING

RANGES = {
    "torch": ((2, 6), (3,)),
    "cuda-python": ((12, 9), (14,)),
    "nvidia-cutlass-dsl": ((4, 8), (5,)),
}
"""From and below, as pyproject.toml has them; a test compares."""

_TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*(?:None|'([^']*)')", re.MULTILINE)


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution, or MISSING."""
    try:
        return importlib.metadata.version(distribution) or MISSING
    except importlib.metadata.PackageNotFoundError:
        return MISSING


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of 2.13.0+cpu."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def fits(distribution: str, version: str) -> bool:
    """Tell whether a version is in the range that the package asks for."""
    lowest, above = RANGES[distribution]
    return lowest <= numbers(version) < above


def wanted(distribution: str) -> str:
    """Return the range as a requirement, for messages."""
    lowest, above = (".".join(map(str, part)) for part in RANGES[distribution])
    return f"{distribution}>={lowest},<{above}"


def torch_cuda(folder: Path | None = None) -> str | None:
    """Return the CUDA version of the installed torch, MISSING for a CPU build, None if unknown.

    Args:
        folder: Of the torch package; by default where an import would find it.
    """
    if folder is None:
        spec = importlib.util.find_spec("torch")
        places = list(spec.submodule_search_locations or ()) if spec else []
        if not places:
            return None
        folder = Path(places[0])
    try:
        match = _TORCH_CUDA.search((folder / "version.py").read_text(encoding="utf-8"))
    except OSError:
        return None
    return (match[1] or MISSING) if match else None


def toolkit(home: Path) -> str | None:
    """Return the version of the CUDA toolkit in a folder, MISSING if none, None if unreadable."""
    if not home.exists():
        return MISSING
    try:
        data = json.loads((home / "version.json").read_text(encoding="utf-8"))
        return str(data["cuda"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""Reads the file that `Config.policy_file` names."""

from __future__ import annotations

import json
from pathlib import Path

from .crossovers import REMEDY, Crossovers, from_report
from .errors import InvalidArgumentError


def load_crossovers(path: Path | None) -> Crossovers:
    """Return the crossovers of a benchmark report; without one, those built in.

    Raises:
        InvalidArgumentError: The file cannot be read, or is no report that can be used.
    """
    if path is None:
        return Crossovers()
    try:
        report = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:  # ValueError: neither UTF-8 nor JSON
        raise InvalidArgumentError(
            f"policy_file={path} cannot be read ({error}); {REMEDY}"
        ) from error
    return from_report(report, f"policy file {path}")

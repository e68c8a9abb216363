"""What differs between two hosts, or between one host at two times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import codec
from .fingerprint import changed_parts, fingerprint
from .model import Host

KEYS = ("address", "name", "title", "index", "region", "gpu", "nbytes")
PARTS = ("name", "memory", "engine", "access", "place", "row", "column")
"""What tells apart items that have the same source and target, or the same name."""
LEFT_OUT = ("unknown", "sources", "remarks")


def differences(one: Host, other: Host) -> list[str]:
    """Return a line for each fact that differs, and first one for the fingerprint."""
    before, after = dict(_facts(codec.plain(one))), dict(_facts(codec.plain(other)))
    lines = []
    for name in [*before, *(name for name in after if name not in before)]:
        then, now = before.get(name, "absent"), after.get(name, "absent")
        if then != now:
            lines.append(f"{name}: {_shown(then)} -> {_shown(now)}")
    if lines:
        parts = changed_parts(fingerprint(one), fingerprint(other))
        same = "the fingerprint is the same in what both know"
        lines.insert(0, f"fingerprint differs in: {', '.join(parts)}" if parts else same)
    return lines


def _shown(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _facts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every single fact with its path; items of lists go by what names them."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in LEFT_OUT:
                yield from _facts(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for at, item in enumerate(value):
            yield from _facts(item, f"{path}[{_key(item, at)}]")
    else:
        yield path, value


def _key(item: dict[str, Any], at: int) -> str:
    if "source" in item and "target" in item:
        first = f"{item['source']}-{item['target']}"
    else:
        first = next((str(item[key]) for key in KEYS if key in item), str(at))
    more = (str(item[key]) for key in PARTS if item.get(key) and str(item[key]) != first)
    return " ".join([first, *more])

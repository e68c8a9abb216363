"""What all records of a host have in common: a field may be unknown, and then says why.

Every class with fields that may be None is a `Record`: its `unknown` maps the name of a None field
to the reason. The key `*` may be given as the reason of all None fields that have none of
their own. A None without a reason is refused, so that no reader turns ignorance into a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

ANY = "*"
Reasons = Mapping[str, str]


@dataclass(frozen=True)
class Record:
    """Base of what may be partly unknown.

    Raises:
        ValueError: A field is None without a reason; a fault of the code that built it.
    """

    def __post_init__(self) -> None:
        given: Reasons = getattr(self, "unknown", {})
        reasons = {}
        for item in fields(self):
            if getattr(self, item.name) is None:
                reasons[item.name] = given.get(item.name) or given.get(ANY) or ""
                if not reasons[item.name]:
                    raise ValueError(f"{type(self).__name__}.{item.name}: None without a reason")
        if hasattr(self, "unknown"):
            object.__setattr__(self, "unknown", reasons)

    def why(self, name: str) -> str:
        """Return why a field is None, or nothing where it is known."""
        reasons: Reasons = getattr(self, "unknown", {})
        return reasons.get(name, "")


def no_reasons() -> Reasons:
    """Return the reasons of a record that was given none."""
    return {}


@dataclass(frozen=True)
class Link(Record):
    """One end's view of its PCIe link.

    Attributes:
        speed_gts: Now, in GT/s; GPUs idle at 2.5.
        max_speed_gts: That this end can do.
        width: Lanes now.
        max_width: Lanes that this end can use.
    """

    speed_gts: float | None = None
    max_speed_gts: float | None = None
    width: int | None = None
    max_width: int | None = None
    unknown: Reasons = field(default_factory=no_reasons)

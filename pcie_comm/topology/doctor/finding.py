"""What a rule returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..advice import Advice
from ..model import Host

ERROR, WARNING, INFO = "error", "warning", "info"
SEVERITIES = (ERROR, WARNING, INFO)


@dataclass(frozen=True)
class Finding:
    """Something that a rule found.

    Attributes:
        id: Of the rule.
        severity: `error`: a group may fail or get wrong data; `warning`: it is slower than the
            parts allow, or may mislead; `info`: worth knowing, no fault.
        subject: What it is about: a device, a pair, the host.
        evidence: The raw value, and where it comes from.
        expected: What a good host has.
        seen: What this one has.
        remedy: What to do.
        source: What the rule rests on.
    """

    id: str
    severity: str
    subject: str
    evidence: str
    expected: str
    seen: str
    remedy: str
    source: str


@dataclass(frozen=True)
class Unjudged:
    """A rule could not judge, because something is not known.

    Attributes:
        id: Of the rule.
        reason: What is missing, and why.
    """

    id: str
    reason: str


@dataclass(frozen=True)
class Case:
    """What rules look at.

    Attributes:
        host: The host.
        advice: A stored one to compare with it, or None.
    """

    host: Host
    advice: Advice | None = None


Outcome = list[Finding] | str
"""Findings, none if all is well; or why the rule cannot judge."""

Rule = Callable[[Case], Outcome]

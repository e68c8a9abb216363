"""A host as a Mermaid flow chart."""

from __future__ import annotations

import re

from ..model import Host
from .tree import forest


def to_mermaid(host: Host) -> str:
    """Return the tree above the GPUs as Mermaid, which GitHub and GitLab draw."""
    lines = ["graph TD"]
    for top in forest(host):
        for _, branch in top.walk():
            own = _identifier(branch.key)
            words = "<br/>".join(
                _plain(text) for text in (branch.key, branch.title, branch.details) if text
            )
            lines.append(f'  {own}["{words}"]')
            lines += [f"  {own} --> {_identifier(child.key)}" for child in branch.below]
    return "\n".join(lines) + "\n"


def _identifier(key: str) -> str:
    return "n" + re.sub(r"[^0-9A-Za-z]", "_", key)


def _plain(text: str) -> str:
    """Return a text without what Mermaid or HTML would take for its own."""
    return re.sub(r"[\"<>&#;`]", " ", text)

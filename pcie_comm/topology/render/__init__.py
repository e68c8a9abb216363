"""A host as text for terminals, as one HTML page, and as Mermaid."""

from .html import to_html
from .mermaid import to_mermaid
from .text import to_text

__all__ = ["to_html", "to_mermaid", "to_text"]

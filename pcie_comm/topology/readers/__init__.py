"""Readers of what other tools print: each turns a text into a host, the rest unknown."""

from .detect import KINDS, read_file, read_text, recognise

__all__ = ["KINDS", "read_file", "read_text", "recognise"]

"""From what was counted to a verdict. Pure."""

from __future__ import annotations

from ..topology.probed import CORRUPT, DROPPED, HANG, MIRRORED, OK
from .pattern import Counts

Verdict = tuple[str, str]
"""One of probed.VERDICTS, and the evidence."""

WELL: Verdict = (OK, "")


def of_writes(owner: Counts, writer: Counts | None) -> Verdict:
    """Judge bytes that were written to a place.

    Args:
        owner: What the owner of the memory sees.
        writer: What the writer itself sees there; None if it did not look.
    """
    if owner.wrong == 0:
        return WELL
    share = f"{owner.wrong} of {owner.words} words"
    if owner.stale < owner.wrong:
        return (
            CORRUPT,
            f"{share} are wrong for the owner, {owner.stale} of them as they were before",
        )
    if writer is not None and writer.wrong == 0:
        return MIRRORED, f"{share} did not reach the owner, and the writer reads back all it wrote"
    return DROPPED, f"{share} are as they were before"


def of_reads(reader: Counts, own: Counts | None) -> Verdict:
    """Judge bytes that were read from a place.

    Args:
        reader: What the reader sees; stale words are those that the owner had there before.
        own: The same compared with what lies in the reader's own memory; wrong words are not that.
    """
    if reader.wrong == 0:
        return WELL
    share = f"{reader.wrong} of {reader.words} words"
    if own is not None and own.wrong == 0:
        return MIRRORED, f"{share} are the reader's own"
    return CORRUPT, f"{share} are wrong, {reader.stale} of them as they were before"


def of_trial(wrong: int, words: int, done: int, rounds: int) -> Verdict:
    """Judge what one rank received in many rounds."""
    if wrong:
        return CORRUPT, f"{wrong} of {words} words are wrong, after {done} of {rounds} rounds"
    if done < rounds:
        return HANG, f"it gave up waiting after {done} of {rounds} rounds"
    return WELL

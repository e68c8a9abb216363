"""How ranks agree: on how a step went (`agree`), and on what they brought along (`compare`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import CommError, InvalidArgumentError, MismatchError, PeerAbortedError

if TYPE_CHECKING:
    from .bootstrap import Bootstrap

Record = TypeVar("Record")

_DONE = b"\x01"
_FAILED = b"\x00"
_MAX_REASON = 4096
"""Longest error text, in characters, that travels to the other ranks."""


def agree(
    bootstrap: Bootstrap, what: str, work: Callable[[], bytes], timeout_s: float
) -> list[bytes]:
    """Run `work` on every rank and share how it went.

    Collective. Every rank takes part whether its own work succeeded or not, so nobody waits for a
    rank that has already failed. Work must not talk to peers itself.

    Args:
        bootstrap: The ranks.
        what: The step in a few words, for messages: "mapping the peers' slabs".
        work: Returns the bytes to share.
        timeout_s: Longest wait for the peers' outcomes, in seconds, after the own work.

    Returns:
        What each rank's work returned, in group-rank order.

    Raises:
        PeerAbortedError: Another rank's work failed; holds that error's class and text.
        Exception: The own work's error, if it failed here.
    """
    error: Exception | None = None
    payload = b""
    try:
        payload = work()
    except Exception as caught:
        error = caught
    except BaseException as caught:  # leaving the process must not wait for peers
        bootstrap.abort(f"{what}: {type(caught).__name__}")
        raise
    try:
        outcome = _DONE + payload if error is None else _FAILED + _describe(error)
        try:
            outcomes = bootstrap.all_gather(outcome, timeout_s)
        except CommError:
            if error is not None:
                raise error  # noqa: B904  the exchange's failure stays visible as __context__
            raise
        if error is not None:
            raise error
        _raise_first_failure(bootstrap, what, outcomes)
        return [outcome[1:] for outcome in outcomes]
    finally:
        del error  # its traceback holds this frame


def _describe(error: Exception) -> bytes:
    return json.dumps([type(error).__name__, str(error)[:_MAX_REASON]]).encode()


def _raise_first_failure(bootstrap: Bootstrap, what: str, outcomes: Sequence[bytes]) -> None:
    failed = [peer for peer, outcome in enumerate(outcomes) if not outcome.startswith(_DONE)]
    if not failed:
        return
    kind, text = read_pair(outcomes[failed[0]][1:], str, str)
    others = f" (ranks {', '.join(map(str, failed[1:]))} failed as well)" if failed[1:] else ""
    raise PeerAbortedError(
        f"{what} failed on rank {failed[0]}: {kind or 'malformed record'}: {text}{others}",
        rank=bootstrap.rank,
        peer=failed[0],
    )


def compare(records: Sequence[bytes], what: str) -> None:
    """Check that the ranks' contract records, JSON objects, are equal field by field.

    Every rank holds the same records, so every rank reaches the same verdict.

    Args:
        records: One record per rank, in group-rank order.
        what: What the records describe, for the message.

    Raises:
        MismatchError: `values` maps each rank to its values of the fields that differ.
        InvalidArgumentError: A record is no JSON object.
    """
    contracts = [read_record(record, peer, "contract") for peer, record in enumerate(records)]
    names = sorted({name for contract in contracts for name in contract})
    absent = "<absent>"
    differing = [
        name
        for name in names
        if any(c.get(name, absent) != contracts[0].get(name, absent) for c in contracts)
    ]
    if not differing:
        return
    values = {
        rank: {name: contract.get(name, absent) for name in differing}
        for rank, contract in enumerate(contracts)
    }
    listing = "; ".join(
        f"{name}: " + ", ".join(f"rank {rank}={row[name]!r}" for rank, row in values.items())
        for name in differing
    )
    raise MismatchError(
        f"the ranks disagree on {what}: {listing}; give every rank the same", values=values
    )


def read_record(data: bytes, peer: int, what: str) -> dict[str, Any]:
    """Read a JSON object that rank `peer` sent.

    Raises:
        InvalidArgumentError: It is none.
    """
    try:
        found = json.loads(data)
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as error:
        raise malformed(peer, what, str(error)) from error
    return found


def malformed(peer: int, what: str, why: str) -> InvalidArgumentError:
    """Return the error for a record of rank `peer` that is not what it must be."""
    return InvalidArgumentError(
        f"the {what} record of rank {peer} is malformed ({why}); "
        "do all ranks run the same version of pcie_comm?",
        peer=peer,
    )


def read_fields(kind: Callable[..., Record], raw: object, peer: int, what: str) -> Record:
    """Make a dataclass of strings and integers from what rank `peer` sent.

    Raises:
        InvalidArgumentError: A field is missing, unknown or of another type.
    """
    wanted = {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    found = raw if isinstance(raw, dict) else {}
    kinds = {name: type(value).__name__ for name, value in found.items()}
    if kinds != wanted:
        raise malformed(peer, what, f"fields={kinds}, expected {wanted}")
    return kind(**found)


def read_pair(data: bytes, first: type, second: type) -> tuple[Any, Any]:
    """Read a JSON list of two values that a rank sent; what else it may be becomes text.

    For what a rank says of its failure: there, a damaged record must not hide that it failed.
    """
    with suppress(ValueError, RecursionError):
        found = json.loads(data)
        if isinstance(found, list) and [type(one) for one in found] == [first, second]:
            return found[0], found[1]
    return None, repr(data[:100])

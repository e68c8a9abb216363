"""How a slab proves to be the one that its record names, and a process to be this one."""

from __future__ import annotations

import errno
import functools
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from ..agreement import malformed
from ..errors import InvalidArgumentError, UnsupportedError
from ..layout import SLAB_MAGIC, SlabLayout
from .base import SlabRecord, TransportInfo

HEADER_NBYTES = SlabLayout.NONCE_OFFSET + SlabLayout.NONCE_NBYTES
"""Length of magic and nonce, the only bytes of a new slab that are not zero."""

REMEDY = "see to ACS and IOMMU (pcie-comm doctor), or use transport='host_pinned'"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_token: tuple[int, str] | None = None


def process_token() -> str:
    """Return a random name of this process. Unlike a pid it is never used twice."""
    global _token
    if _token is None or _token[0] != os.getpid():  # a fork is another process
        _token = os.getpid(), secrets.token_hex(8)
    return _token[1]


def process_facts() -> dict[str, str | int]:
    """Return what a record says of its process: host, pid, token.

    Raises:
        UnsupportedError: The process has no descriptor left.
    """
    return {"boot": _boot_of(_BOOT_ID), "pid": os.getpid(), "process": process_token()}


@functools.cache
def _boot_of(path: Path) -> str:
    """Return the name of this host since it was started."""
    try:
        return path.read_text().strip()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise UnsupportedError(
                f"cannot read {path} ({error.strerror}); raise the number of files that a process "
                "may open (ulimit -n)",
                reason="no descriptor is left",
            ) from error
        return os.uname().nodename


def check_same_host(record: SlabRecord, peer: int) -> None:
    """Check that `peer` runs on this host.

    Raises:
        UnsupportedError: It does not.
    """
    here, there = process_facts()["boot"], text_fact(record, "boot", peer)
    if here != there:
        raise UnsupportedError(
            f"rank {peer} runs on another host (boot_id={there}, here boot_id={here}); "
            f"transport={record.transport!r} reaches ranks of one host only",
            reason="peer is on another host",
            peer=peer,
        )


def new_header() -> bytes:
    """Return the first bytes of a new slab: magic and a fresh nonce."""
    magic = SLAB_MAGIC.to_bytes(SlabLayout.NONCE_OFFSET, "little")
    return magic + secrets.token_bytes(SlabLayout.NONCE_NBYTES)


def check_header(header: bytes, record: SlabRecord, peer: int) -> None:
    """Check what a mapped slab starts with against its record.

    Raises:
        InvalidArgumentError: It is no slab, or not this one.
    """
    nonce = header[SlabLayout.NONCE_OFFSET :].hex()
    if int.from_bytes(header[: SlabLayout.NONCE_OFFSET], "little") != SLAB_MAGIC:
        raise InvalidArgumentError(
            f"what the record of rank {peer} points to is no slab (header={header.hex()}): it is "
            "stale, or reads of that memory do not arrive here. Exchange the records again; if "
            f"that does not help, {REMEDY}",
            peer=peer,
        )
    if nonce != record.nonce:
        raise InvalidArgumentError(
            f"the record of rank {peer} points to another slab (nonce={nonce}, "
            f"expected={record.nonce}): it is stale; exchange the records again",
            peer=peer,
        )


def decode_records(
    records: Sequence[bytes], own: SlabRecord, info: TransportInfo
) -> list[SlabRecord]:
    """Decode the records of a group and check that they fit together and to the own slab.

    Raises:
        InvalidArgumentError: Count, kind, size or order of the records is wrong.
    """
    if len(records) != info.world_size:
        raise InvalidArgumentError(
            f"got records={len(records)} for world_size={info.world_size}; give one per rank",
            rank=info.rank,
        )
    decoded = [
        SlabRecord.decode(data, transport=own.transport, peer=peer)
        for peer, data in enumerate(records)
    ]
    if decoded[info.rank] != own:
        raise InvalidArgumentError(
            f"record {info.rank} is not the one that this rank published; "
            "give the records of one allocation, in group-rank order",
            rank=info.rank,
        )
    for peer, record in enumerate(decoded):
        if count_fact(record, "rank", peer) != peer:
            raise InvalidArgumentError(
                f"record {peer} is of rank {record.facts['rank']}; "
                "give the records in group-rank order",
                peer=peer,
            )
        if record.nbytes != own.nbytes:
            raise InvalidArgumentError(
                f"rank {peer} has a slab of nbytes={record.nbytes}, this rank one of "
                f"nbytes={own.nbytes}; give every rank the same capacity",
                peer=peer,
            )
    return decoded


def text_fact(record: SlabRecord, name: str, peer: int) -> str:
    """Return a text of a record that came from a peer, or raise InvalidArgumentError."""
    value = record.facts.get(name)
    if not isinstance(value, str):
        raise malformed(peer, "slab", f"{name}={value!r}")
    return value


def count_fact(record: SlabRecord, name: str, peer: int) -> int:
    """Return a non-negative 64-bit integer of a peer's record, or raise InvalidArgumentError."""
    value = record.facts.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise malformed(peer, "slab", f"{name}={value!r}")
    return value

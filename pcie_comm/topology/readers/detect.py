"""Says what a file is, and has it read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ...errors import InvalidArgumentError
from .. import codec
from ..model import FORMAT, Host
from . import bandwidth, lspci, lspci_tree, nccl_xml, plain, smi

MOST_NBYTES = 16 << 20
"""Of a file: forty times what lspci says of a large host."""

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

Reader = Callable[[str, str], Host]

KINDS: dict[str, tuple[Callable[[str], bool], Reader]] = {
    FORMAT: (lambda text: text.lstrip().startswith("{"), codec.from_json),
    nccl_xml.KIND: (nccl_xml.matches, nccl_xml.read),
    lspci.KIND: (lspci.matches, lspci.read),
    lspci_tree.KIND: (lspci_tree.matches, lspci_tree.read),
    smi.KIND: (smi.matches, smi.read),
    bandwidth.NVBANDWIDTH: (bandwidth.is_nvbandwidth, bandwidth.read),
    bandwidth.P2P_TEST: (bandwidth.is_p2p_test, bandwidth.read),
    plain.NUMACTL: (plain.is_numactl, plain.read_numactl),
    plain.ACS_LINES: (plain.is_acs_lines, plain.read_acs_lines),
    plain.CMDLINE: (plain.is_cmdline, plain.read_cmdline),
    bandwidth.MATRIX: (bandwidth.is_matrix, bandwidth.read),
}
"""By kind, the surest first: whether a text is of it, and its reader."""


def recognise(text: str) -> str | None:
    """Return the kind of a text, None if it is none that can be read."""
    return next((kind for kind, (matches, _) in KINDS.items() if matches(text)), None)


def read_text(text: str, source: str) -> Host:
    """Read a text of any kind.

    Args:
        text: What a tool printed; escape sequences and lines that begin with `# ` are left out.
        source: Name of the file, for messages.

    Raises:
        InvalidArgumentError: It is of no kind that can be read, or damaged.
    """
    clean = "\n".join(
        line for line in _ESCAPE.sub("", text).splitlines() if not line.startswith("# ")
    )
    if not clean.strip():
        raise InvalidArgumentError(f"file={source} is empty; give the output of a tool")
    kind = recognise(clean)
    if kind is None:
        raise InvalidArgumentError(
            f"file={source} is nothing that can be read; known are {', '.join(KINDS)}"
        )
    return KINDS[kind][1](clean, source)


def read_file(path: Path) -> Host:
    """Read a file of any kind.

    Raises:
        InvalidArgumentError: It cannot be read, is too large, binary, or of no known kind.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_NBYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(
            f"file={path} cannot be read: {error.strerror}; name a text, or a folder of texts"
        ) from error
    if len(data) > MOST_NBYTES:
        raise InvalidArgumentError(
            f"file={path} is larger than {MOST_NBYTES} bytes; no such tool prints that much"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"file={path} is binary, at byte {error.start}") from error
    if "\0" in text:
        raise InvalidArgumentError(f"file={path} is binary, at byte {text.index(chr(0))}")
    return read_text(text, str(path))

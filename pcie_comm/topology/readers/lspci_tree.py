"""Reads the tree that `lspci -t` and `-tv` draw.

It has addresses and names, no classes: which device is a GPU is judged by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...errors import InvalidArgumentError
from ..address import normalise, root_name, sort_key
from ..model import ANY, ENDPOINT, Host, PciNode, unknown_system
from ..sysfs import role_by_depth
from .lspci import gpus_of, root_complex

KIND = "lspci -t"
ABSENT = "lspci -t does not print it"

_TOKEN = re.compile(
    r"\[(?:(?P<domain>[0-9a-f]{4,5}):)?(?P<bus>[0-9a-f]{2})(?:-[0-9a-f]{2})?\]"
    r"|(?P<device>[0-9a-f]{2}\.[0-7])(?=$|\s|-\[)"
)
_TEXT = re.compile(r"\s{2}(?=[A-Za-z])")
_ROOT = re.compile(r"^(?:-\+-|-|\s\+-|\s\\-)\[(?:[0-9a-f]{4,5}:)?[0-9a-f]{2}\]")
_GPU_NAME = re.compile(
    r"NVIDIA Corporation (?!.*(?:Audio|USB|UCSI|Bridge|NVSwitch))|AMD/ATI\]? (?!.*Audio)"
)


def matches(text: str) -> bool:
    """Whether a text is such a tree."""
    return any(_ROOT.match(line) for line in text.splitlines())


class _Walk:
    """Where devices hang, as the lines are read one by one."""

    def __init__(self) -> None:
        self.parents: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.bridges: set[str] = set()
        self._domain = "0000"
        self._root = ""
        self._columns: dict[int, tuple[str, str]] = {}  # column -> bus, address above it

    def line(self, line: str) -> None:
        """Take one line of the drawing."""
        text = _TEXT.search(line)
        drawing = line[: text.start()] if text else line
        above: tuple[str, str] | None = None
        device = ""
        for token in _TOKEN.finditer(drawing):
            if token["device"]:
                above = above or self._hanging_at(token.start())
                device = normalise(f"{self._domain}:{above[0]}:{token['device']}") or ""
                self.parents[device] = above[1]
                self._columns[token.start()] = above
                above = None
            elif device:
                self.bridges.add(device)
                above = (token["bus"], device)
            else:
                self._domain = token["domain"] or "0000"
                self._root = token["bus"]
                self._columns = {}
                above = (self._root, root_name(f"{self._domain}:{self._root}"))
        if text and device:
            self.names[device] = line[text.end() :].strip()

    def _hanging_at(self, column: int) -> tuple[str, str]:
        """Return the bus of the devices that begin at a column, the root's for a new column."""
        self._columns = {at: bus for at, bus in self._columns.items() if at <= column}
        root = (self._root, root_name(f"{self._domain}:{self._root}"))
        return self._columns.get(column, root)


def read(text: str, source: str) -> Host:
    """Read the tree; GPUs are judged by name.

    Raises:
        InvalidArgumentError: It has no device.
    """
    walk = _Walk()
    for line in text.splitlines():
        walk.line(line)
    if not walk.parents:
        raise InvalidArgumentError(f"file={source} draws no PCI device")
    nodes = [_node(address, walk, walk.parents) for address in walk.parents]
    roots = {above for above in walk.parents.values() if above.startswith("pci")}
    nodes += [root_complex(name) for name in roots]
    nodes.sort(key=lambda node: (sort_key(node.address), node.address))
    return Host(
        sources=(f"{KIND}: {source}",),
        system=unknown_system(ABSENT),
        nodes=tuple(nodes),
        gpus=gpus_of(nodes, ABSENT),
        remarks=(f"{source}: roles follow from depth, and GPUs from names",),
        unknown={ANY: ABSENT},
    )


def _node(address: str, walk: _Walk, parents: Mapping[str, str]) -> PciNode:
    name = walk.names.get(address)
    bridge = address in walk.bridges
    is_gpu = not bridge and name is not None and _GPU_NAME.search(name) is not None
    vendor = None
    if is_gpu:
        vendor = "10de" if name and "NVIDIA" in name else "1002"
    return PciNode(
        address=address,
        parent=parents[address],
        role=role_by_depth(address, parents) if bridge else ENDPOINT,
        class_code="060400" if bridge else "030000" if is_gpu else None,
        vendor=vendor,
        name=name,
        unknown={ANY: ABSENT},
    )

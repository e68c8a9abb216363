"""The record of a host. Frozen values; what is not known is None, and says why: see record.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .probed import Check, Exchange, Gap, Ladder, LinkLoad, Pattern
from .record import ANY, Link, Reasons, Record, no_reasons

__all__ = ["ANY", "Link", "Reasons", "Record"]  # which stand in record.py

FORMAT = "pcie_comm topology 1"

ROOT_COMPLEX = "root complex"
ROOT_PORT = "root port"
UPSTREAM = "switch upstream"
DOWNSTREAM = "switch downstream"
SWITCH = "switch"  # as a whole: a source that does not tell its ports apart
BRIDGE = "bridge"  # to conventional PCI
ENDPOINT = "endpoint"
ROLES = (ROOT_COMPLEX, ROOT_PORT, UPSTREAM, DOWNSTREAM, SWITCH, BRIDGE, ENDPOINT)

LABELS = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")
"""From near to far."""

P2P_KINDS = ("read", "write", "nvlink", "atomics", "prop")
"""The five questions of NVML's P2P status, and of `nvidia-smi topo -p2p r|w|n|a|p`."""

MOST_CPUS = 1 << 16
"""CPU numbers end below it; Linux has at most 8192."""


@dataclass(frozen=True)
class Acs(Record):
    """Access Control Services of a port: names of bits as lspci prints them.

    Attributes:
        present: Whether the device has the capability.
        capable: Bits that it can switch on.
        enabled: Bits that are on. `ReqRedir` sends peer traffic up to the root.
    """

    present: bool
    capable: tuple[str, ...] = ()
    enabled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Aer(Record):
    """Advanced Error Reporting: the kernel's counters since boot, and status bits that are set.

    Attributes:
        correctable: Count by error name, zeros left out; likewise nonfatal and fatal.
        status: Names of bits that are set in the device's status registers.
    """

    correctable: Mapping[str, int] | None = None
    nonfatal: Mapping[str, int] | None = None
    fatal: Mapping[str, int] | None = None
    status: tuple[str, ...] | None = None
    unknown: Reasons = field(default_factory=no_reasons)


@dataclass(frozen=True)
class Bar(Record):
    """A memory window of a device.

    Attributes:
        region: Index of the base address register.
        nbytes: Its size.
    """

    region: int
    nbytes: int


@dataclass(frozen=True)
class PciNode(Record):
    """A device of the PCI tree, or a root complex.

    Attributes:
        address: `0000:3b:00.0`; of a root complex `pci0000:3a`.
        parent: Address of the node above; None for a root complex.
        role: One of ROLES.
        virtual: Its name or address says so: a placeholder, or a port of a chip that may hold
            several switches.
        vendor: Four hexadecimal digits, likewise device.
        class_code: Six hexadecimal digits.
        name: In words.
        numa_node: That the firmware reports.
        bars: Memory windows.
        driver: Kernel driver bound to it; nothing if there is none.
    """

    address: str
    parent: str | None = None
    role: str | None = None
    virtual: bool | None = None
    vendor: str | None = None
    device: str | None = None
    class_code: str | None = None
    name: str | None = None
    numa_node: int | None = None
    link: Link | None = None
    acs: Acs | None = None
    aer: Aer | None = None
    bars: tuple[Bar, ...] | None = None
    driver: str | None = None
    unknown: Reasons = field(default_factory=no_reasons)


@dataclass(frozen=True)
class Gpu(Record):
    """A GPU under its four names, and what the driver says of it.

    Attributes:
        name: In matrices: `GPU0`, in the order of the source.
        ordinal: Of CUDA, under the environment that was seen.
        nvml_index: Of NVML and nvidia-smi.
        address: PCI address.
        uuid: `GPU-` and 36 characters.
        serial: Of the board.
        product: What it is sold as.
        memory_nbytes: Of the GPU.
        bar1_nbytes: Of the window through which peers address its memory.
        mig: Whether Multi-Instance GPU is on.
        mig_uuids: Of its instances.
        display: Whether a display uses it.
        numa_node: Nearest to it.
        cpus: Nearest to it, as a list of ranges.
        link: As the driver reports it.
    """

    name: str
    ordinal: int | None = None
    nvml_index: int | None = None
    address: str | None = None
    uuid: str | None = None
    serial: str | None = None
    product: str | None = None
    memory_nbytes: int | None = None
    bar1_nbytes: int | None = None
    mig: bool | None = None
    mig_uuids: tuple[str, ...] | None = None
    display: bool | None = None
    numa_node: int | None = None
    cpus: str | None = None
    link: Link | None = None
    unknown: Reasons = field(default_factory=no_reasons)


@dataclass(frozen=True)
class NumaNode(Record):
    """A NUMA node.

    Attributes:
        index: Its number.
        cpus: As a list of ranges, `0-63,128-191`.
        memory_nbytes: Of the node.
        distances: To nodes by number, 10 is itself.
    """

    index: int
    cpus: str | None = None
    memory_nbytes: int | None = None
    distances: Mapping[str, int] | None = None
    unknown: Reasons = field(default_factory=no_reasons)


@dataclass(frozen=True)
class Pair(Record):
    """What the driver says about an ordered pair of GPUs.

    Attributes:
        source: Name of the GPU that reads or writes.
        target: Name of the GPU whose memory it is.
        p2p: Status by kind, see P2P_KINDS; `OK`, or the driver's abbreviation of what is missing.
            The kind `?` is a matrix that did not say what it shows.
        cuda_access: Answer of cuDeviceCanAccessPeer.
        performance_rank: Of CUDA; 0 is the best.
        native_atomics: Whether atomics of the source work in the target's memory.
    """

    source: str
    target: str
    p2p: Mapping[str, str] | None = None
    cuda_access: bool | None = None
    performance_rank: int | None = None
    native_atomics: bool | None = None
    unknown: Reasons = field(default_factory=no_reasons)


@dataclass(frozen=True)
class LabelMatrix(Record):
    """Labels between devices; a cell is None where the source does not show it."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[str | None, ...], ...]

    def get(self, row: str, column: str) -> str | None:
        """Return the label of a pair, None if it is not in the matrix."""
        if row not in self.rows or column not in self.columns:
            return None
        return self.cells[self.rows.index(row)][self.columns.index(column)]


@dataclass(frozen=True)
class Measurement(Record):
    """A measured matrix, as its source prints it.

    Attributes:
        title: As printed.
        unit: `GB/s`, `us`.
        rows: What the rows stand for: names of GPUs, or `CPU`.
        columns: Likewise.
        cells: By row and column; None where nothing is printed.
        p2p: Whether P2P was on.
        direction: `unidirectional` or `bidirectional`.
        access: `read` or `write`.
        engine: `copy engine` or `SM`.
        nbytes: Of a transfer.
        gaps: Why cells are None, where there is a reason for one of its own.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]
    unit: str | None = None
    p2p: bool | None = None
    direction: str | None = None
    access: str | None = None
    engine: str | None = None
    nbytes: int | None = None
    gaps: tuple[Gap, ...] = ()
    unknown: Reasons = field(default_factory=no_reasons)


@dataclass(frozen=True)
class System(Record):
    """What the host is apart from its PCI devices.

    Attributes:
        hostname: Its name.
        kernel: Release of Linux.
        cmdline: Kernel command line.
        cpu: Model of the processor.
        sockets: Processor packages.
        numa: NUMA nodes.
        iommu: `off`, `passthrough` or `translated`.
        container: `none`, or the kind.
        virtual_machine: `none`, or the kind.
        driver: Version of the NVIDIA driver.
        environment: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, each if it is set.
    """

    hostname: str | None = None
    kernel: str | None = None
    cmdline: str | None = None
    cpu: str | None = None
    sockets: int | None = None
    numa: tuple[NumaNode, ...] | None = None
    iommu: str | None = None
    container: str | None = None
    virtual_machine: str | None = None
    driver: str | None = None
    environment: Mapping[str, str] | None = None
    unknown: Reasons = field(default_factory=no_reasons)


@dataclass(frozen=True)
class Host(Record):
    """All that is known of a host.

    Attributes:
        sources: Where it comes from, as `kind: name`.
        system: Apart from PCI.
        nodes: The PCI tree, in the order of addresses.
        gpus: In the order of the source.
        driver_labels: As nvidia-smi or NVML gives them, other devices included.
        pairs: Capability per ordered pair.
        measurements: Matrices that were measured.
        checks: What was verified; empty if nothing was.
        exchanges: Times of the protocols, likewise the following.
        ladders: Time by size.
        patterns: Several transfers at once.
        loads: Links under load.
        loose_acs: Of ports that the source does not name.
        remarks: What a reader found odd or left out.
        format: Of the JSON form.
    """

    sources: tuple[str, ...]
    system: System
    nodes: tuple[PciNode, ...] | None = None
    gpus: tuple[Gpu, ...] | None = None
    driver_labels: LabelMatrix | None = None
    pairs: tuple[Pair, ...] | None = None
    measurements: tuple[Measurement, ...] = ()
    checks: tuple[Check, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    ladders: tuple[Ladder, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    loads: tuple[LinkLoad, ...] = ()
    loose_acs: tuple[Acs, ...] = ()
    remarks: tuple[str, ...] = ()
    format: str = FORMAT
    unknown: Reasons = field(default_factory=no_reasons)

    def node(self, address: str | None) -> PciNode | None:
        """Return the node of an address, None if there is none."""
        return next((node for node in self.nodes or () if node.address == address), None)

    def path(self, address: str | None) -> tuple[PciNode, ...]:
        """Return the nodes from a device up to its root complex, itself first.

        Ends early where a parent is missing; a loop, which no real tree has, ends it too.
        """
        by_address = {node.address: node for node in self.nodes or ()}
        found: list[PciNode] = []
        while address in by_address and by_address[address] not in found:
            found.append(by_address[address])
            address = found[-1].parent
        return tuple(found)


def unknown_system(reason: str) -> System:
    """Return a system of which nothing is known."""
    return System(unknown={ANY: reason})


def expand_ranges(text: str) -> tuple[int, ...]:
    """Return the numbers of a list of ranges such as `0-3,8`.

    Raises:
        ValueError: It is no such list, or has a number from MOST_CPUS on.
    """
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        start, end = int(first), int(last or first)
        if not 0 <= start <= end < MOST_CPUS:
            raise ValueError(f"{part} is no range of numbers below {MOST_CPUS}")
        numbers.extend(range(start, end + 1))
    return tuple(numbers)


def to_ranges(numbers: tuple[int, ...]) -> str:
    """Return numbers as a list of ranges: what `expand_ranges` reads."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)

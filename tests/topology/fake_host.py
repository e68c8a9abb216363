"""Builds hosts: a sysfs and proc tree on disk, and NVML in the place of pynvml.

The label of a pair is computed from the blueprint, not from the files: an oracle for the reader.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
ACS_REDIRECT = 0b0001101  # SrcValid, ReqRedir, CmpltRedir
SPEED_CODE = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5}
GENERATION = SPEED_CODE


@dataclass
class Gpu:
    speed: float = 2.5  # idle
    max_speed: float = 32.0
    width: int = 16
    max_width: int = 16
    memory: int = 96 * GIB
    bar1: int = 128 * GIB
    mig: Sequence[str] = ()
    display: bool = False
    product: str = "NVIDIA Fake 6000"
    port_speed: float = 32.0
    correctable: int = 0
    replays: int = 0
    # Filled in by the builder.
    number: int = -1
    address: str = ""
    trail: tuple[int, ...] = ()
    numa: int = -1
    root: int = -1

    @property
    def uuid(self) -> str:
        return f"GPU-{self.number:08x}-1111-2222-3333-{self.number:012x}"

    @property
    def serial(self) -> str:
        return f"{987650000000 + self.number}"


@dataclass
class Switch:
    below: Sequence[Gpu | Switch]
    acs: int = 0b0000001  # SrcValid
    width: int = 16


@dataclass
class Root:
    below: Sequence[Gpu | Switch] = ()
    numa: int = 0
    flat: bool = False  # GPUs directly on the root bus, as in many virtual machines


@dataclass
class FakeHost:
    roots: Sequence[Root]
    privileged: bool = True
    iommu: str = "identity"  # the type of every IOMMU group, or nothing for none
    hypervisor: bool = False
    hostname: str = "fakehost-7"
    cmdline: str = "BOOT_IMAGE=/vmlinuz root=UUID=12345678-1234-1234-1234-123456789abc iommu=pt"
    numa_known: bool = True
    gpus: list[Gpu] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._switches = itertools.count()
        self._bus = 0

    # ---- files

    def write(self, top: Path) -> Path:
        """Write the trees below a folder, and return it."""
        self.gpus, self._bus = [], 0
        (top / "sys/bus/pci/devices").mkdir(parents=True)
        (top / "sys/class/iommu").mkdir(parents=True)
        self._system(top)
        for at, root in enumerate(self.roots):
            bus = self._bus
            folder = top / f"sys/devices/pci0000:{bus:02x}"
            folder.mkdir(parents=True)
            for slot, child in enumerate(root.below):
                if root.flat:
                    assert isinstance(child, Gpu)
                    self._gpu(top, folder, f"{bus:02x}:{slot + 4:02x}.0", child, (root, at, ()))
                else:
                    port = f"{bus:02x}:{slot + 1:02x}.1"
                    inner = self._device(top, folder, port, (0x4, root.numa), acs=1)
                    self._below(top, inner, child, (root, at, ()))
            self._bus += 1
        return top

    def _system(self, top: Path) -> None:
        flags = "fpu vme hypervisor" if self.hypervisor else "fpu vme"
        text = {
            "proc/cmdline": self.cmdline,
            "proc/cpuinfo": f"model name\t: Fake 9000\nflags\t\t: {flags}\n",
            "proc/sys/kernel/hostname": self.hostname,
            "proc/sys/kernel/osrelease": "6.1.0-fake",
            "proc/1/comm": "systemd",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  595.58.03",
        }
        nodes = sorted({root.numa for root in self.roots})
        for at, node in enumerate(nodes):
            text[f"sys/devices/system/node/node{node}/cpulist"] = f"{at * 8}-{at * 8 + 7}"
            text[f"sys/devices/system/node/node{node}/meminfo"] = f"Node {node} MemTotal: 1024 kB"
            text[f"sys/devices/system/cpu/cpu{at}/topology/physical_package_id"] = str(at)
        for name, content in text.items():
            path = top / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content + "\n")

    def _below(self, top: Path, folder: Path, child: Gpu | Switch, place: Any) -> None:
        """Put a GPU or a switch on a new bus below a port."""
        root, at, trail = place
        self._bus += 1
        bus = self._bus
        if isinstance(child, Gpu):
            self._gpu(top, folder, f"{bus:02x}:00.0", child, place)
            return
        upstream = self._device(top, folder, f"{bus:02x}:00.0", (0x5, root.numa), width=child.width)
        self._bus += 1
        inner = self._bus
        deeper = (root, at, (*trail, next(self._switches)))
        for slot, item in enumerate(child.below):
            speed = item.port_speed if isinstance(item, Gpu) else 32.0
            name = f"{inner:02x}:{slot:02x}.0"
            port = self._device(
                top, upstream, name, (0x6, root.numa), acs=child.acs, speeds=(speed, speed)
            )
            self._below(top, port, item, deeper)

    def _gpu(self, top: Path, folder: Path, name: str, gpu: Gpu, place: Any) -> None:
        root, at, trail = place
        gpu.number, gpu.address = len(self.gpus), f"0000:{name}"
        gpu.trail, gpu.numa, gpu.root = trail, root.numa, at
        self.gpus.append(gpu)
        speeds = (gpu.speed, gpu.max_speed)
        inner = self._device(top, folder, name, (0x1, root.numa), speeds=speeds, width=gpu.width)
        (inner / "max_link_width").write_text(f"{gpu.max_width}\n")
        start, end = 0x7B000000000, 0x7B000000000 + gpu.bar1 - 1
        (inner / "resource").write_text(
            f"0x000000b8000000 0x000000b8ffffff 0x0000000000040200\n{start:#018x} {end:#018x} "
            "0x000000000014220c\n0x0 0x0 0x0\n"
        )
        text = f"RxErr {gpu.correctable}\nBadTLP 0\nTOTAL_ERR_COR {gpu.correctable}\n"
        (inner / "aer_dev_correctable").write_text(text)
        if self.iommu:
            (inner / "iommu_group").mkdir()
            (inner / "iommu_group/type").write_text(self.iommu + "\n")

    def _device(
        self,
        top: Path,
        above: Path,
        name: str,
        kind_numa: tuple[int, int],
        *,
        acs: int | None = None,
        speeds: tuple[float, float] = (32.0, 32.0),
        width: int = 16,
    ) -> Path:
        kind, numa = kind_numa
        folder = above / f"0000:{name}"
        folder.mkdir()
        bridge = kind in (0x4, 0x5, 0x6)
        files = {
            "vendor": "0x1000" if bridge else "0x10de",
            "device": "0xc030" if bridge else "0x2bb5",
            "class": "0x060400" if bridge else "0x030200",
            "numa_node": str(numa if self.numa_known else -1),
            "current_link_speed": f"{speeds[0]} GT/s PCIe",
            "max_link_speed": f"{speeds[1]} GT/s PCIe",
            "current_link_width": str(width),
            "max_link_width": str(width),
        }
        for file, text in files.items():
            (folder / file).write_text(text + "\n")
        data = config_space(kind, acs=acs)
        (folder / "config").write_bytes(data if self.privileged else data[:64])
        (top / "sys/bus/pci/devices" / f"0000:{name}").symlink_to(folder)
        return folder

    # ---- the oracle

    def label(self, one: Gpu, other: Gpu) -> str:
        """The label of a pair by nvidia-smi's legend, from the blueprint."""
        if one is other:
            return "X"
        if one.numa != other.numa:
            return "SYS"
        if one.root != other.root:
            return "NODE"
        shared = [a for a, b in zip(one.trail, other.trail, strict=False) if a == b]
        if not shared:
            return "PHB"
        return "PIX" if one.trail == other.trail else "PXB"

    def matrix(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(self.label(a, b) for b in self.gpus) for a in self.gpus)


def config_space(
    kind: int, *, acs: int | None = None, speed: float = 32.0, width: int = 16, errors: int = 0
) -> bytes:
    """A configuration space with an Express capability, AER, and perhaps ACS."""
    data = bytearray(4096)
    struct.pack_into("<H", data, 0x06, 0x10)
    data[0x34] = 0x40
    struct.pack_into("<BBH", data, 0x40, 0x10, 0, kind << 4 | 2)
    link = SPEED_CODE[speed] | width << 4
    struct.pack_into("<I", data, 0x4C, link)
    struct.pack_into("<H", data, 0x52, link)
    following = 0x140 if acs is not None else 0
    struct.pack_into("<I", data, 0x100, following << 20 | 1 << 16 | 0x0001)
    struct.pack_into("<I", data, 0x110, errors)
    if acs is not None:
        struct.pack_into("<IHH", data, 0x140, 1 << 16 | 0x000D, 0x7F, acs)
    return bytes(data)


LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """What pynvml offers, for a host that was built.

    Args:
        host: Written already.
        order: Of its GPUs in NVML.
        refused: Ordered pairs of their numbers without P2P.
        levels: Labels to lie about, by pair of numbers.
    """

    NVMLError = FakeNvmlError
    NVML_P2P_CAPS_INDEX_READ = 0
    NVML_P2P_CAPS_INDEX_WRITE = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_CAPS_INDEX_ATOMICS = 3
    NVML_P2P_CAPS_INDEX_PROP = 4

    def __init__(
        self,
        host: FakeHost,
        order: Sequence[int] | None = None,
        refused: Sequence[tuple[int, int]] = (),
        levels: dict[tuple[int, int], str] | None = None,
    ) -> None:
        numbers = range(len(host.gpus)) if order is None else order
        self.host, self.refused, self.levels = host, refused, levels or {}
        self.gpus = [host.gpus[number] for number in numbers]
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"595.58.03"

    def nvmlDeviceGetPciInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(busId=f"0000{gpu.address}".upper().encode())

    def nvmlDeviceGetUUID(self, gpu: Gpu | str) -> str:
        return gpu if isinstance(gpu, str) else gpu.uuid

    def nvmlDeviceGetSerial(self, gpu: Gpu) -> str:
        return gpu.serial

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return gpu.product

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(total=gpu.memory)

    def nvmlDeviceGetBAR1MemoryInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(bar1Total=gpu.bar1)

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        return [int(bool(gpu.mig)), int(bool(gpu.mig))]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, at: int) -> str:
        if at >= len(gpu.mig):
            raise FakeNvmlError("not found")
        return gpu.mig[at]

    def nvmlDeviceGetDisplayActive(self, gpu: Gpu) -> int:
        return int(gpu.display)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, gpu: Gpu) -> int:
        return GENERATION[gpu.speed]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: Gpu) -> int:
        return GENERATION[gpu.max_speed]

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu: Gpu) -> int:
        return gpu.width

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: Gpu) -> int:
        return gpu.max_width

    def nvmlDeviceGetPcieReplayCounter(self, gpu: Gpu) -> int:
        return gpu.replays

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Gpu, other: Gpu) -> int:
        lied = self.levels.get((one.number, other.number))
        return LEVELS[lied or self.host.label(one, other)]

    def nvmlDeviceGetP2PStatus(self, one: Gpu, other: Gpu, index: int) -> int:
        if index == self.NVML_P2P_CAPS_INDEX_PROP:
            raise FakeNvmlError("not supported")
        if index == self.NVML_P2P_CAPS_INDEX_NVLINK:
            return 5
        return 1 if (one.number, other.number) in self.refused else 0


# ---- hosts that tests share


def pairs_of_switches(sockets: int = 2, switches: int = 2, gpus: int = 2) -> FakeHost:
    """Sockets with root complexes of one switch each."""
    roots = [
        Root([Switch([Gpu() for _ in range(gpus)])], numa=numa)
        for numa in range(sockets)
        for _ in range(switches)
    ]
    return FakeHost(roots)


def nested() -> FakeHost:
    """One root with a switch of switches, and one GPU on a port beside it."""
    inner = [Switch([Gpu(), Gpu()]), Switch([Gpu(), Gpu()])]
    return FakeHost([Root([Switch(inner), Gpu()])])


def sixteen() -> FakeHost:
    """Sixteen GPUs on eight root complexes of one socket."""
    return FakeHost([Root([Switch([Gpu(), Gpu()])]) for _ in range(8)])


def flat_machine() -> FakeHost:
    """A virtual machine that shows all GPUs on the root bus."""
    return FakeHost([Root([Gpu(), Gpu(), Gpu()], flat=True)], hypervisor=True, iommu="")

"""Reads what a host is apart from its PCI devices, below any root folder. Needs no root."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from .model import ANY, NumaNode, System
from .readers.plain import iommu_of_cmdline

MOST_NBYTES = 1 << 16
_INIT = ("systemd", "init", "runit", "openrc-init")
_CONTAINER = re.compile(r"docker|kubepods|containerd|lxc|libpod|podman|garden")
_VERSION = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)?)\b")


class _Files:
    def __init__(self, root: Path) -> None:
        self.root = root

    def text(self, path: str) -> str | None:
        try:
            with (self.root / path).open("rb") as file:
                return file.read(MOST_NBYTES).decode(errors="replace").replace("\0", " ").strip()
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        try:
            return (self.root / path).exists()
        except OSError:
            return False

    def numbered(self, folder: str, prefix: str) -> list[tuple[int, str]]:
        """Return the entries of a folder that are a prefix and a number, in order."""
        found = []
        try:
            for entry in (self.root / folder).iterdir():
                if re.fullmatch(prefix + r"\d+", entry.name):
                    found.append((int(entry.name.removeprefix(prefix)), f"{folder}/{entry.name}"))
        except OSError:
            pass
        return sorted(found)


def read_system(
    root: Path, gpu_addresses: tuple[str, ...], environment: Mapping[str, str] | None
) -> System:
    """Return the system below `root`.

    Args:
        root: Has `proc` and `sys`; `/` of the running host.
        gpu_addresses: Whose IOMMU groups are looked at.
        environment: Of CUDA, see System; None for another host's files.
    """
    files = _Files(root)
    cmdline = files.text("proc/cmdline")
    container, why_container = _container(files)
    machine, why_machine = _virtual_machine(files)
    iommu, why_iommu = _iommu(files, gpu_addresses, cmdline)
    cpuinfo = files.text("proc/cpuinfo") or ""
    model = re.search(r"^(?:model name|Model)\s*: (.+)$", cpuinfo, re.MULTILINE)
    version = files.text("sys/module/nvidia/version") or files.text("proc/driver/nvidia/version")
    driver = _VERSION.search(version or "")
    return System(
        hostname=files.text("proc/sys/kernel/hostname"),
        kernel=files.text("proc/sys/kernel/osrelease"),
        cmdline=cmdline,
        cpu=model[1].strip() if model else None,
        sockets=_sockets(files),
        numa=_numa(files) or None,
        iommu=iommu,
        container=container,
        virtual_machine=machine,
        driver=driver[1] if driver else None,
        environment=environment,
        unknown={
            ANY: "the file that has it is missing",
            "iommu": why_iommu,
            "container": why_container,
            "virtual_machine": why_machine,
            "environment": "these are files, not a process",
        },
    )


def _sockets(files: _Files) -> int | None:
    packages = {
        files.text(f"{path}/topology/physical_package_id")
        for _, path in files.numbered("sys/devices/system/cpu", "cpu")
    }
    return len(packages - {None}) or None


def _numa(files: _Files) -> tuple[NumaNode, ...]:
    folders = files.numbered("sys/devices/system/node", "node")
    found = []
    for index, path in folders:
        total = re.search(r"MemTotal:\s+(\d+) kB", files.text(f"{path}/meminfo") or "")
        words = (files.text(f"{path}/distance") or "").split()
        distances = None
        if len(words) == len(folders):
            pairs = zip(folders, words, strict=True)
            distances = {str(other): int(word) for (other, _), word in pairs}
        found.append(
            NumaNode(
                index=index,
                cpus=files.text(f"{path}/cpulist"),
                memory_nbytes=int(total[1]) << 10 if total else None,
                distances=distances,
                unknown={ANY: "the file that has it is missing"},
            )
        )
    return tuple(found)


def _iommu(
    files: _Files, addresses: tuple[str, ...], cmdline: str | None
) -> tuple[str | None, str]:
    """Return the mode of the GPUs' IOMMU groups, else what the command line decides."""
    folders = [f"sys/bus/pci/devices/{address}/iommu_group" for address in addresses]
    kinds = {files.text(f"{folder}/type") for folder in folders} - {None}
    if any((kind or "").startswith("DMA") for kind in kinds):
        return "translated", ""
    if kinds == {"identity"}:
        return "passthrough", ""
    if addresses and files.exists("sys/class/iommu") and not any(map(files.exists, folders)):
        return "off", ""
    if cmdline is None:
        return None, "neither IOMMU groups nor a kernel command line are readable"
    return iommu_of_cmdline(cmdline)


def _container(files: _Files) -> tuple[str | None, str]:
    if files.exists(".dockerenv"):
        return "docker", ""
    if files.exists("run/.containerenv"):
        return "podman", ""
    if named := files.text("run/systemd/container"):
        return named, ""
    if match := _CONTAINER.search(files.text("proc/1/cgroup") or ""):
        return match[0], ""
    first = files.text("proc/1/comm")
    if first in _INIT:
        return "none", ""
    return None, f"there is no mark of a container, and process 1 is {first}"


def _virtual_machine(files: _Files) -> tuple[str | None, str]:
    cpuinfo = files.text("proc/cpuinfo") or ""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags is None:
        return None, "the processor flags, which name a hypervisor, are not readable"
    if "hypervisor" not in flags[1].split():
        return "none", ""
    vendor = files.text("sys/class/dmi/id/sys_vendor")
    product = files.text("sys/class/dmi/id/product_name")
    return " ".join(filter(None, (vendor, product))) or "a hypervisor that gives no name", ""

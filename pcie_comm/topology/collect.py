"""Gets a host: the running one, or one from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import cuda_visibility
from ..errors import CommError, InvalidArgumentError, UnsupportedError
from .identity import with_ordinals
from .merge import fill, merge
from .model import ANY, Gpu, Host, PciNode, System, unknown_system
from .nvml import Nvml, open_nvml
from .readers import read_file
from .readers.lspci import gpus_of
from .sysfs import Sysfs
from .system import read_system

MOST_FILES = 200


def collect(root: Path = Path("/"), module: Any = None) -> Host:
    """Return the running host, from sysfs and NVML. Needs no root and no CUDA context.

    Args:
        root: Has `sys` and `proc`; another one in tests.
        module: In place of `pynvml`.
    """
    environment = cuda_visibility()
    host = from_sysfs(root, environment)
    try:
        with open_nvml(module) as nvml:
            return with_nvml(host, nvml, environment)
    except UnsupportedError as error:
        remark = f"NVML: {error.reason}"
        reasons = {"driver_labels": remark, "pairs": remark, ANY: "NVML was not asked"}
        gpus = None if host.gpus is None else with_ordinals(host.gpus, environment)
        return replace(host, gpus=gpus, remarks=(*host.remarks, remark), unknown=reasons)


def from_sysfs(root: Path, environment: Mapping[str, str] | None = None) -> Host:
    """Return what the files below `root` say, which has `sys` and perhaps `proc`."""
    nodes = Sysfs(root / "sys").nodes()
    gpus = _gpus(nodes) if nodes is not None else None
    addresses = tuple(gpu.address for gpu in gpus or () if gpu.address)
    return Host(
        sources=(f"sysfs: {root / 'sys'}",),
        system=read_system(root, addresses, environment),
        nodes=nodes,
        gpus=gpus,
        unknown={ANY: "sysfs does not have it", "nodes": "there is no bus/pci/devices"},
    )


def _gpus(nodes: Sequence[PciNode]) -> tuple[Gpu, ...]:
    found = gpus_of(nodes, "sysfs does not have it")
    return found if any(node.vendor == "10de" for node in nodes) else ()


def with_nvml(host: Host, nvml: Nvml, environment: Mapping[str, str]) -> Host:
    """Return a host with what NVML knows; GPUs in NVML's order."""
    by_address = {gpu.address: gpu for gpu in host.gpus or ()}
    gpus = []
    for gpu in nvml.gpus():
        known = by_address.pop(gpu.address, None)
        gpus.append(gpu if known is None else fill(gpu, replace(known, name=gpu.name)))
    remarks = [f"{address} is a GPU that NVML does not show" for address in by_address]
    system = unknown_system("NVML was not asked")
    driver = nvml.driver_version()
    if driver:
        system = System(driver=driver, unknown=system.unknown)
    return replace(
        host,
        sources=(*host.sources, "NVML"),
        system=fill(host.system, system),
        gpus=with_ordinals(gpus, environment),
        driver_labels=nvml.labels(),
        pairs=nvml.pairs(),
        remarks=(*host.remarks, *remarks),
    )


def from_path(path: Path) -> Host:
    """Return a host from a file of any kind, a folder of such files, or a copy of sysfs.

    Raises:
        InvalidArgumentError: Nothing there can be read.
    """
    if not path.is_dir():
        return read_file(path)
    for root in (path, path.parent if path.name == "sys" else path):
        if (root / "sys" / "bus" / "pci" / "devices").is_dir():
            return from_sysfs(root)
    return _from_folder(path)


def _from_folder(path: Path) -> Host:
    files = sorted(entry for entry in path.iterdir() if entry.is_file())
    if len(files) > MOST_FILES:
        raise InvalidArgumentError(f"folder={path} has {len(files)} files, at most {MOST_FILES}")
    hosts, remarks = [], []
    for file in files:
        try:
            hosts.append(read_file(file))
        except CommError as error:
            remarks.append(f"left out: {error}")
    if not hosts:
        detail = remarks[0] if remarks else "it is empty"
        raise InvalidArgumentError(f"folder={path} has no file that can be read: {detail}")
    whole = merge(hosts)
    return replace(whole, remarks=(*whole.remarks, *remarks))

"""What a link shows while it carries traffic, and what was counted meanwhile. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from .model import Gpu, Host, Link
from .nvml import open_nvml
from .probed import LinkLoad
from .sysfs import Sysfs

NO_SYSFS = "sysfs does not have the link"


@dataclass(frozen=True)
class Counters:
    """Counters at one time.

    Attributes:
        replays: NVML's PCIe replay counter by UUID; None where it has none.
        errors: AER counters by PCI address; devices without are left out.
        reason: Why there are no `replays`, or nothing.
    """

    replays: Mapping[str, int | None]
    errors: Mapping[str, Mapping[str, int]]
    reason: str = ""


def read_counters(host: Host, root: Path = Path("/"), module: Any = None) -> Counters:
    """Read the counters of all GPUs of a host, and of the devices above them.

    Args:
        host: The running one.
        root: Has `sys`; another one in tests.
        module: In place of `pynvml`.
    """
    sysfs = Sysfs(root / "sys")
    above = {node.address for gpu in host.gpus or () for node in host.path(gpu.address)}
    found = {address: sysfs.errors(address) for address in sorted(above)}
    errors = {address: counts for address, counts in found.items() if counts is not None}
    try:
        with open_nvml(module) as nvml:
            replays = {uuid: count for uuid, (_, count) in nvml.links().items()}
    except UnsupportedError as error:
        return Counters({}, errors, f"NVML: {error.reason}")
    return Counters(replays, errors)


def links_now(
    gpus: Mapping[str, tuple[str | None, str | None]], root: Path = Path("/"), module: Any = None
) -> dict[str, LinkLoad]:
    """Return the links of GPUs as they are now; counters are left open.

    Args:
        gpus: PCI address and UUID, by name.
        root: As for read_counters.
        module: Likewise.
    """
    sysfs, later = Sysfs(root / "sys"), "not compared yet"
    try:
        with open_nvml(module) as nvml:
            driver, reason = nvml.links(), "NVML does not show this GPU"
    except UnsupportedError as error:
        driver, reason = {}, f"NVML: {error.reason}"
    found = {}
    for name, (address, uuid) in gpus.items():
        link, _ = driver.get(uuid or "", (None, None))
        seen: Link | None = sysfs.link(address) if address else None
        reasons = {"driver": reason, "sysfs": NO_SYSFS, "replays": later, "errors": later}
        found[name] = LinkLoad(name, driver=link, sysfs=seen, unknown=reasons)
    return found


def with_growth(load: LinkLoad, host: Host, before: Counters, after: Counters) -> LinkLoad:
    """Return a link under load with what was counted from `before` until `after`."""
    gpu = next(gpu for gpu in host.gpus or () if gpu.name == load.gpu)
    replays, reason = _replays(gpu, before, after)
    path = [node.address for node in host.path(gpu.address)]
    counted = [address for address in path if address in after.errors]
    errors = {
        f"{address} {name}": count - before.errors.get(address, {}).get(name, 0)
        for address in counted
        for name, count in after.errors[address].items()
        if count > before.errors.get(address, {}).get(name, 0)
    }
    return replace(
        load,
        replays=replays,
        errors=errors if counted else None,
        unknown={
            "driver": load.why("driver"),
            "sysfs": load.why("sysfs"),
            "replays": reason,
            "errors": "no device from the GPU up to its root has AER counters in sysfs",
        },
    )


def _replays(gpu: Gpu, before: Counters, after: Counters) -> tuple[int | None, str]:
    values = [counters.replays.get(gpu.uuid or "") for counters in (before, after)]
    if values[0] is None or values[1] is None:
        return None, after.reason or "NVML has no replay counter for this GPU"
    return values[1] - values[0], ""

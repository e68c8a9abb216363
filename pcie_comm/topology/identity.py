"""The four names of a GPU, matched: CUDA ordinal, NVML index, PCI address, UUID.

CUDA numbers the GPUs that CUDA_VISIBLE_DEVICES leaves, and does so in its own order unless
CUDA_DEVICE_ORDER is PCI_BUS_ID. Where its order is not certain, no ordinal is given. Source: CUDA
Programming Guide, "CUDA Environment Variables".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .address import sort_key
from .model import Gpu

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
UNORDERED = (
    "CUDA_DEVICE_ORDER is not PCI_BUS_ID, so that CUDA puts the fastest first and leaves the "
    "rest unspecified"
)


@dataclass(frozen=True)
class Visible:
    """A device that CUDA shows.

    Attributes:
        gpu: Name of the GPU.
        mig_uuid: Of the instance, if it is one.
    """

    gpu: str
    mig_uuid: str | None = None


@dataclass(frozen=True)
class Visibility:
    """What CUDA shows, by ordinal.

    Attributes:
        devices: None if it cannot be told.
        reason: Why not, or why the list is shorter than asked for.
    """

    devices: tuple[Visible, ...] | None
    reason: str = ""


def visible(
    gpus: Sequence[Gpu],
    environment: Mapping[str, str],
    cuda_order: Sequence[str] | None = None,
) -> Visibility:
    """Return what CUDA shows under an environment.

    Args:
        gpus: All of the host.
        environment: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, each if it is set.
        cuda_order: UUIDs of all GPUs as CUDA orders them, if that was asked.
    """
    ordered, why = _ordered(gpus, environment, cuda_order)
    if VISIBLE not in environment:
        if ordered is None:
            return Visibility(None, why)
        return Visibility(tuple(Visible(gpu.name) for gpu in ordered))
    found: list[Visible] = []
    for entry in environment[VISIBLE].split(","):
        item, reason = _entry(entry.strip(), gpus, ordered, why)
        if item is None and reason == why:
            return Visibility(None, why)
        if item is None:
            return Visibility(tuple(found), f"{reason}; it and what follows is not visible")
        if item in found:
            return Visibility(None, f"{VISIBLE} names {entry.strip()} twice")
        found.append(item)
        if item.mig_uuid:
            return Visibility(tuple(found), "a process can use one MIG instance")
    return Visibility(tuple(found))


def _ordered(
    gpus: Sequence[Gpu], environment: Mapping[str, str], cuda_order: Sequence[str] | None
) -> tuple[list[Gpu] | None, str]:
    """Return the GPUs in CUDA's order before any is hidden, and why that is unknown."""
    by_uuid = {gpu.uuid: gpu for gpu in gpus if gpu.uuid}
    if cuda_order is not None and set(cuda_order) == set(by_uuid) and len(by_uuid) == len(gpus):
        return [by_uuid[uuid] for uuid in cuda_order], ""
    if len(gpus) < 2:
        return list(gpus), ""
    if environment.get(ORDER) != "PCI_BUS_ID":
        return None, UNORDERED
    if not all(gpu.address for gpu in gpus):
        return None, "the PCI address of a GPU is unknown"
    return sorted(gpus, key=lambda gpu: sort_key(gpu.address or "")), ""


def _entry(
    entry: str, gpus: Sequence[Gpu], ordered: list[Gpu] | None, why: str
) -> tuple[Visible | None, str]:
    """Return the device that an entry names; else None and the reason."""
    if entry.isdecimal():
        if ordered is None:
            return None, why
        if int(entry) < len(ordered):
            return Visible(ordered[int(entry)].name), ""
        return None, f"{VISIBLE} has {entry}, and there are {len(gpus)} GPUs"
    if entry.startswith("MIG-"):
        parts = [(gpu, uuid) for gpu in gpus for uuid in gpu.mig_uuids or ()]
        found = [Visible(gpu.name, uuid) for gpu, uuid in parts if uuid.startswith(entry)]
    elif entry.startswith("GPU-"):
        if not all(gpu.uuid for gpu in gpus):
            return None, why or "the UUID of a GPU is unknown"
        found = [Visible(gpu.name) for gpu in gpus if (gpu.uuid or "").startswith(entry)]
    else:
        return None, f"{VISIBLE} has {entry!r}, which is neither a number nor a UUID"
    if len(found) == 1:
        return found[0], ""
    return None, f"{VISIBLE} has {entry}, which fits {len(found)} devices"


def with_ordinals(
    gpus: Sequence[Gpu],
    environment: Mapping[str, str],
    cuda_order: Sequence[str] | None = None,
) -> tuple[Gpu, ...]:
    """Return the GPUs with their CUDA ordinals, or with the reason why they have none."""
    seen = visible(gpus, environment, cuda_order)
    ordinals: dict[str, int] = {}
    for ordinal, device in enumerate(seen.devices or ()):
        ordinals.setdefault(device.gpu, ordinal)
    reason = seen.reason if seen.devices is None else "CUDA does not show it"
    return tuple(
        replace(
            gpu,
            ordinal=ordinals.get(gpu.name),
            unknown={**gpu.unknown, "ordinal": reason},
        )
        for gpu in gpus
    )

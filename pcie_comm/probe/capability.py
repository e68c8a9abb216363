"""Level 2, capability: what CUDA says of devices and of pairs of them. Creates no context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import driver
from ..errors import CudaError
from ..topology.address import normalise
from ..topology.model import ANY, Gpu, Host, Pair

NAME_NBYTES, ADDRESS_NBYTES = 128, 32
NOT_ASKED = "only CUDA was asked"
SILENT = "CUDA has no answer"


@dataclass(frozen=True)
class CudaGpu:
    """What CUDA says of a device.

    Attributes:
        ordinal: Its number in this process.
        uuid: As nvidia-smi prints it.
        address: PCI address; empty if CUDA gives none.
        product: Name.
    """

    ordinal: int
    uuid: str
    address: str
    product: str


@dataclass(frozen=True)
class CudaPair:
    """What CUDA says of an ordered pair of devices, by ordinals; None where it has no answer."""

    source: int
    target: int
    access: bool | None
    rank: int | None
    atomics: bool | None


@dataclass(frozen=True)
class CudaHost:
    """What CUDA says of all of its devices."""

    gpus: tuple[CudaGpu, ...]
    pairs: tuple[CudaPair, ...]


def ask() -> CudaHost:
    """Ask CUDA.

    Raises:
        UnsupportedError: cuda-python or the driver is missing.
        CudaError: The driver does not start.
    """
    count = driver.device_count()
    pairs = (_pair(a, b) for a in range(count) for b in range(count) if a != b)
    return CudaHost(tuple(_gpu(ordinal) for ordinal in range(count)), tuple(pairs))


def _gpu(ordinal: int) -> CudaGpu:
    device = driver.call("cuDeviceGet", ordinal)
    digits = driver.device_uuid(ordinal)
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    try:
        address = _text(driver.call("cuDeviceGetPCIBusId", ADDRESS_NBYTES, device))
    except CudaError:
        address = ""
    product = _text(driver.call("cuDeviceGetName", NAME_NBYTES, device))
    return CudaGpu(ordinal, "GPU-" + "-".join(parts), normalise(address) or "", product)


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode(errors="replace")


def _pair(source: int, target: int) -> CudaPair:
    devices = [driver.call("cuDeviceGet", ordinal) for ordinal in (source, target)]
    rank = _attribute("PERFORMANCE_RANK", devices)
    atomics = _attribute("NATIVE_ATOMIC_SUPPORTED", devices)
    try:
        access = bool(driver.call("cuDeviceCanAccessPeer", *devices))
    except CudaError:
        access = None
    return CudaPair(source, target, access, rank, None if atomics is None else bool(atomics))


def _attribute(name: str, devices: Sequence[object]) -> int | None:
    try:
        attribute = getattr(
            driver.bindings().CUdevice_P2PAttribute, f"CU_DEVICE_P2P_ATTRIBUTE_{name}"
        )
        return int(driver.call("cuDeviceGetP2PAttribute", attribute, *devices))
    except CudaError:
        return None


def with_cuda(host: Host, answer: CudaHost) -> tuple[Host, dict[str, int]]:
    """Return a host with what CUDA says, and the CUDA ordinals of its GPUs by name.

    GPUs are matched by UUID, then by PCI address, then by order if there are as many. Those that
    CUDA alone knows are added.
    """
    names, added = _match(host.gpus or (), answer.gpus)
    known = {names[gpu.ordinal]: gpu for gpu in answer.gpus}
    gpus = tuple(_filled(gpu, known.get(gpu.name)) for gpu in (*(host.gpus or ()), *added))
    hidden = [gpu.name for gpu in gpus if gpu.name not in known]
    remarks = [f"{name} is a GPU that CUDA does not show" for name in hidden]
    everything = replace(
        host,
        sources=(*host.sources, "CUDA"),
        gpus=gpus,
        pairs=_pairs(host, answer, names),
        remarks=(*host.remarks, *remarks),
    )
    return everything, {name: gpu.ordinal for name, gpu in known.items()}


def _match(gpus: Sequence[Gpu], cuda: Sequence[CudaGpu]) -> tuple[dict[int, str], tuple[Gpu, ...]]:
    """Return the name of each ordinal, and GPUs that were not known before."""
    names: dict[int, str] = {}
    for one in cuda:
        for fits in (
            [gpu for gpu in gpus if gpu.uuid == one.uuid],
            [gpu for gpu in gpus if gpu.address and gpu.address == one.address],
        ):
            if len(fits) == 1 and one.ordinal not in names:
                names[one.ordinal] = fits[0].name
    if not names and len(gpus) == len(cuda):
        return {one.ordinal: gpu.name for one, gpu in zip(cuda, gpus, strict=True)}, ()
    added: list[Gpu] = []
    for one in cuda:
        if one.ordinal not in names:
            names[one.ordinal] = f"GPU{len(gpus) + len(added)}"
            added.append(
                Gpu(names[one.ordinal], address=one.address or None, unknown={ANY: NOT_ASKED})
            )
    return names, tuple(added)


def _filled(gpu: Gpu, seen: CudaGpu | None) -> Gpu:
    if seen is None:
        return replace(
            gpu, ordinal=None, unknown={**gpu.unknown, "ordinal": "CUDA does not show it"}
        )
    return replace(
        gpu,
        ordinal=seen.ordinal,
        uuid=gpu.uuid or seen.uuid,
        product=gpu.product or seen.product,
    )


def _pairs(host: Host, answer: CudaHost, names: dict[int, str]) -> tuple[Pair, ...]:
    """Return the pairs of the host with CUDA's answers in them."""
    cuda = {(names[pair.source], names[pair.target]): pair for pair in answer.pairs}
    fresh = {ANY: SILENT, "p2p": host.why("pairs") or "NVML has no answer"}
    known = {(pair.source, pair.target): pair for pair in host.pairs or ()}
    for ends in cuda:
        known.setdefault(ends, Pair(*ends, unknown=fresh))
    pairs = []
    for ends, pair in known.items():
        if (found := cuda.get(ends)) is not None:
            pair = replace(
                pair,
                cuda_access=found.access,
                performance_rank=found.rank,
                native_atomics=found.atomics,
                unknown={ANY: SILENT, "p2p": pair.why("p2p")},
            )
        pairs.append(pair)
    return tuple(pairs)

"""What a rank tells the others of itself before anything is shared, and the device it uses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import cast

import torch

from . import driver
from .agreement import malformed, read_record
from .errors import InvalidArgumentError, UnsupportedError


@dataclass(frozen=True)
class RankFacts:
    """What a rank tells the others of itself. `contract` must be equal on all ranks.

    Attributes:
        device: UUID, or `cpu`.
        multiprocessors: Of the device.
        reachable: UUIDs of the devices whose memory it can address, its own included.
        contract: Settings and versions.
        pins: The device can address host memory that is pinned for it.
        backends: Of torch.distributed, that it could use; best first.
    """

    device: str
    multiprocessors: int
    reachable: tuple[str, ...]
    contract: dict[str, object]
    pins: bool = True
    backends: tuple[str, ...] = ("gloo",)

    @classmethod
    def gather(cls, device: torch.device, contract: dict[str, object]) -> RankFacts:
        """Return the facts of this rank.

        Raises:
            InvalidArgumentError: The device does not exist.
        """
        if device.type == "cpu":
            return cls("cpu", 0, (), contract)
        count = driver.device_count()
        if not 0 <= device.index < count:
            raise InvalidArgumentError(
                f"device={device} does not exist, this process sees {count} CUDA devices"
            )
        own = driver.call("cuDeviceGet", device.index)
        reachable = [driver.device_uuid(device.index)]
        for other in range(count):
            if other == device.index:
                continue
            if driver.call("cuDeviceCanAccessPeer", own, driver.call("cuDeviceGet", other)):
                reachable.append(driver.device_uuid(other))
        units = torch.cuda.get_device_properties(device).multi_processor_count
        pins = driver.pins_host_memory(device.index)
        return cls(reachable[0], units, tuple(reachable), contract, pins)

    def encode(self) -> bytes:
        """Return the facts as JSON."""
        return json.dumps(self.__dict__, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes, peer: int) -> RankFacts:
        """Read what `encode` wrote on rank `peer`.

        Raises:
            InvalidArgumentError: The bytes are something else.
        """
        raw = read_record(data, peer, "introduction")
        kinds = {"device": str, "multiprocessors": int, "reachable": list, "contract": dict}
        kinds |= {"pins": bool, "backends": list}
        if {name: type(value) for name, value in raw.items()} != kinds:
            raise malformed(peer, "introduction", f"fields={sorted(raw)}")
        lists = {name: tuple(map(str, raw[name])) for name in ("reachable", "backends")}
        return cls(**{**raw, **lists})


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the device a rank uses: the given one, else the current GPU, else the CPU.

    Raises:
        InvalidArgumentError: Neither a CPU nor a CUDA device.
        UnsupportedError: A CUDA device without CUDA.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"device={device!r} is no torch device: {error}") from error
    if resolved.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device={device!r} is neither a CPU nor a CUDA device")
    if resolved.type == "cpu":
        return torch.device("cpu")
    driver.bindings()
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"device={device!r} needs CUDA, which this torch {torch.__version__} does not have or "
            "cannot use; install a CUDA build of torch, or use device='cpu'",
            reason="torch has no CUDA",
        )
    index = cast("int | None", resolved.index)  # torch types it as int; "cuda" alone has none
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)

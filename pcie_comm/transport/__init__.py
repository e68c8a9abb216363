"""How one rank's slab becomes addressable by the others."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from ..errors import InvalidArgumentError
from .base import Transport

_CLASSES = {
    "host_shm": "HostShmTransport",
    "cuda_local": "CudaLocalTransport",
    "cuda_ipc": "CudaIpcTransport",
    "host_pinned": "HostPinnedTransport",
    "torch_dist": "TorchDistTransport",
}

SLABLESS = ("torch_dist",)
"""Transports that move bytes themselves and give kernels nothing to address."""


def load(name: str) -> type[Transport]:
    """Return the transport class called `name`. Imports its module, but starts no CUDA.

    Raises:
        InvalidArgumentError: There is none of that name.
    """
    candidate: object = name
    if not isinstance(candidate, str) or candidate not in _CLASSES:
        raise InvalidArgumentError(
            f"transport={name!r} is unknown; choose one of {', '.join(_CLASSES)}"
        )
    module = importlib.import_module(f".{name}", __name__)
    transport: type[Transport] = getattr(module, _CLASSES[name])
    return transport


class _Transports(Mapping[str, type[Transport]]):
    """The transports with slabs, by name; each is imported when it is looked up."""

    _names = tuple(name for name in _CLASSES if name not in SLABLESS)

    def __getitem__(self, name: str) -> type[Transport]:
        if name not in self._names:
            raise KeyError(name)
        return load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


TRANSPORTS: Mapping[str, type[Transport]] = _Transports()

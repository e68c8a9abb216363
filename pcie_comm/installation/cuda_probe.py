"""Asks libcuda what it is, through ctypes: without cuda-python, torch and a context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from .facts import MISSING

LIBRARY = "libcuda.so.1"
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def probe(load: Callable[[str], Any] = ctypes.CDLL) -> dict[str, Any]:
    """Return the facts `library`, `start` and `capabilities`; None where the driver has no answer.

    Args:
        load: Loads a shared library; another one in tests.
    """
    try:
        cuda = load(LIBRARY)
    except OSError:
        return {"library": MISSING, "start": None, "capabilities": None}
    number = ctypes.c_int()
    library = None
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        library = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if status := cuda.cuInit(0):
        return {"library": library, "start": _name(cuda, status), "capabilities": None}
    return {"library": library, "start": MISSING, "capabilities": _capabilities(cuda)}


def _name(cuda: Any, status: int) -> str:
    text = ctypes.c_char_p()
    if cuda.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value:
        return text.value.decode()
    return f"CUDA error {status}"


def _capabilities(cuda: Any) -> tuple[tuple[int, int], ...] | None:
    count = ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(count)):
        return None
    found = []
    for index in range(count.value):
        device, pair = ctypes.c_int(), []
        if cuda.cuDeviceGet(ctypes.byref(device), index):
            return None
        for attribute in (MAJOR, MINOR):
            value = ctypes.c_int()
            if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
                return None
            pair.append(value.value)
        found.append((pair[0], pair[1]))
    return tuple(found)

"""The CUDA driver API with errors as exceptions. Nothing is imported before the first call."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .errors import CudaError, UnsupportedError

_bindings: ModuleType | None = None


def bindings() -> ModuleType:
    """Return `cuda.bindings.driver`, initialised.

    Raises:
        UnsupportedError: cuda-python or the NVIDIA driver is missing.
        CudaError: The driver is there, but does not start.
    """
    global _bindings
    if _bindings is None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise UnsupportedError(
                "CUDA needs the package cuda-python; pip install cuda-python, or use device='cpu'",
                reason="cuda-python is not importable",
            ) from error
        try:
            check("cuInit", driver.cuInit(0), driver)
        except RuntimeError as error:  # the bindings' own: libcuda cannot be loaded
            raise UnsupportedError(
                f"no NVIDIA driver could be loaded ({error}); install one, or use device='cpu'",
                reason="libcuda is missing",
            ) from error
        _bindings = driver
    return _bindings


def check(call: str, result: tuple[Any, ...], module: ModuleType | None = None) -> Any:
    """Return the values of a driver call's result tuple, or raise CudaError."""
    status, *values = result
    if int(status) != 0:
        driver = module or bindings()
        _, name = driver.cuGetErrorName(status)
        _, text = driver.cuGetErrorString(status)
        name = name.decode() if name else str(status)
        detail = text.decode() if text else "unknown error"
        raise CudaError(f"{call} failed: {name} ({detail})", name=name, call=call)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def call(name: str, *args: Any) -> Any:
    """Call driver function `name`; return its values.

    Raises:
        CudaError: The driver returned an error.
    """
    return check(name, getattr(bindings(), name)(*args))


def is_available() -> bool:
    """Tell whether a driver with at least one device is there, without creating a context."""
    try:
        return int(call("cuDeviceGetCount")) > 0
    except (UnsupportedError, CudaError):
        return False


def device_uuid(index: int) -> str:
    """Return the UUID of CUDA device `index` as 32 hex digits.

    Ordinals differ between processes (CUDA_VISIBLE_DEVICES), UUIDs do not.
    """
    uuid = call("cuDeviceGetUuid", call("cuDeviceGet", index))
    return bytes(uuid.bytes).hex()


def pins_host_memory(index: int) -> bool:
    """Tell whether CUDA device `index` can address host memory that is registered for it."""
    names = bindings().CUdevice_attribute
    wanted = names.CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
    return bool(call("cuDeviceGetAttribute", wanted, call("cuDeviceGet", index)))


def device_count() -> int:
    """Return the number of devices this process sees."""
    return int(call("cuDeviceGetCount"))

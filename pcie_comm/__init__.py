"""Small, latency-bound collectives for LLM decode between the GPUs of one host without NVLink.

Importing this package loads neither CUDA nor the CuTe DSL and needs no GPU. What needs torch is
loaded when it is first used, so that `pcie-comm doctor` can say that torch is missing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .config import Config
from .errors import (
    BrokenError,
    BusyError,
    ClosedError,
    CommError,
    CommWarning,
    CompileError,
    CudaError,
    InvalidArgumentError,
    MismatchError,
    PeerAbortedError,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from .group import PcieDcpGroup
    from .kernels.collective import Collective, KernelKey, OutputSpec, Plan, PlanInfo, TensorMeta
    from .kernels.registry import register
    from .kernels.router_spec import KIMI_K3, RouterSpec
    from .local import LocalWorld, local_world
    from .standalone import kimi_topk16, router_topk
    from .stats import ChannelStats, PeerStats, WaitStats

__version__ = "0.1.0"


__all__ = [
    "KIMI_K3",
    "BrokenError",
    "BusyError",
    "ChannelStats",
    "ClosedError",
    "Collective",
    "CommError",
    "CommWarning",
    "CompileError",
    "Config",
    "CudaError",
    "InvalidArgumentError",
    "KernelKey",
    "LocalWorld",
    "MismatchError",
    "OutputSpec",
    "PcieDcpGroup",
    "PeerAbortedError",
    "PeerDiedError",
    "PeerError",
    "PeerStats",
    "PeerTimeoutError",
    "Plan",
    "PlanInfo",
    "RouterSpec",
    "TensorMeta",
    "UnsupportedError",
    "WaitStats",
    "kimi_topk16",
    "local_world",
    "register",
    "router_topk",
]

_HOMES = {
    "group": ("PcieDcpGroup",),
    "kernels.collective": (
        "Collective",
        "KernelKey",
        "OutputSpec",
        "Plan",
        "PlanInfo",
        "TensorMeta",
    ),
    "kernels.registry": ("register",),
    "kernels.router_spec": ("KIMI_K3", "RouterSpec"),
    "local": ("LocalWorld", "local_world"),
    "standalone": ("kimi_topk16", "router_topk"),
    "stats": ("ChannelStats", "PeerStats", "WaitStats"),
}
"""By module, the public names that are loaded when they are first used."""


def __getattr__(name: str) -> object:
    """Load a public name when it is first used."""
    for module, names in _HOMES.items():
        if name in names:
            value: object = getattr(import_module(f".{module}", __name__), name)
            import_module(".torch_ops", __name__).define_all()
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, those not loaded yet too."""
    return sorted({*globals(), *__all__})

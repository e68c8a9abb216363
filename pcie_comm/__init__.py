"""Small, latency-bound collectives for LLM decode between the GPUs of one host without NVLink.

Importing this package loads neither CUDA nor the CuTe DSL and needs no GPU.
"""

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
from .group import PcieDcpGroup
from .kernels.registry import (
    Collective,
    KernelKey,
    OutputSpec,
    Plan,
    PlanInfo,
    TensorMeta,
    register,
)
from .kernels.router_spec import KIMI_K3, RouterSpec
from .local import LocalWorld, local_world
from .standalone import kimi_topk16, router_topk

__version__ = "0.1.0"

__all__ = [
    "KIMI_K3",
    "BrokenError",
    "BusyError",
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
    "PeerTimeoutError",
    "Plan",
    "PlanInfo",
    "RouterSpec",
    "TensorMeta",
    "UnsupportedError",
    "kimi_topk16",
    "local_world",
    "register",
    "router_topk",
]

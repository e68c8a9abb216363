"""What kernels of one's own are written with. Importing it needs the CuTe DSL, and no GPU.

Addresses are 64-bit integers: of tensors, as a kernel gets them, or of staged bytes (`Staging`).
"""

from .kernels.primitives import (
    load_pack,
    load_peer_pack,
    store_pack,
)
from .kernels.protocol import Lane, LaneArgs, Staging
from .kernels.scalars import bits_float, float_bits, maximum, minimum, select, wide

__all__ = [
    "Lane",
    "LaneArgs",
    "Staging",
    "bits_float",
    "float_bits",
    "load_pack",
    "load_peer_pack",
    "maximum",
    "minimum",
    "select",
    "store_pack",
    "wide",
]

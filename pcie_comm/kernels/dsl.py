"""The one place that drives the CuTe DSL compiler. Importing it needs the DSL, not a GPU."""

from __future__ import annotations

import tempfile
import threading

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute
from cutlass.base_dsl.compiler import DumpDir, GPUArch, KeepCUBIN, KeepPTX

from . import primitives as prim
from .collective import Collective, KernelKey
from .protocol import LaneArgs

_compiling = threading.Lock()


def compile_kernel(collective: Collective, key: KernelKey, arch: str) -> tuple[bytes, str]:
    """Return cubin and PTX of one kernel. The DSL's tracer is not re-entrant, hence the lock."""
    prim.set_target(arch)
    kernel = collective.kernel(key)
    block = collective.block

    @cute.jit
    def launch(lane: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        kernel(lane, tensors, scalars).launch(
            grid=(1, 1, 1),
            block=(block, 1, 1),
            min_blocks_per_mp=1,  # or ptxas spills on sm_80
        )

    signature = Uint64(0) if key.stats else Uint32(0)
    lane = LaneArgs(Int64(0), Int32(0), Int32(0), signature)
    tensors = (Int64(0),) * (collective.num_inputs + collective.num_outputs())
    scalars = (Int64(0),) * collective.num_scalars(key)
    with _compiling, tempfile.TemporaryDirectory(prefix="pcie_comm.") as folder:
        options = (KeepCUBIN(), KeepPTX(), DumpDir(folder), GPUArch(arch))
        compiled = cute.compile[options](launch, lane, tensors, scalars)
        return bytes(compiled.__cubin__), str(compiled.__ptx__)


__all__ = ["compile_kernel", "cutlass"]

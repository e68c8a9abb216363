"""Kernels for tools/bounds: the library's, whose waits have no bound and watch no word.

What is gone: the count of polls, the clock, the look at abort word, poison word and other calls'
flags, the poison word at the start, the verdict that every thread's wait went well, the look for a
second launch, and the status record. What stays is the protocol: every wait is for the
same flag or tag, every barrier is there, so outputs are right as long as every rank comes. One that
does not come is waited for for ever.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

from cutlass import Boolean, Int32, Int64, Uint32, cute

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from pcie_comm.kernels import compile as compiler  # noqa: E402
from pcie_comm.kernels import fused_kernels, tagged  # noqa: E402
from pcie_comm.kernels import primitives as prim  # noqa: E402
from pcie_comm.kernels.collective import KernelKey  # noqa: E402
from pcie_comm.kernels.protocol import Lane, Wait, no_wait  # noqa: E402
from pcie_comm.kernels.registry import find  # noqa: E402
from soak.kernels import Replaced, replaced  # noqa: E402

OPS = ("all_gather_pair", "all_gather_pair_kimi_topk")

_enter = Lane.enter


def _no_verdict(condition: Uint32) -> Uint32:
    return Uint32(1)


def enter(lane: Lane) -> None:
    """Enter, whatever the poison word says."""
    with mock.patch.object(prim, "warp_all", _no_verdict):
        _enter(lane)


@cute.jit
def wait_flag(lane: Lane, address: Int64, peer: Int32, relayed: Uint32) -> Wait:
    """Wait until `peer` raised this call's flag."""
    seen = ~lane.flag
    while seen != lane.flag:
        seen = prim.poll(address)
    return no_wait()


@cute.jit
def await_unit(lane: Lane, address: Int64, peer: Int32, enabled: Uint32) -> tuple:
    """Wait until a tagged unit carries this epoch; return its data."""
    missing = enabled
    unit = (Uint32(0), Uint32(0), Uint32(0), Uint32(0))
    while missing != Uint32(0):
        unit = prim.load_unit(address)
        missing = tagged._missing(lane, unit)
    cute.arch.sync_warp()
    return (unit[0], unit[2]), no_wait()


def begin(lane: Lane, noting: Boolean) -> Uint32:
    """Begin without a look for another launch."""
    return Uint32(0)


def block_all(condition: Uint32) -> Uint32:
    """Barrier of the block, and no verdict."""
    cute.arch.barrier()
    return _no_verdict(condition)


UNBOUNDED: Replaced = (
    (Lane, "enter", enter),
    (Lane, "wait_flag", wait_flag),
    (Lane, "begin", begin),
    (tagged, "await_unit", await_unit),
    (fused_kernels, "await_unit", await_unit),
    (prim, "block_all", block_all),
)


def keys() -> list[KernelKey]:
    """Return the kernels that a comparison needs: `prepare` loads those of several protocols."""
    return [key for op in OPS for key in find(op).variants()]


def build(key: KernelKey, arch: str) -> compiler.CompiledKernel:
    """Compile one kernel without bounds."""
    with replaced(UNBOUNDED):
        return compiler.build(find(key.op), key, arch)


def build_all(arch: str, folder: Path) -> list[KernelKey]:
    """Compile and write all of them; return their keys."""
    built = keys()
    for key in built:
        compiler.write(build(key, arch), folder)
    return built

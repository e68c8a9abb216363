"""The kernel of all_reduce_rms_norm; the message flow is there."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute.math as cute_math
from cutlass import Float32, Int32, Int64, Uint32, cute

from . import dtypes
from . import primitives as prim
from . import scalars as num
from .protocol import WARP, DeviceObject, Lane, LaneArgs, Staging
from .reduce import Slices
from .reduce_kernels import part_of


class NormRows(DeviceObject):
    """The rows of this block. Participants of every method: every thread of the block.

    Args:
        slices: The sum; its output is the new residual.
        tensors: residual, weight, normed: addresses.
        scalars: Row stride of the residual in bytes, packs of a row, rows per block; hidden size
            and eps as fp32, low and high word.
    """

    def __init__(self, slices: Slices, tensors: tuple, scalars: tuple, rows: Int32) -> None:
        self.slices = slices
        self.lane = slices.lane
        self.pack = slices.pack
        self.dtype = slices.dtype
        self.residual, self.weight, self.normed = tensors
        self.stride = scalars[0]
        self.packs = Int32(scalars[1])
        self.hidden = num.bits_float(Uint32(scalars[3]))
        self.eps = num.bits_float(Uint32(scalars[3] >> Int64(32)))
        self.first = num.minimum(self.lane.block * Int32(scalars[2]), rows)
        self.last = num.minimum(self.first + Int32(scalars[2]), rows)
        self.warps = self.lane.threads // WARP
        area = cute.arch.alloc_smem(Uint32, self.warps, 16)
        self.sums = prim.shared_address(area)

    def _load(self, address: Int64) -> list:
        return dtypes.unpack(prim.load_pack(address, Uint32(1), self.pack), self.dtype)

    @cute.jit
    def collect(self) -> None:
        """Write the new residual and its norm. Requires: `exchange` returned 1."""
        for row in cutlass.range(self.first, self.last, unroll=1):
            total = self._block_sum(self._add(row))
            scale = Float32(1.0) / cute_math.sqrt(total / self.hidden + self.eps)
            self._scale(row, scale)
            cute.arch.sync_threads()  # before the next row's sums

    @cute.jit
    def _add(self, row: Int32) -> Float32:
        """Write a row of the new residual; return this thread's sum of squares."""
        slices = self.slices
        squares = Float32(0.0)
        for item in cutlass.range(self.lane.thread, self.packs, self.lane.threads, unroll=1):
            index = row * self.packs + item
            sums = slices.total(index)
            address = self.residual + num.wide(row) * self.stride + num.wide(item) * self.pack
            updated = [a + b for a, b in zip(sums, self._load(address), strict=True)]
            words = dtypes.pack(updated, self.dtype)
            target = slices.columns.output + num.wide(index) * self.pack
            prim.store_pack(target, words, Uint32(1), self.pack)
            for one in dtypes.unpack(words, self.dtype):
                squares = squares + one * one
        return squares

    @cute.jit
    def _block_sum(self, value: Float32) -> Float32:
        """Return the sum over the block: lanes 16 to 1 apart, then warp after warp."""
        for step in cutlass.range_constexpr(5):
            value = value + cute.arch.shuffle_sync_bfly(value, 16 >> step)
        address = self.sums + cute.arch.warp_idx() * Int32(4)  # by a shuffle: all lanes
        if self.lane.lane == Int32(0):
            prim.store_shared_u32(address, num.float_bits(value))
        cute.arch.sync_threads()
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(self.warps):
            total = total + num.bits_float(prim.load_shared_u32(self.sums + Int32(4 * warp)))
        return total

    @cute.jit
    def _scale(self, row: Int32, scale: Float32) -> None:
        """Write a row of the norm. A thread reads what it has written itself."""
        for item in cutlass.range(self.lane.thread, self.packs, self.lane.threads, unroll=1):
            offset = num.wide(row * self.packs + item) * self.pack
            updated = self._load(self.slices.columns.output + offset)
            weights = self._load(self.weight + num.wide(item) * self.pack)
            scaled = [a * scale * b for a, b in zip(updated, weights, strict=True)]
            words = dtypes.pack(scaled, self.dtype)
            prim.store_pack(self.normed + offset, words, Uint32(1), self.pack)


def norm_kernel(dtype: str, *, push: bool, pack: int, threads: int) -> Any:
    """Return the kernel. Its scalars: as of reduce_kernel, then those of NormRows."""

    @cute.kernel
    def reduce_and_normalise(args: LaneArgs, tensors: tuple, scalars: tuple) -> None:
        lane = Lane(args, threads)
        local, residual, weight, normed, updated = tensors
        columns = part_of(lane, local, updated, scalars)
        slices = Slices(Staging(lane, push), columns, dtype, scatter=False, pack=pack)
        beside = (residual, weight, normed)
        rows = NormRows(slices, beside, scalars[7:], Int32(scalars[0]))
        lane.enter()
        if push:
            lane.await_turn(lane.block, Int32(scalars[1]))
        if lane.ok != Uint32(0):
            slices.stage()
        ok = lane.exchange(lane.ok)
        if ok != Uint32(0):
            rows.collect()

    return reduce_and_normalise

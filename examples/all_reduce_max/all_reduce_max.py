"""all_reduce_max: the largest of what the ranks hold, element by element, on every rank.

Stage: own numbers go into every rank's slab (push), or into the own one (pull). Exchange: flags
say that all ranks have staged. Collect: of each element the numbers of all ranks, rank 0 first.
"""

from __future__ import annotations

import torch

from pcie_comm import Collective, InvalidArgumentError, KernelKey, OutputSpec, Plan

NBYTES = 4  # of a number


class AllReduceMax(Collective):
    """[rows, width] fp32 per rank -> the same shape on every rank. A NaN of any rank wins."""

    name = "all_reduce_max"
    num_inputs = 1
    block = 256

    def plan(self, info, *tensors):
        (local,) = tensors
        given = f"shape={local.shape}, dtype={local.dtype}, strides={local.strides}"
        if local.dtype != "float32" or len(local.shape) != 2:
            raise InvalidArgumentError(f"local is no [rows, width] of fp32 ({given})", op=self.name)
        rows, width = local.shape
        if (rows > 1 and local.strides[0] != width) or (width > 1 and local.strides[1] != 1):
            raise InvalidArgumentError(f"call .contiguous() on local ({given})", op=self.name)
        count = rows * width
        blocks = min(max(-(-count // self.block), 1), info.max_blocks)
        protocol = "pull" if info.protocol == "pull" else "push"
        return Plan(
            op=self.name,
            outputs=(OutputSpec(local.shape, local.dtype),),
            kernel=KernelKey(self.name, (protocol,)),
            grid=blocks,
            scalars=(count, -(-count // blocks)),
            staged_nbytes=count * NBYTES,
            exchanged=(0,),
            facts=(protocol, local.shape),
        )

    def variants(self):
        return [KernelKey(self.name, (protocol,)) for protocol in ("push", "pull")]

    def num_scalars(self, key):
        return 2

    def kernel(self, key):
        import cutlass
        from cutlass import Int32, Uint32, cute

        from pcie_comm import device as dev

        threads, (protocol,) = self.block, key.variant

        @cute.kernel
        def all_reduce_max(args, tensors, scalars):
            source, output = tensors
            count, chunk = Int32(scalars[0]), Int32(scalars[1])
            lane = dev.Lane(args, threads)
            staging = dev.Staging(lane, protocol == "push")
            first = lane.block * chunk + lane.thread
            end = dev.minimum((lane.block + Int32(1)) * chunk, count)
            lane.enter()
            if lane.ok != Uint32(0):
                for i in cutlass.range(first, end, threads, unroll=1):
                    word = dev.load_pack(source + dev.wide(i) * NBYTES, Uint32(1), NBYTES)
                    staging.put(dev.wide(i) * NBYTES, word, NBYTES)
            ok = lane.exchange(lane.ok)
            if ok != Uint32(0):
                for i in cutlass.range(first, end, threads, unroll=1):
                    largest = dev.bits_float(Uint32(0xFF800000))  # minus infinity
                    for rank in cutlass.range(lane.world_size, unroll=1):
                        staged = staging.source(rank) + dev.wide(i) * NBYTES
                        (word,) = dev.load_peer_pack(staged, Uint32(1), NBYTES)
                        number = dev.bits_float(word)
                        larger = (number > largest) | (number != number)
                        largest = dev.select(larger, number, largest)
                    word = (dev.float_bits(largest),)
                    dev.store_pack(output + dev.wide(i) * NBYTES, word, Uint32(1), NBYTES)

        return all_reduce_max

    def reference(self, shards):
        largest = shards[0][0]
        for (number,) in shards[1:]:
            largest = torch.where((number > largest) | number.isnan(), number, largest)
        return (largest,)

    def example_inputs(self, world_size, rows, seed):
        random = torch.Generator().manual_seed(seed)
        return [(torch.randn(rows, 7, generator=random),) for _ in range(world_size)]

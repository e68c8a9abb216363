"""Ranks whose kernels run in ptx_machine: slabs, control blocks, and a plugin's calls."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from ptx_machine import Launch, Machine, Program

from pcie_comm.crossovers import VRAM
from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels.collective import Collective, KernelKey, Plan, PlanInfo
from pcie_comm.kernels.pieces import Piece, owner_of, plan_call
from pcie_comm.layout import MAX_WORLD, ControlLayout, CountLayout, SlabLayout, StatusLayout
from pcie_comm.stats import WORDS, ChannelStats, Records, channel_stats
from pcie_comm.tensors import alignment_of, byte_view, meta_of, torch_dtype

ARCH = "sm_80"


@functools.cache
def program_of(plugin: Collective, key: KernelKey) -> Program:
    return Program(compiler.build(plugin, key, ARCH).ptx)


class World:
    """Ranks of one machine; every call runs their launches side by side.

    Args:
        hosted: Slabs lie in host memory, as far as kernels notice.
        finds_races: Unordered accesses to shared memory are errors.

    Attributes:
        stats: Kernels count from now on.
    """

    stats = False

    def __init__(
        self,
        world_size: int,
        protocol: str = "push",
        *,
        blocks: int = 4,
        slot_nbytes: int = 1 << 18,
        order: int | None = None,
        hosted: bool = False,
        finds_races: bool = False,
    ) -> None:
        self.machine = Machine(order, finds_races)
        self.size = world_size
        self.layout = SlabLayout(slot_nbytes, world_size)
        segment = self.layout.segment_nbytes
        self.infos = [
            PlanInfo(r, world_size, protocol, segment, 64, blocks, 16, VRAM)
            for r in range(world_size)
        ]
        memory = self.machine.memory
        slabs = [memory.allocate(self.layout.nbytes, f"slab {r}") for r in range(world_size)]
        self.controls, self.records = [], []
        for rank in range(world_size):
            record = memory.allocate(StatusLayout.NBYTES, f"status {rank}")
            extra = slot_nbytes + segment if hosted else 0
            control = memory.allocate(ControlLayout.NBYTES + extra, f"control {rank}")
            mirror = slabs[rank]
            if hosted:
                mirror = control + ControlLayout.NBYTES - self.layout.tagged_offset(0, rank)
            words = {
                ControlLayout.SLOT_NBYTES: ("<I", slot_nbytes),
                ControlLayout.SEGMENT_NBYTES: ("<I", segment),
                ControlLayout.RELAYS: ("<I", int(hosted)),
                ControlLayout.TIMEOUT: ("<I", 1 << 30),
                ControlLayout.ABORT: ("<Q", record + StatusLayout.ABORT),
                ControlLayout.STATUS: ("<Q", record),
                ControlLayout.MIRROR: ("<Q", mirror % (1 << 64)),
            }
            words |= {ControlLayout.PEERS + 8 * p: ("<Q", slab) for p, slab in enumerate(slabs)}
            data, at = memory.place(control, ControlLayout.NBYTES)
            for offset, (form, number) in words.items():
                struct.pack_into(form, data, at + offset, number)
            self.controls.append(control)
            self.records.append(record)

    def read_stats(self, rank: int) -> ChannelStats:
        """Return what a rank has counted."""
        nbytes = MAX_WORLD * CountLayout.NBYTES
        address = self.controls[rank] + ControlLayout.COUNTS
        data, at = self.machine.memory.place(address, nbytes)
        words = np.frombuffer(bytes(data[at : at + nbytes]), np.uint64)
        return channel_stats("ptx", rank, self.size, Records(words.reshape(MAX_WORLD, WORDS)))

    def _upload(self, tensor: torch.Tensor, label: str) -> int:
        """Copy a tensor with its strides; what lies between its rows is there, too."""
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        flat = tensor.as_strided((span if tensor.numel() else 0,), (1,)).contiguous()
        nbytes = flat.numel() * tensor.itemsize
        shift = alignment_of(tensor) % 16
        address = self.machine.memory.allocate(nbytes, label, shift)
        data, at = self.machine.memory.place(address, nbytes) if nbytes else (bytearray(), 0)
        data[at : at + nbytes] = byte_view(flat).numpy().tobytes()
        return address

    def _launch(self, plugin: Collective, rank: int, plan: Plan, places: list[int]) -> list[Launch]:
        assert plan.kernel in plugin.variants()
        assert len(plan.scalars) == plugin.num_scalars(plan.kernel)
        counts = self.stats and plugin.communicates
        key = replace(plan.kernel, stats=True) if counts else plan.kernel
        signature = plan.signature | (plan.staged_nbytes * (self.size - 1) << 32)
        params = [self.controls[rank], rank, self.size, signature, *places, *plan.scalars]
        return [Launch(program_of(plugin, key), params, plan.grid)] if plan.grid else []

    def call(
        self,
        plugin: Collective | Sequence[Collective],
        inputs: Sequence[Sequence[torch.Tensor]],
        fails: bool = False,
    ) -> list[list[torch.Tensor]]:
        """Run one call on every rank, of one plugin or of each its own, launch by launch.

        Returns the outputs; of a call that `fails`, they held no zeros before.

        Raises:
            AssertionError: A rank reports a failure, or none does and should.
        """
        memory, results = self.machine.memory, []
        steps: list[list[Launch]] = []
        plugins = [plugin] * self.size if isinstance(plugin, Collective) else plugin
        for rank, tensors in enumerate(inputs):
            info, plugin = self.infos[rank], plugins[rank]
            plan, pieces = plan_call(plugin, info, [meta_of(t) for t in tensors])
            sources = [self._upload(t, f"input {i} of {rank}") for i, t in enumerate(tensors)]
            outputs = [
                torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in plan.outputs
            ]
            targets = [
                memory.allocate(out.numel() * out.itemsize, f"output {i} of {rank}")
                for i, out in enumerate(outputs)
            ]
            for out, address in zip(outputs, targets, strict=True) if fails else ():
                data, at = memory.place(address, out.numel() * out.itemsize)
                data[at : at + out.numel() * out.itemsize] = b"\xab" * out.numel() * out.itemsize
            starts = [*sources, *targets]
            for step, piece in enumerate(pieces or [Piece(plan, (0,) * len(starts))]):
                places, owner = piece.addresses(starts), owner_of(plugin, piece.plan)
                steps += [[]] * (step + 1 - len(steps))
                steps[step] = [*steps[step], *self._launch(owner, rank, piece.plan, places)]
            results.append((outputs, targets))
        self.launched = len(steps)
        for launches in steps:
            self.machine.run(launches, plugin.block)
        for record in self.records:
            failed = memory.load(record, 4) != 0
            assert failed == fails, f"a rank reports {'a' if failed else 'no'} failure"
        for outputs, targets in results:
            for out, address in zip(outputs, targets, strict=True):
                nbytes = out.numel() * out.itemsize
                if nbytes:
                    data, at = memory.place(address, nbytes)
                    raw = torch.frombuffer(bytearray(data[at : at + nbytes]), dtype=torch.uint8)
                    byte_view(out).copy_(raw)
        return [outputs for outputs, _ in results]

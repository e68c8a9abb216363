"""The plugin contract: what a collective says of itself, and what it is told.

A collective says what it needs (`plan`), how the device does it (`kernel`) and what the right
answer is (`reference`). Slabs, peer addresses, flags, epochs, bounds and graphs are the channel's.
"""

from __future__ import annotations

import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch.compiler import is_dynamo_compiling

from ..crossovers import VRAM, Limits
from ..errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from .pieces import Piece


@dataclass(frozen=True)
class TensorMeta:
    """What a plan may know of a tensor: everything but its bytes and its address.

    Attributes:
        shape: Sizes.
        dtype: Name without the `torch.` prefix, for example `bfloat16`.
        strides: In elements.
        itemsize: Bytes of one element.
        alignment: Largest power of two, at most 16, that divides the address in bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    itemsize: int
    alignment: int = 16


@dataclass(frozen=True)
class OutputSpec:
    """Shape and dtype of one output, the same on every rank."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class PlanInfo:
    """What a plan may know of its group. Alike on all ranks but for `rank` and `output_alignment`.

    Attributes:
        rank: Group rank.
        world_size: Number of ranks.
        protocol: What was asked for: `auto`, `push`, `pull` or `tagged`.
        segment_nbytes: What one rank may stage in one slot.
        max_rows: Most rows of one call, for collectives that cannot be cut (`row_inputs`).
        max_blocks: Most thread blocks that are resident on every rank's device at once.
        output_alignment: Largest power of two, at most 16, that divides every output's address.
        limits: Sizes up to which `auto` means tagged push, and push.
    """

    rank: int
    world_size: int
    protocol: str
    segment_nbytes: int
    max_rows: int
    max_blocks: int
    output_alignment: int = 16
    limits: Limits = VRAM


@dataclass(frozen=True)
class KernelKey:
    """Names one compiled kernel: an operation and its compile-time facts.

    Attributes:
        op: Name of the collective.
        variant: Compile-time facts in the plugin's own order, for example `("push", 16)`.
        stats: The same kernel with counters, which `Config.stats` asks for. Plugins leave it alone.
    """

    op: str
    variant: tuple[str | int, ...] = ()
    stats: bool = False

    def __str__(self) -> str:
        return "-".join([self.op, *map(str, self.variant), *(["stats"] if self.stats else [])])


@dataclass(frozen=True)
class Plan:
    """How one call runs. Derived from metadata alone, so every rank derives the same.

    Attributes:
        op: Name of the collective.
        outputs: What the call returns.
        kernel: Which compiled kernel runs.
        grid: Thread blocks of the launch; 0 for a call without communication and without rows. A
            call with communication launches even without rows: its flags are what tells a rank
            that its peers do have rows.
        scalars: Integers the kernel gets behind the tensors' addresses, as 64-bit arguments.
        staged_nbytes: Bytes one rank stages.
        exchanged: Indices of the inputs whose bytes go to the peers (the rest is local); empty for
            a call without communication.
        facts: What must be equal on all ranks for the call to match; goes into the signature.
            Not the kernel's variant: ranks whose tensors are aligned differently still match.
        shards: Per rank, the shapes of its exchanged inputs, if they differ between ranks.
    """

    op: str
    outputs: tuple[OutputSpec, ...]
    kernel: KernelKey
    grid: int
    scalars: tuple[int, ...] = ()
    staged_nbytes: int = 0
    exchanged: tuple[int, ...] = ()
    facts: tuple[object, ...] = field(default=())
    shards: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @property
    def signature(self) -> int:
        """32 bits that name the operation and its shapes; never 0. Travels in every flag."""
        text = repr((self.op, self.grid, self.staged_nbytes, self.exchanged, self.facts))
        return zlib.crc32(text.encode()) or 1


_plugins: WeakValueDictionary[str, Collective] = WeakValueDictionary()
_numbers = itertools.count()


class Collective(ABC):
    """A plugin. Instances are stateless; one serves any number of groups.

    Attributes:
        name: Name of the operation, unique among registered plugins.
        num_inputs: Number of tensors a call takes.
        block: Threads per block of its kernels.
        device_sources: Files with device code besides the plugin's own; a change in one of them
            makes kernels stale.
        communicates: Its kernels have peers: they make a Lane, and may count what it does.
        tolerance: By how much numbers of a GPU may differ from those of `reference`, relative and
            absolute; 0: every byte is equal.
        row_inputs: Inputs whose first dimension counts rows, if a call is the same as calls on
            ranges of its rows, one after another, and all outputs have these rows first. Then a
            call may have any number of rows: what does not fit a slot is cut. Empty: never cut.
        made_of: Names of collectives whose kernels `plan_pieces` launches beside its own.
        registered: The registry holds this very instance. Set by the registry.
        handle: Names this instance in this process while it lives, see `plugin_of`.
    """

    name: str = ""
    num_inputs: int = 1
    block: int = 256
    device_sources: Sequence[Path] = ()
    communicates: bool = True
    tolerance: float = 0.0
    row_inputs: Sequence[int] = ()
    made_of: Sequence[str] = ()
    registered: bool = False
    handle: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Give a new plugin its handle.

        Raises:
            ValueError: It is made inside a function that torch.compile traces, where nothing is
                made for good.
        """
        if is_dynamo_compiling():
            raise ValueError(f"{cls.__name__} is made in a compiled function; make it outside")
        self = super().__new__(cls)
        object.__setattr__(self, "handle", f"{next(_numbers)}/{cls.__name__}")
        _plugins[self.handle] = self
        return self

    @abstractmethod
    def plan(self, info: PlanInfo, *tensors: TensorMeta) -> Plan:
        """Check the inputs and say how the call runs. Pure.

        Raises:
            InvalidArgumentError: Shape, dtype, stride or size does not fit.
            UnsupportedError: Legal, but not available for this world size or dtype.
        """

    @abstractmethod
    def variants(self) -> Sequence[KernelKey]:
        """Return every kernel that `plan` can ask for, for ahead-of-time builds."""

    def needed(self, world_size: int) -> Sequence[KernelKey]:
        """Return those of `variants` that calls of a group of this size may ask for."""
        return self.variants()

    @abstractmethod
    def kernel(self, key: KernelKey) -> Any:
        """Return the CuTe DSL kernel `fn(lane: LaneArgs, tensors: tuple, scalars: tuple)`.

        Called only when a kernel is compiled, with the DSL importable.
        """

    @abstractmethod
    def num_scalars(self, key: KernelKey) -> int:
        """Return how many scalars the kernel `key` takes."""

    @abstractmethod
    def reference(self, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        """Return the outputs from every rank's inputs, in plain torch.

        Args:
            shards: One sequence of input tensors per rank, in rank order. Inputs that are not
                exchanged are this rank's own in every sequence.
        """

    def reference_for(
        self, rank: int, shards: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        """Return one rank's outputs; for collectives whose outputs differ between ranks.

        `reference` returns those of rank 0 then.
        """
        return self.reference(shards)

    def example_inputs(
        self, world_size: int, rows: int, seed: int
    ) -> Sequence[Sequence[torch.Tensor]]:
        """Return inputs of one call for every rank, on the CPU; the same ones for the same seed.

        Optional: `pcie_comm.testing` and `pcie-comm bench` draw their inputs here. Random numbers
        rather than zeros; what ranks must have in common is drawn once.

        Raises:
            UnsupportedError: The plugin gives none, or does not serve this world size.
        """
        raise UnsupportedError(
            f"{self.name} has no example inputs; write {type(self).__qualname__}.example_inputs",
            reason="the plugin has no example_inputs",
            op=self.name,
        )

    def plan_columns(
        self, info: PlanInfo, part: int, parts: int, *tensors: TensorMeta
    ) -> tuple[Plan, tuple[int, ...]] | None:
        """Plan a part of a call of one row that does not fit a slot; None if rows are never cut.

        Args:
            info: Of the group.
            part: Which one, from 0; part 0 stages most.
            parts: How many there are.
            tensors: Of the whole call.

        Returns:
            The plan of the launch, and per input and output where it begins, in bytes; None too if
            this part is empty.
        """
        return None

    def plan_pieces(self, info: PlanInfo, *tensors: TensorMeta) -> Sequence[Piece] | None:
        """Plan a call of several launches; None: it is one, or is cut if it does not fit."""
        return None

    def for_inputs(self, count: int) -> Collective:
        """Return the plugin for a call with `count` tensors, of those that take any number."""
        return self

    def family(self) -> Sequence[Collective]:
        """Return every plugin of this name that ahead-of-time builds compile, this one or others.

        For collectives that take any number of tensors: one per number.
        """
        return (self,)

    def prepared_by(self) -> str:
        """Return what a user passes to `group.prepare` for this plugin, for messages."""
        return f'"{self.name}"' if self.registered else f"the plugin {self.name}"

    def num_outputs(self) -> int:
        """Return the number of tensors a call returns."""
        return 1

    def output_specs(self, info: PlanInfo, *tensors: TensorMeta) -> tuple[OutputSpec, ...]:
        """Return what a call returns, for torch.compile. Pure.

        This one asks `plan`, so that a compiled graph holds for one number of rows. A plugin whose
        formula also serves symbolic sizes (products and sums of them) writes it here.
        """
        return self.plan(info, *map(_concrete, tensors)).outputs

    def check_world_size(self, world_size: int) -> None:  # noqa: B027 - most serve every size
        """Raise UnsupportedError if the collective does not serve this world size."""


def plugin_of(handle: str) -> Collective:
    """Return the plugin of a handle.

    Raises:
        InvalidArgumentError: No plugin of this process that lives has it.
    """
    plugin = _plugins.get(handle)
    if plugin is None:
        raise InvalidArgumentError(
            f"plugin={handle!r} names no plugin of this process that lives; give the `handle` of "
            "one, and keep it as long as what was compiled with it"
        )
    return plugin


def _concrete(meta: TensorMeta) -> TensorMeta:
    shape, strides = (tuple(map(int, sizes)) for sizes in (meta.shape, meta.strides))
    return replace(meta, shape=shape, strides=strides)


def title(collective: Collective) -> str:
    """Return a plugin's name and where it comes from, for messages."""
    kind = type(collective)
    return f"plugin {collective.name!r} ({kind.__module__}.{kind.__qualname__})"


def check_collective(collective: object) -> None:
    """Check that something is a plugin with a name.

    Raises:
        InvalidArgumentError: It is not.
    """
    if not isinstance(collective, Collective) or not collective.name:
        raise InvalidArgumentError(
            f"collective={collective!r} is no named Collective; derive from Collective, set name"
        )

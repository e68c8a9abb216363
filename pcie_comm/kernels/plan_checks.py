"""What a plugin answers, checked before the runtime relies on it."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence

import torch

from ..errors import CommError, InvalidArgumentError, UnsupportedError
from ..layout import LINE_NBYTES, align_up
from ..tensors import torch_dtype
from .collective import Collective, KernelKey, Plan, PlanInfo, TensorMeta, title

MAX_THREADS = 1024
"""Threads that a block may have on every GPU."""


def make_plan(collective: Collective, info: PlanInfo, tensors: Sequence[TensorMeta]) -> Plan:
    """Ask a plugin for its plan, and check that the plan is one.

    Raises:
        CommError: What the plugin raised of this library's errors.
        UnsupportedError: The plugin raised anything else, or what it returned is no plan.
    """
    with blaming(collective, "failed to plan a call", info.rank):
        plan = collective.plan(info, *tensors)
    try:
        _check_form(plan, collective)
    except Exception as error:
        raise _failed(collective, "returned no usable plan", error, info.rank) from error
    return plan


@contextlib.contextmanager
def blaming(collective: Collective, what: str, rank: int | None = None) -> Iterator[None]:
    """Name the plugin in whatever it raises within the block.

    Args:
        collective: The plugin.
        what: It did then, in a few words.
        rank: That asked it.

    Raises:
        CommError: What the plugin raised of this library's errors, with `rank` and `op` filled in.
        UnsupportedError: The plugin raised anything else.
    """
    try:
        yield
    except CommError as error:
        if error.rank is None:
            error.rank = rank
        if error.op is None:
            error.op = collective.name
        raise
    except Exception as error:
        raise _failed(collective, what, error, rank) from error


def variants_of(
    collective: Collective, rank: int | None = None, world_size: int = 0
) -> list[KernelKey]:
    """Return the kernels of a plugin; with a world size, those that its calls there may need.

    Raises:
        UnsupportedError: The plugin fails, or names kernels that are none, or not its own.
    """
    with blaming(collective, "failed to list its kernels", rank):
        keys = list(collective.needed(world_size) if world_size else collective.variants())
        listed: list[object] = list(keys)
        for key in listed:
            if not isinstance(key, KernelKey) or key.op != collective.name:
                raise ValueError(f"kernel={key!r} is no KernelKey of op={collective.name!r}")
        if len(set(map(str, keys))) < len(keys):
            raise ValueError(f"kernels={list(map(str, keys))} are not told apart by their names")
    return keys


def run_reference(
    collective: Collective,
    rank: int,
    shards: Sequence[Sequence[torch.Tensor]],
    outputs: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """Ask a plugin for the results of a rank's call, and check them against the call's outputs.

    Raises:
        CommError: What the plugin raised of this library's errors.
        UnsupportedError: The plugin raised anything else, or its results are not as planned.
    """
    try:
        results = collective.reference_for(rank, shards)
        returned = [(tuple(value.shape), value.dtype) for value in results]
    except CommError:
        raise
    except Exception as error:
        raise _failed(collective, "failed to compute a result", error, rank) from error
    planned = [(tuple(output.shape), output.dtype) for output in outputs]
    if returned != planned:
        problem = ValueError(f"planned={planned}, returned={returned}")
        raise _failed(collective, "returned other results than it planned", problem, rank)
    return results


def _failed(
    collective: Collective, what: str, error: Exception, rank: int | None
) -> UnsupportedError:
    return UnsupportedError(
        f"{title(collective)} {what}: {type(error).__name__}: {error}; mend the plugin",
        reason=f"plugin {collective.name} failed",
        rank=rank,
        op=collective.name,
    )


def _check_form(plan: object, collective: Collective) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan() returned {type(plan).__name__}, expected Plan")
    if plan.op != collective.name or plan.kernel.op != collective.name:
        raise ValueError(f"op={plan.op!r} and kernel={plan.kernel} are not both of this plugin")
    count = collective.num_outputs()
    if len(plan.outputs) != count:
        raise ValueError(f"outputs={len(plan.outputs)}, num_outputs()={count}")
    for output in plan.outputs:
        torch_dtype(output.dtype)
        if any(size < 0 for size in output.shape):
            raise ValueError(f"an output has shape={output.shape}")
    if not all(0 <= index < collective.num_inputs for index in plan.exchanged):
        raise ValueError(f"exchanged={plan.exchanged}, num_inputs={collective.num_inputs}")
    if plan.grid < 0 or plan.staged_nbytes < 0:
        raise ValueError(f"grid={plan.grid}, staged_nbytes={plan.staged_nbytes}")
    wanted = collective.num_scalars(plan.kernel)  # fewer, and the driver would read past their end
    if len(plan.scalars) != wanted:
        raise ValueError(f"scalars={len(plan.scalars)}, num_scalars({plan.kernel})={wanted}")
    if not all(-(1 << 63) <= operator.index(scalar) < 1 << 63 for scalar in plan.scalars):
        raise ValueError(f"scalars={plan.scalars} do not fit 64 bits")


def check_rows(rows: object, collective: Collective, max_rows: int) -> None:
    """Check a number of rows of calls to come.

    Raises:
        InvalidArgumentError: It is none, or too many for a plugin whose calls cannot be cut.
    """
    op = collective.name
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise InvalidArgumentError(f"rows={rows!r} is no number of rows; give 0 or more", op=op)
    if rows > max_rows and collective.communicates and not collective.row_inputs:
        raise InvalidArgumentError(
            f"rows={rows!r} is outside 0 to max_rows={max_rows}, and calls of {op} are never cut; "
            "raise Config.max_rows on every rank",
            op=op,
        )


def check_plan(collective: Collective, plan: Plan, info: PlanInfo, staged_nbytes: int) -> None:
    """Check what a plugin planned against what its channel has.

    Raises:
        InvalidArgumentError: The bytes do not fit the slot.
        UnsupportedError: The plugin asks for more blocks than are resident, or for blocks that are
            too small to signal every peer; launching it would hang or damage memory.
    """
    if not plan.exchanged:
        return
    if staged_nbytes > info.segment_nbytes:
        raise InvalidArgumentError(
            f"a call of {title(collective)} stages nbytes={staged_nbytes} per rank, more than the "
            f"capacity={info.segment_nbytes}; raise Config.slot_nbytes on every rank "
            f"(needed: {align_up(staged_nbytes, LINE_NBYTES) * info.world_size})",
            rank=info.rank,
            op=plan.op,
        )
    smallest = align_up(info.world_size, 32)
    fits = 1 <= plan.grid <= info.max_blocks
    if not fits or not smallest <= collective.block <= MAX_THREADS:
        raise UnsupportedError(
            f"{title(collective)} asks for grid={plan.grid} blocks of "
            f"block={collective.block} threads; allowed are 1 to {info.max_blocks} blocks of "
            f"{smallest} to {MAX_THREADS} threads",
            reason="the launch does not fit its channel",
            rank=info.rank,
            op=plan.op,
        )

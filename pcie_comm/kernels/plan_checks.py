"""What a plugin answers, checked before the runtime relies on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import CommError, InvalidArgumentError, UnsupportedError
from ..layout import LINE_NBYTES, MAX_BLOCKS, align_up
from ..tensors import torch_dtype
from .registry import Collective, Plan, PlanInfo, TensorMeta

MAX_THREADS = 1024
"""Threads that a block may have on every GPU."""


def make_plan(collective: Collective, info: PlanInfo, tensors: Sequence[TensorMeta]) -> Plan:
    """Ask a plugin for its plan, and check that the plan is one.

    Raises:
        CommError: What the plugin raised of this library's errors.
        UnsupportedError: The plugin raised anything else, or what it returned is no plan.
    """
    try:
        plan = collective.plan(info, *tensors)
    except CommError:
        raise
    except Exception as error:
        raise _failed(collective, "failed to plan a call", error) from error
    try:
        _check_form(plan, collective)
    except Exception as error:
        raise _failed(collective, "returned no usable plan", error) from error
    return plan


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
        raise _failed(collective, "failed to compute a result", error) from error
    planned = [(tuple(output.shape), output.dtype) for output in outputs]
    if returned != planned:
        problem = ValueError(f"planned={planned}, returned={returned}")
        raise _failed(collective, "returned other results than it planned", problem)
    return results


def _failed(collective: Collective, what: str, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"plugin {collective.name!r} {what}: {type(error).__name__}: {error}; mend the plugin",
        reason=f"plugin {collective.name} failed",
        op=collective.name,
    )


def _check_form(plan: object, collective: Collective) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan() returned {type(plan).__name__}, expected Plan")
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
            f"a call stages nbytes={staged_nbytes} per rank, more than the "
            f"capacity={info.segment_nbytes}; raise Config.slot_nbytes on every rank "
            f"(needed: {align_up(staged_nbytes, LINE_NBYTES) * info.world_size})",
            op=plan.op,
        )
    smallest = max(MAX_BLOCKS, align_up(info.world_size, 32))
    fits = 1 <= plan.grid <= info.max_blocks
    if not fits or not smallest <= collective.block <= MAX_THREADS:
        raise UnsupportedError(
            f"plugin {collective.name!r} asks for grid={plan.grid} blocks of "
            f"block={collective.block} threads; allowed are 1 to {info.max_blocks} blocks of "
            f"{smallest} to {MAX_THREADS} threads",
            reason="the launch does not fit its channel",
            op=plan.op,
        )

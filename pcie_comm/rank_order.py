"""What a caller may give as `ranks`, and the group-rank order it stands for. Pure."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from .errors import InvalidArgumentError
from .layout import MAX_WORLD


def group_order(ranks: int | Sequence[int]) -> tuple[int, ...]:
    """Return the global ranks of a group in group-rank order.

    Raises:
        InvalidArgumentError: `ranks` is no world size from 1 to 16 and no sequence of that many
            different, non-negative global ranks.
    """
    if isinstance(ranks, Sequence) and not isinstance(ranks, (str, bytes)):
        return _checked_sequence(ranks)
    world_size = _checked_integer(ranks, "ranks")
    if not 1 <= world_size <= MAX_WORLD:
        raise InvalidArgumentError(
            f"world size ranks={world_size} is out of range; give 1 to {MAX_WORLD}"
        )
    return tuple(range(world_size))


def _checked_sequence(ranks: Sequence[int]) -> tuple[int, ...]:
    order = tuple(_checked_integer(rank, f"ranks={ranks!r}: rank") for rank in ranks)
    if not 1 <= len(order) <= MAX_WORLD:
        raise InvalidArgumentError(
            f"ranks={ranks!r} has length {len(order)}; give 1 to {MAX_WORLD} global ranks"
        )
    if min(order) < 0:
        raise InvalidArgumentError(
            f"ranks={ranks!r} holds the negative rank {min(order)}; global ranks start at 0"
        )
    twice = sorted({rank for rank in order if order.count(rank) > 1})
    if twice:
        raise InvalidArgumentError(
            f"ranks={ranks!r} names {twice} more than once; name each global rank once"
        )
    return order


def _checked_integer(value: object, name: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError("a bool is no rank")
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:  # of tensors also the latter
        raise InvalidArgumentError(
            f"{name}={value!r} is not an integer; give a world size from 1 to {MAX_WORLD}, "
            "or a list of global ranks"
        ) from error

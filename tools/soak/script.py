"""What is called: drawn from a seed, the same on every rank. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

LAP_STEPS = 200
"""Calls between two looks at the clock."""

ROWS = (0, 1, 1, 2, 3, 8, 17)
WIDTHS = (1, 5, 16, 56, 224)
LANES = 2


@dataclass(frozen=True)
class Step:
    """One call.

    Attributes:
        number: Of the call, from 0 on.
        op: Name of the operation.
        lane: Which channel.
        rows, width: Size; the second tensor of a pair has half the columns and one.
        place: Draws the bytes.
        given: The outputs are the caller's.
    """

    number: int
    op: str
    lane: int
    rows: int
    width: int
    place: int
    given: bool


def draw_lap(seed: int, lap: int, ops: Sequence[str]) -> list[Step]:
    """Draw the steps of a lap; a lap can be drawn without those before it."""
    dice = random.Random(f"{seed}/{lap}")
    return [
        Step(
            number=lap * LAP_STEPS + index,
            op=dice.choice(ops),
            lane=dice.randrange(LANES),
            rows=dice.choice(ROWS),
            width=dice.choice(WIDTHS),
            place=dice.getrandbits(30),
            given=dice.random() < 0.5,
        )
        for index in range(LAP_STEPS)
    ]

"""What one rank's trouble does to the waits of the others, where all are threads of a process."""

from __future__ import annotations

import time

import numpy as np
import pytest
from worlds import on_each, pair_of, small

from pcie_comm import BrokenError, PeerAbortedError, PeerTimeoutError, local_world
from pcie_comm.host_engine import HostEngine

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TIMEOUT_S = 0.3
MARGIN_S = 1.0
"""What a loaded machine may add to a limit."""


def test_abort_reaches_the_waits_of_the_peers_and_names_the_rank():
    """Ranks 0 and 1 wait for rank 2, which aborts; rank 3 waits for nothing."""
    with local_world(4, "cpu", config=small(timeout_s=20.0)) as world:

        def on_rank(group):
            if group.rank == 3:
                return None
            if group.rank == 2:
                time.sleep(0.2)
                return group.abort()
            return group.all_gather_pair(*pair_of(1.0))

        started = time.monotonic()
        errors = on_each(world.groups, on_rank)
        assert time.monotonic() - started < 0.2 + MARGIN_S
        assert errors[2:] == [None, None]
        for rank in (0, 1):
            assert (errors[rank].rank, errors[rank].peer, errors[rank].epoch) == (rank, 2, 1)
            assert "aborted by rank 2" in str(errors[rank])
        with pytest.raises(PeerAbortedError, match="by rank 2"):
            world.groups[3].check()
        with pytest.raises(PeerAbortedError, match="by this rank"):
            world.groups[2].check()
        del errors


def test_b08_a_flag_that_one_rank_alone_misses(monkeypatch):
    """Rank 1's flag never reaches rank 0; rank 1 passes, and fails in the next call."""
    flag = HostEngine._flag

    def lost(engine: HostEngine, owner: int, slot: int, writer: int):
        nowhere = engine.rank == writer == 1 and owner == 0
        return np.zeros(1, np.uint64) if nowhere else flag(engine, owner, slot, writer)

    monkeypatch.setattr(HostEngine, "_flag", lost)
    with local_world(2, "cpu", config=small(timeout_s=TIMEOUT_S)) as world:
        errors = on_each(
            world.groups, lambda g: [g.all_gather_pair(*pair_of(1.0)) for _ in range(2)]
        )
        assert [type(error) for error in errors] == [PeerTimeoutError] * 2
        assert [(error.peer, error.epoch) for error in errors] == [(1, 1), (0, 2)]
        del errors
        with pytest.raises(BrokenError):
            world.groups[0].all_gather_pair(*pair_of(1.0))

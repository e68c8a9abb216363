"""What this process has left behind of slabs in shared memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Collection
from pathlib import Path


def own_files() -> list[str]:
    """Names that this process left in /dev/shm; others' tests may run at the same time."""
    return [path.name for path in Path("/dev/shm").glob(f"pcie_comm.{os.getpid()}.*")]


def own_mappings() -> list[str]:
    """Slab files that this process still maps, also those without a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/pcie_comm." in line]


def release_kept() -> None:
    """Give back what groups kept for peers that might still come: the peers of a test are gone."""
    from pcie_comm import closing

    while closing._kept:
        estate = closing._kept.pop()
        for channel in estate.channels.values():
            channel.engine.close()
        estate.watch.leave()
        estate.free()


def assert_none(before: Collection[str] = ()) -> None:
    """Fail if a slab is still there that no kept group accounts for, and that was not `before`."""
    release_kept()
    if set(own_mappings()) - set(before):
        gc.collect()
    assert own_files() == []
    assert set(own_mappings()) - set(before) == set()

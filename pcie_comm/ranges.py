"""Ranges on the host that NVIDIA's profilers show, by the NVTX that comes with torch.

A range is as long as the call on the host, which on a GPU ends before its kernel has run. Replays
of a graph have none: nothing of the call runs on the host then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.cuda import nvtx

from .errors import UnsupportedError

PREFIX = "pcie_comm."


def check_nvtx() -> None:
    """Raise if there is no NVTX.

    Raises:
        UnsupportedError: This build of torch is without CUDA.
    """
    try:
        nvtx.mark(f"{PREFIX}group")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UnsupportedError(
            f"nvtx=True needs a torch that was built with CUDA ({error}); leave Config.nvtx off, "
            "or install one",
            reason="torch has no NVTX",
        ) from error


@contextmanager
def around(op: str) -> Iterator[None]:
    """Mark what happens inside as a range that is named after an operation."""
    nvtx.range_push(PREFIX + op)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        nvtx.range_pop()  # type: ignore[no-untyped-call]


def marked(call: Callable[[], None], op: str) -> Callable[[], None]:
    """Return a function that makes a call inside of a range."""

    def run() -> None:
        with around(op):
            call()

    return run

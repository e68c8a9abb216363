"""What a child process can do, by name; and what becomes of an error."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import CommError, CompileError, CudaError, PeerTimeoutError, UnsupportedError
from ..topology.probed import CORRUPT, HANG, NO_ACCESS, SKIPPED
from . import capability, checks, figures, load, patterns
from .lab import Lab
from .task import Answer, Task, failed
from .transfer import WrongBytes
from .visit import VisitError

Work = Callable[[Lab, Task], Answer]

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


def ask(lab: Lab, task: Task) -> Answer:
    """Ask CUDA about devices and pairs: `data` is a CudaHost. That is all the process is for."""
    return Answer((), data=capability.ask(), broken=True)


def collective(lab: Lab, task: Task) -> Answer:
    """See collective.py, which needs torch."""
    from .collective import collective as run

    return run(lab, task)


WORKS: dict[str, Work] = {
    "ask": ask,
    "store": checks.store,
    "load": checks.load,
    "copy": checks.copy,
    "litmus": checks.litmus,
    "all at once": checks.all_at_once,
    "collective": collective,
    "bandwidth": figures.bandwidth,
    "host bandwidth": figures.host_bandwidth,
    "chase": figures.chase,
    "flag": figures.flag,
    "exchanges": figures.exchanges,
    "ladder": figures.ladder,
    "pattern": patterns.pattern,
    "links": load.links,
}


def perform(lab: Lab, task: Task, work: Work | None = None) -> Answer:
    """Do a task; an error becomes the verdict of its checks, or the reason of its gaps."""
    try:
        return (work or WORKS[task.work])(lab, task)
    except CommError as error:
        verdict, broken = _judge(error)
        wrong = (*error.ends, str(error)) if isinstance(error, WrongBytes) else None
        return Answer(failed(task.blanks, verdict, str(error)), broken=broken, wrong=wrong)
    except Exception as error:
        reason = f"a fault of the probe: {type(error).__name__}: {error}"
        return Answer(failed(task.blanks, SKIPPED, reason), broken=True)


def _judge(error: CommError) -> tuple[str, bool]:
    """Return the verdict of an error, and whether the process is of no further use."""
    if isinstance(error, VisitError):
        return error.verdict, True
    if isinstance(error, CudaError):
        return (SKIPPED if error.name == OUT_OF_MEMORY else NO_ACCESS), True
    if isinstance(error, PeerTimeoutError):
        return HANG, True
    if isinstance(error, WrongBytes):
        return CORRUPT, False
    if isinstance(error, UnsupportedError):
        return (NO_ACCESS if "peer access" in error.reason else SKIPPED), False
    return SKIPPED, not isinstance(error, CompileError)

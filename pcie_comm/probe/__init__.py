"""What the ways between GPUs really do: verify and measure, on a machine that has them.

`probe` takes the record of a host (topology/) through levels 2 to 4. Whatever touches a GPU does so
in a child process with a deadline. Nothing changes a setting of a card or resets one.

    plan.py, pattern_plan.py     which tasks there are; pure
    runner.py, child.py          the processes that do them
    works.py                     what can be done; in checks, figures, patterns, visit, ...
    lab.py, gpu.py, region.py    the GPUs of a process, and memory to try them with
    kernels.py, device.py        the probes' own kernels
"""

from .program import Options, probe

__all__ = ["Options", "probe"]

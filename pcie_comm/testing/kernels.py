"""Checks of kernels as they are compiled; needs the CuTe DSL, and no GPU."""

from __future__ import annotations

import importlib.util
import re
import tempfile
import unittest
from pathlib import Path

from ..errors import CompileError
from ..kernels import compile as compiler
from ..kernels.plan_checks import variants_of
from ..kernels.store import KernelStore
from .subject import Subject

SIGNALS = re.compile(r"st\.(release|relaxed)\.sys\.global\.u64")
WAITS = re.compile(r"ld\.acquire\.sys\.global\.u64")


def kernels_compile_and_signal(subject: Subject) -> None:
    """Every variant compiles, and is found in a folder such as PCIE_COMM_KERNELS names.

    Where ranks exchange something each kernel must raise flags and wait for those of others; that
    it does so on every way through it is not shown.
    """
    if importlib.util.find_spec("cutlass") is None:
        raise unittest.SkipTest("the CuTe DSL is not installed")
    try:
        subject.communicating()
        communicates = True
    except unittest.SkipTest:
        communicates = False
    with tempfile.TemporaryDirectory(prefix="pcie_comm.testing.") as name:
        store = KernelStore(Path(name) / "kernels", Path(name) / "cache")
        for key in variants_of(subject.plugin):
            kernel = compiler.build(subject.plugin, key, subject.arch)
            for what, pattern in (("signals", SIGNALS), ("waits", WAITS)):
                if communicates and not pattern.search(kernel.ptx):
                    subject.fail(f"kernel {key} never {what}; call Lane.exchange in it")
            compiler.write(kernel, Path(name) / "kernels")
            found = store.get(subject.plugin, key, _capability(subject.arch))
            if found.cubin != kernel.cubin or "ahead of time" not in store.sources[str(key)]:
                raise CompileError(f"kernel {key} was written and not found", op=key.op)


def _capability(arch: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", arch)
    return int(digits[:-1]), int(digits[-1])

"""Runs in an environment that has the wheel and no CuTe DSL; check_install.py reads what it prints.

Asks for every kernel of every collective as a GPU's first call would, and says which of them would
have had to be compiled. Stands alone: it must not find the package of the tree beside it.

Usage: python installed_trial.py ARCH ...
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
import time
from pathlib import Path

import pcie_comm
from pcie_comm.errors import CommError
from pcie_comm.kernels.registry import collectives
from pcie_comm.kernels.store import KernelStore


def capability(arch: str) -> tuple[int, int]:
    """Return the compute capability that an architecture is named after."""
    major, minor = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch).groups()  # type: ignore[union-attr]
    return int(major), int(minor)


def ask(arch: str, cache: Path) -> tuple[int, list[str], float]:
    """Ask for all kernels; return how many came with the package, faults, and ms for the first."""
    store = KernelStore(None, cache)
    faults, first_ms = [], 0.0
    for collective in collectives().values():
        for key in collective.variants():
            started = time.perf_counter()
            try:
                kernel = store.get(collective, key, capability(arch))
            except CommError as error:
                faults.append(f"{key}: {error}")
                continue
            first_ms = first_ms or (time.perf_counter() - started) * 1e3
            if kernel.entry.encode() not in kernel.cubin:
                faults.append(f"{key}: entry={kernel.entry} is not in the machine code")
    sources = store.sources.values()
    faults += [source for source in sources if source != f"prebuilt for {arch}"]
    return len(store.sources), faults, first_ms


def main() -> int:
    """Print the report as JSON."""
    faults: list[str] = []
    kernels: dict[str, int] = {}
    first_ms = 0.0
    if importlib.util.find_spec("cutlass") is not None:
        faults.append("the CuTe DSL is here: nothing that follows shows anything")
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        for arch in sys.argv[1:]:
            kernels[arch], more, this_ms = ask(arch, cache)
            faults += more
            first_ms = first_ms or this_ms
        if cache.exists():
            faults.append("something was written to the compile cache")
    package = Path(pcie_comm.__file__)
    size = sum(path.stat().st_size for path in package.parent.rglob("*") if path.is_file())
    report = {
        "package": str(package),
        "version": pcie_comm.__version__,
        "kernels": kernels,
        "faults": faults,
        "first_kernel_ms": round(first_ms, 2),
        "installed_nbytes": size,
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

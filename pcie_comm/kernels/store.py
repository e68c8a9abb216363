"""Where a kernel comes from: a folder that the user names, the wheel, the cache, or the compiler.

They differ in what a stale or damaged kernel means. In the user's folder it is an error: that
folder was asked for. In the wheel it is passed over, and `sources` says so: whoever edits a kernel
in a tree that has prebuilt ones wants the edited one. In the cache it is built again.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..archs import native_arch, runs_on
from ..errors import CompileError
from . import compile as compiler
from .collective import Collective, KernelKey
from .compile import CompiledKernel, fingerprint

PREBUILT_DIR = Path(__file__).parent / "prebuilt"
"""The kernels in the wheel, which `make wheel` compiles; not there in an install from source."""


def candidates(folder: Path, key: KernelKey, capability: tuple[int, int]) -> list[str]:
    """Return the architectures in `folder` that run on the device, best first."""
    found = [path.name[len(f"{key}.") : -len(".json")] for path in folder.glob(f"{key}.sm_*.json")]
    fitting = [arch for arch in found if runs_on(arch, capability)]
    return sorted(fitting, key=lambda arch: (int(re.sub(r"\D", "", arch)), arch), reverse=True)


def staleness(kernel: CompiledKernel, collective: Collective) -> str:
    """Return why a kernel is stale, or an empty string."""
    here = fingerprint(collective)
    if kernel.fingerprint == here:
        return ""
    return f"built from other sources (built={kernel.fingerprint[:12]}, here={here[:12]})"


class KernelStore:
    """Finds kernels: the user's folder, then the wheel, then the cache, then the compiler.

    Args:
        kernels_dir: Folder of ahead-of-time builds, or None.
        cache_dir: Root of the compile cache; an unusable one only costs time.

    Attributes:
        sources: Per kernel, where it came from, and which prebuilt ones were passed over.
    """

    def __init__(self, kernels_dir: Path | None, cache_dir: Path) -> None:
        self.kernels_dir = kernels_dir
        self.cache_dir = cache_dir
        self.sources: dict[str, str] = {}

    def get(
        self, collective: Collective, key: KernelKey, capability: tuple[int, int]
    ) -> CompiledKernel:
        """Return a kernel that runs on a device of compute capability `capability`.

        Raises:
            CompileError: It is stale or damaged in the user's folder, or cannot be compiled.
        """
        kernel = self._ahead_of_time(collective, key, capability)
        if kernel is not None:
            self.sources[str(key)] = f"ahead of time, {self.kernels_dir}"
            return kernel
        kernel, remarks = _prebuilt(collective, key, capability)
        if kernel is not None:
            self.sources[str(key)] = "; ".join([f"prebuilt for {kernel.arch}", *remarks])
            return kernel
        try:
            kernel, source = self._cached_or_built(collective, key, capability)
        except CompileError as error:
            error.args = ("; ".join([*map(str, error.args), *remarks]),)
            raise
        self.sources[str(key)] = "; ".join([source, *remarks])
        return kernel

    def _ahead_of_time(
        self, collective: Collective, key: KernelKey, capability: tuple[int, int]
    ) -> CompiledKernel | None:
        folder = self.kernels_dir
        if folder is None:
            return None
        for arch in candidates(folder, key, capability):
            kernel = compiler.read(folder, key, arch)
            if kernel is None:
                continue
            if stale := staleness(kernel, collective):
                raise CompileError(
                    f"kernel {key} in {folder} was {stale}; "
                    f"run `pcie-comm compile --arch {arch} --out {folder}` again",
                    op=key.op,
                )
            return kernel
        return None

    def _cached_or_built(
        self, collective: Collective, key: KernelKey, capability: tuple[int, int]
    ) -> tuple[CompiledKernel, str]:
        """Return a kernel and where it came from."""
        arch = native_arch(capability)
        version = compiler.dsl_version() or "none"
        folder = self.cache_dir / f"{version}-{fingerprint(collective)[:20]}"
        try:
            cached = compiler.read(folder, key, arch)
        except CompileError:
            cached = None
        if cached is not None:
            return cached, f"cache, {folder}"
        kernel = compiler.build(collective, key, arch)
        try:
            compiler.write(kernel, folder)
        except (OSError, ValueError) as error:  # ValueError: no path
            return kernel, f"compiled by this process; not cached ({error})"
        return kernel, "compiled by this process"


def _prebuilt(
    collective: Collective, key: KernelKey, capability: tuple[int, int]
) -> tuple[CompiledKernel | None, list[str]]:
    """Return the wheel's best kernel that is good, if any, and why better ones were passed over."""
    remarks = []
    for arch in candidates(PREBUILT_DIR, key, capability):
        try:
            kernel = compiler.read(PREBUILT_DIR, key, arch)
        except CompileError as error:
            remarks.append(f"prebuilt for {arch} passed over: damaged ({error.__cause__})")
            continue
        if kernel is None:
            continue
        if stale := staleness(kernel, collective):
            remarks.append(f"prebuilt for {arch} passed over: {stale}")
            continue
        return kernel, remarks
    return None, remarks

"""Kernels from source to cubin: CuTe DSL, one folder format for cache and ahead-of-time builds.

A kernel on disk is two files: `NAME.ARCH.CHECKSUM.cubin` and `NAME.ARCH.json` (entry point, block
size, checksum, source fingerprint, DSL version). Files are replaced atomically, so processes may
share a folder; a damaged entry of the cache is rebuilt, a damaged or stale one of an ahead-of-time
folder is an error. Nothing here needs a GPU; the DSL is imported only when something is compiled.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import CompileError
from .registry import Collective, KernelKey

DSL_PACKAGE = "nvidia-cutlass-dsl"


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one architecture.

    Attributes:
        key: Which kernel, as text.
        arch: For example `sm_90a`.
        entry: Name of the function in the cubin.
        block: Threads per block.
        fingerprint: Hash of the sources it was built from.
        dsl: Version of the DSL that built it.
        cubin: The machine code.
        ptx: The PTX, right after a build; empty for a kernel read from disk.
    """

    key: str
    arch: str
    entry: str
    block: int
    fingerprint: str
    dsl: str
    cubin: bytes
    ptx: str = ""


DEVICE_MODULES = (
    "all_gather",
    "dsl",
    "gather_kernels",
    "primitives",
    "protocol",
    "router_kernels",
    "tagged",
    "topk",
)
"""Modules of this package whose text shapes machine code; so do layout and router_spec."""


@functools.cache
def _package_sources() -> bytes:
    folder = Path(__file__).parent
    files = [folder / f"{name}.py" for name in (*DEVICE_MODULES, "router_spec")]
    return b"\0".join(file.read_bytes() for file in [*files, folder.parent / "layout.py"])


def fingerprint(collective: Collective) -> str:
    """Return a hash of all sources that shape the kernels of `collective`."""
    digest = hashlib.sha256(_package_sources())
    file = getattr(inspect.getmodule(type(collective)), "__file__", None)
    if file:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def dsl_version() -> str:
    """Return the version of the installed DSL, or an empty string."""
    try:
        return importlib.metadata.version(DSL_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


def build(collective: Collective, key: KernelKey, arch: str) -> CompiledKernel:
    """Compile one kernel.

    Args:
        collective: The plugin.
        key: One of its `variants()`.
        arch: Target, for example `sm_90a`.

    Raises:
        CompileError: The DSL is missing, or refuses the kernel.
    """
    try:
        from . import dsl
    except ImportError as error:
        raise CompileError(
            f"kernel {key} for {arch} is not built and the CuTe DSL is missing ({error}); "
            f"pip install '{DSL_PACKAGE}[cu13]', or point PCIE_COMM_KERNELS at a folder made by "
            "`pcie-comm compile`",
            op=key.op,
        ) from error
    try:
        cubin, ptx = dsl.compile_kernel(collective, key, arch)
    except Exception as error:
        raise CompileError(
            f"kernel {key} does not compile for {arch}: {type(error).__name__}: {error}", op=key.op
        ) from error
    entries = re.findall(r"\.visible \.entry (\w+)\(", ptx)
    if len(entries) != 1:
        raise CompileError(f"kernel {key} has entries={entries}, expected one", op=key.op)
    return CompiledKernel(
        key=str(key),
        arch=arch,
        entry=entries[0],
        block=collective.block,
        fingerprint=fingerprint(collective),
        dsl=dsl_version(),
        cubin=cubin,
        ptx=ptx,
    )


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old or the new content, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(0o644)  # what root builds, a service may read
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write(kernel: CompiledKernel, folder: Path) -> None:
    """Write a kernel to a folder, atomically: the code first, under a name of its own content."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {k: v for k, v in asdict(kernel).items() if k not in ("cubin", "ptx")}
    meta["sha256"] = hashlib.sha256(kernel.cubin).hexdigest()
    stem = f"{kernel.key}.{kernel.arch}"
    _replace(folder / f"{stem}.{meta['sha256'][:12]}.cubin", kernel.cubin)
    _replace(folder / f"{stem}.json", json.dumps(meta, indent=1, sort_keys=True).encode())


def read(folder: Path, key: KernelKey, arch: str) -> CompiledKernel | None:
    """Return a kernel from a folder, or None if the folder does not have it.

    Raises:
        CompileError: The files are damaged.
    """
    meta_file = folder / f"{key}.{arch}.json"
    if not meta_file.exists():
        return None
    try:
        meta = json.loads(meta_file.read_bytes())
        checksum = meta.pop("sha256")
        cubin = (folder / f"{key}.{arch}.{checksum[:12]}.cubin").read_bytes()
        if hashlib.sha256(cubin).hexdigest() != checksum:
            raise ValueError("checksum differs")
        return CompiledKernel(cubin=cubin, **meta)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CompileError(
            f"kernel file {meta_file} is damaged ({error}); delete it and build it again",
            op=key.op,
        ) from error


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Tell whether machine code for `arch` runs on a device of compute capability `capability`."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if match is None:
        return False
    major, minor = int(match[1]), int(match[2])
    if match[3] == "a":
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


def native_arch(capability: tuple[int, int]) -> str:
    """Return the target to compile for on a device: with its own instructions from Hopper on."""
    suffix = "a" if capability[0] >= 9 else ""
    return f"sm_{capability[0]}{capability[1]}{suffix}"


def candidates(folder: Path, key: KernelKey, capability: tuple[int, int]) -> list[str]:
    """Return the architectures in `folder` that run on the device, best first."""
    found = [path.name[len(f"{key}.") : -len(".json")] for path in folder.glob(f"{key}.sm_*.json")]
    fitting = [arch for arch in found if runs_on(arch, capability)]
    return sorted(fitting, key=lambda arch: (int(re.sub(r"\D", "", arch)), arch), reverse=True)


class KernelStore:
    """Finds kernels: ahead-of-time folder, then cache, then the compiler.

    Args:
        kernels_dir: Folder of ahead-of-time builds, or None.
        cache_dir: Root of the compile cache; an unusable one only costs time.
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
            CompileError: It is stale, damaged or cannot be compiled.
        """
        if self.kernels_dir is not None:
            kernel = self._ahead_of_time(collective, key, capability)
            if kernel is not None:
                self.sources[str(key)] = f"ahead of time, {self.kernels_dir}"
                return kernel
        arch = native_arch(capability)
        folder = self.cache_dir / f"{dsl_version() or 'none'}-{fingerprint(collective)[:20]}"
        try:
            cached = read(folder, key, arch)
        except CompileError:
            cached = None
        if cached is not None:
            self.sources[str(key)] = f"cache, {folder}"
            return cached
        kernel = build(collective, key, arch)
        self.sources[str(key)] = "compiled by this process"
        try:
            write(kernel, folder)
        except OSError as error:
            self.sources[str(key)] += f"; not cached ({error})"
        return kernel

    def _ahead_of_time(
        self, collective: Collective, key: KernelKey, capability: tuple[int, int]
    ) -> CompiledKernel | None:
        folder = self.kernels_dir
        assert folder is not None
        for arch in candidates(folder, key, capability):
            kernel = read(folder, key, arch)
            if kernel is None:
                continue
            if kernel.fingerprint != fingerprint(collective):
                raise CompileError(
                    f"kernel {key} in {folder} was built from other sources "
                    f"(built={kernel.fingerprint[:12]}, here={fingerprint(collective)[:12]}); "
                    f"run `pcie-comm compile --arch {arch} --out {folder}` again",
                    op=key.op,
                )
            return kernel
        return None

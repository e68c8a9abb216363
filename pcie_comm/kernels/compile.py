"""Kernels from source to cubin: CuTe DSL, and one folder format for all that is kept of them.

A kernel on disk is two files: `NAME.ARCH.CHECKSUM.cubin` and `NAME.ARCH.json` (entry point, block
size, checksum, source fingerprint, DSL version). Files are replaced atomically, so processes may
share a folder. Nothing here needs a GPU; the DSL is imported only when something is compiled.
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
from .collective import Collective, KernelKey, title

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
    "argmax_kernels",
    "dsl",
    "dtypes",
    "fused_kernels",
    "fused_launch",
    "gather_kernels",
    "lse_kernels",
    "norm_kernels",
    "primitives",
    "protocol",
    "reduce",
    "reduce_kernels",
    "router_kernels",
    "router_rows",
    "row_kernels",
    "scalars",
    "uneven_columns",
    "tagged",
    "topk",
    "waits",
)
"""Modules of this package whose text shapes machine code; so do layout and router_spec."""


@functools.cache
def _package_sources() -> bytes:
    folder = Path(__file__).parent
    files = [folder / f"{name}.py" for name in (*DEVICE_MODULES, "router_spec")]
    return b"\0".join(file.read_bytes() for file in [*files, folder.parent / "layout.py"])


def fingerprint(collective: Collective) -> str:
    """Return a hash of all sources that shape the kernels of `collective`.

    Raises:
        CompileError: One of them cannot be read.
    """
    digest = hashlib.sha256(_package_sources())
    file = getattr(inspect.getmodule(type(collective)), "__file__", None)
    try:
        for source in (*([file] if file else []), *collective.device_sources):
            digest.update(Path(source).read_bytes())
    except (OSError, TypeError) as error:
        raise CompileError(
            f"{title(collective)} has device code that cannot be read ({error}); "
            "see its device_sources",
            op=collective.name,
        ) from error
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
            f"`pcie-comm compile{' --stats' if key.stats else ''}`",
            op=key.op,
        ) from error
    try:
        cubin, ptx = dsl.compile_kernel(collective, key, arch)
    except Exception as error:
        raise CompileError(
            f"kernel {key} does not compile for {arch}: {type(error).__name__}: {error}; "
            f"it is of {title(collective)}",
            op=key.op,
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


def file_names(kernel: CompiledKernel) -> tuple[str, str]:
    """Return the names of the two files that hold a kernel: code, description."""
    stem = f"{kernel.key}.{kernel.arch}"
    return f"{stem}.{hashlib.sha256(kernel.cubin).hexdigest()[:12]}.cubin", f"{stem}.json"


def write(kernel: CompiledKernel, folder: Path) -> None:
    """Write a kernel to a folder, atomically: the code first, under a name of its own content."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {k: v for k, v in asdict(kernel).items() if k not in ("cubin", "ptx")}
    meta["sha256"] = hashlib.sha256(kernel.cubin).hexdigest()
    code, description = file_names(kernel)
    _replace(folder / code, kernel.cubin)
    _replace(folder / description, json.dumps(meta, indent=1, sort_keys=True).encode())


def read(folder: Path, key: KernelKey, arch: str) -> CompiledKernel | None:
    """Return a kernel from a folder, or None if the folder does not have it.

    Raises:
        CompileError: The files are damaged.
    """
    meta_file = folder / f"{key}.{arch}.json"
    try:
        if not meta_file.exists():
            return None
        meta = json.loads(meta_file.read_bytes())
        checksum = meta.pop("sha256")
        cubin = (folder / f"{key}.{arch}.{checksum[:12]}.cubin").read_bytes()
        if hashlib.sha256(cubin).hexdigest() != checksum:
            raise ValueError("checksum differs")
        kernel = CompiledKernel(cubin=cubin, **meta)
        if (kernel.key, kernel.arch) != (str(key), arch):
            raise ValueError(f"it describes {kernel.key} for {kernel.arch}")
        if type(kernel.block) is not int:
            raise TypeError(f"block={kernel.block!r}")
        return kernel
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CompileError(
            f"kernel file {meta_file} is damaged ({error}); delete it and build it again",
            op=key.op,
        ) from error

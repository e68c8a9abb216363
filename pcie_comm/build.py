"""Ahead-of-time builds: every kernel of every collective, for architectures of one's choice.

The DSL compiles one kernel at a time per process, so a build spreads over worker processes. The
folder it writes is what `PCIE_COMM_KERNELS` names.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import driver
from .archs import native_arch as arch_of
from .bench.floors import FLOORS
from .calls import fused_collective, router_collective
from .errors import CommError, CompileError, InvalidArgumentError, UnsupportedError
from .kernels import compile as compiler
from .kernels import cubin
from .kernels.collective import Collective, KernelKey
from .kernels.plan_checks import variants_of
from .kernels.registry import collectives, find
from .kernels.router_presets import PRESETS
from .kernels.router_spec import RouterSpec
from .probe.kernels import PROBES

MAX_WORKERS = 4

WHEEL_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
"""What a wheel holds kernels for. Code for sm_86 also runs on 8.7; that for an `a` on no other."""


@dataclass(frozen=True)
class Job:
    """One kernel to build for one architecture.

    Attributes:
        collective: The plugin, if it is not the one that is registered under the key's op.
    """

    key: KernelKey
    arch: str
    collective: Collective | None = field(default=None, compare=False, repr=False)

    def plugin(self) -> Collective:
        """Return the plugin that has the kernel."""
        return self.collective or _plugin(self.key.op)


@dataclass(frozen=True)
class Built:
    """One kernel that was built and written.

    Attributes:
        nbytes: Size of the cubin.
        sass_nbytes: Size of the machine instructions in it.
        registers: Per thread.
        elapsed_s: Wall time of its compilation.
    """

    job: Job
    nbytes: int
    sass_nbytes: int
    registers: int
    elapsed_s: float


def default_workers() -> int:
    """Return how many worker processes a build uses unless it is told."""
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)))


def known_archs() -> list[str]:
    """Return the architectures that the installed DSL can build for.

    Raises:
        CompileError: There is no DSL.
    """
    try:
        from cutlass.base_dsl.enums import Arch
    except ImportError as error:
        raise CompileError(
            f"the CuTe DSL, which compiles the kernels, cannot be imported ({error}); "
            f"pip install '{compiler.DSL_PACKAGE}[cu13]'"
        ) from error
    return [arch.name for arch in Arch]


def resolve_archs(names: Sequence[str]) -> list[str]:
    """Return the architectures that `names` mean, each once; `native` is this machine's GPU.

    Raises:
        InvalidArgumentError: There are none, or the DSL does not know one of them.
        UnsupportedError: `native` without a GPU.
        CompileError: There is no DSL.
    """
    if not names:
        raise InvalidArgumentError("arch=() names none; give --arch sm_90a, for example, or --all")
    known = known_archs()
    archs = [native_arch() if name == "native" else name for name in dict.fromkeys(names)]
    for arch in archs:
        if arch not in known:
            raise InvalidArgumentError(
                f"arch={arch!r} is unknown to the DSL {compiler.dsl_version()}; "
                f"choose from native, {', '.join(known)}"
            )
    return list(dict.fromkeys(archs))


def native_arch() -> str:
    """Return the architecture of this process's first GPU.

    Raises:
        UnsupportedError: There is none.
    """
    try:
        missing = "" if driver.device_count() else "this process sees no CUDA device"
    except CommError as error:
        missing = getattr(error, "reason", str(error))
    if missing:
        raise UnsupportedError(
            f"arch='native' needs a GPU ({missing}); name an arch such as sm_90a", reason=missing
        )
    major, minor = (
        driver.call("cuDeviceGetAttribute", attribute, driver.call("cuDeviceGet", 0))
        for attribute in _capability_attributes()
    )
    return arch_of((int(major), int(minor)))


def _capability_attributes() -> tuple[object, object]:
    attributes = driver.bindings().CUdevice_attribute
    prefix = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY"
    return getattr(attributes, f"{prefix}_MAJOR"), getattr(attributes, f"{prefix}_MINOR")


def jobs(
    archs: Sequence[str],
    ops: Sequence[str] = (),
    *,
    floors: bool = False,
    probes: bool = False,
    routers: Sequence[RouterSpec] = (),
    tensors: int = 1,
    stats: bool = False,
) -> list[Job]:
    """Return a job per architecture and variant of the collectives `ops`; none named: of all.

    Args:
        archs: Architectures.
        ops: Names of collectives; what they are made of is added.
        floors: Also the kernels that only the benchmark runs.
        probes: Also those that only the topology tool runs.
        routers: Also those of these routers, fused and stand-alone.
        tensors: Also those for up to so many tensors, of collectives that take any number.
        stats: Also those that count, which run with `Config.stats`.

    Raises:
        InvalidArgumentError: An op is unknown.
    """
    wanted_ops = [one for op in ops for one in (op, *_plugin(op).made_of)]
    chosen = [_plugin(op) for op in dict.fromkeys(wanted_ops)] or list(collectives().values())
    counting = [one for one in chosen if stats and one.communicates]
    for wanted, others in ((floors, FLOORS), (probes, PROBES)):
        chosen += [one for name, one in others.items() if wanted and name not in ops]
    keys: list[tuple[KernelKey, Collective | None]] = [
        (key, None) for collective in chosen for key in variants_of(collective)
    ]
    families = [one for plugin in chosen for one in plugin.family() if one.num_inputs <= tensors]
    members = [one for one in families if one not in chosen]
    members += [make(spec) for spec in routers for make in (router_collective, fused_collective)]
    keys += [(key, member) for member in members for key in variants_of(member)]
    keys += [
        (replace(key, stats=True), None if member in chosen else member)
        for member in [*counting, *(members if stats else [])]
        if member.communicates
        for key in variants_of(member)
    ]
    found = [Job(key, arch, member) for arch in archs for key, member in keys]
    return list(dict.fromkeys(found))  # routers of several models may be one


def _plugin(op: str) -> Collective:
    """Return a collective by its name, those of the benchmark and the probes included."""
    return FLOORS.get(op) or PROBES.get(op) or find(op)


def resolve_routers(names: Sequence[str]) -> list[RouterSpec]:
    """Return the routers of the models `names`; `all` is every model that is known.

    Raises:
        InvalidArgumentError: A model is unknown.
    """
    specs: list[RouterSpec] = []
    for name in names:
        if name != "all" and name not in PRESETS:
            raise InvalidArgumentError(
                f"router={name!r} is unknown; choose from all, {', '.join(PRESETS)}"
            )
        specs += PRESETS.values() if name == "all" else [PRESETS[name]]
    return list(dict.fromkeys(specs))


def own_jobs(archs: Sequence[str]) -> list[Job]:
    """Return the jobs for the collectives of this package that are registered: what a wheel holds.

    Not among them: the collectives of other packages, and gathers of several tensors in a launch.
    """
    own = [op for op, one in collectives().items() if type(one).__module__.startswith("pcie_comm.")]
    return [job for job in jobs(archs, own) if job.collective is None]


def build_all(
    todo: Sequence[Job], folder: Path, workers: int, on_built: Callable[[Built], None]
) -> list[Built]:
    """Build every job and write it to `folder`.

    Args:
        todo: The jobs.
        folder: Made if need be; kernels of the same name are replaced, atomically.
        workers: Processes; 1 builds in this one.
        on_built: Called here after every kernel.

    Raises:
        CompileError: A kernel does not build or cannot be written; those built so far are there.
        InvalidArgumentError: The folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"out={folder} is no folder to write to ({error})") from error
    done: list[Built] = []
    with contextlib.closing(_outcomes(todo, folder, min(workers, len(todo)))) as outcomes:
        try:
            for outcome in outcomes:
                if isinstance(outcome, str):
                    raise CompileError(outcome)
                done.append(outcome)
                on_built(outcome)
        except BrokenProcessPool as error:
            raise CompileError(
                f"a worker process died after {len(done)} of {len(todo)} kernels; "
                "for want of memory? Try --jobs 1"
            ) from error
    return done


def _outcomes(
    todo: Sequence[Job], folder: Path, workers: int
) -> Generator[Built | str, None, None]:
    """Yield what became of each job, as they finish. Closing it drops those not yet begun."""
    if workers <= 1:
        for job in todo:
            yield build(job, folder)
        return
    context = multiprocessing.get_context("spawn")  # no copy of a DSL that is at work
    with ProcessPoolExecutor(workers, context) as pool:
        try:
            for future in as_completed([pool.submit(build, job, folder) for job in todo]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def build(job: Job, folder: Path) -> Built | str:
    """Build and write one kernel; an error is returned as text, which any process can pass on."""
    started = time.perf_counter()
    try:
        kernel = compiler.build(job.plugin(), job.key, job.arch)
        compiler.write(kernel, folder)
    except (CompileError, InvalidArgumentError) as error:
        return str(error)
    except OSError as error:
        return f"kernel {job.key} for {job.arch} cannot be written to {folder} ({error})"
    elapsed_s = time.perf_counter() - started
    code = kernel.cubin
    sizes = len(code), cubin.sass_nbytes(code), cubin.max_registers(code)
    return Built(job, *sizes, elapsed_s)

"""Rules about packages, the driver and kernels."""

from __future__ import annotations

from collections.abc import Mapping

from ..archs import native_arch, runs_on
from ..topology.doctor.finding import ERROR, INFO, WARNING, Finding
from .facts import MISSING, Installation
from .packages import fits, numbers, wanted

Outcome = list[Finding] | str

HERE = "this installation"
REQUIREMENTS = "pyproject.toml, dependencies"
COMPATIBILITY = "NVIDIA CUDA Compatibility, Minor Version Compatibility, v590"
DRIVERS = {13: "580", 12: "525"}
"""Oldest driver that serves a major version of CUDA."""


def versions(facts: Installation) -> Outcome:
    """Say what is installed: the first thing that a report of a fault needs."""
    named = {
        "pcie_comm": facts.package,
        "Python": facts.python,
        "torch": facts.torch,
        "CUDA of torch": facts.torch_cuda,
        "cuda-bindings": facts.bindings,
        "CuTe DSL": facts.dsl,
        "driver": facts.driver,
        "CUDA of the driver": facts.library,
        "toolkit": facts.toolkit,
    }
    words = {None: "unknown", MISSING: "none"}
    listed = [f"{name} {words.get(value, value)}" for name, value in named.items()]
    return [
        Finding(
            id="versions",
            severity=INFO,
            subject=HERE,
            evidence="metadata of installed packages, torch/version.py, libcuda, /proc and /sys",
            expected=f"{wanted('torch')}; {wanted('cuda-python')}; no toolkit is needed",
            seen=", ".join(listed),
            remedy="nothing; add this line to a report of a fault",
            source=REQUIREMENTS,
        )
    ]


def torch(facts: Installation) -> Outcome:
    """Everything but `topo`, `doctor` and `advise` needs torch."""
    if facts.torch is None:
        return facts.why("torch")
    if facts.torch and fits("torch", facts.torch):
        return []
    return [
        Finding(
            id="torch",
            severity=ERROR,
            subject=HERE,
            evidence=f"version={facts.torch or None}, from package metadata",
            expected=wanted("torch"),
            seen=facts.torch or "not installed",
            remedy=f"pip install '{wanted('torch')}'",
            source=REQUIREMENTS,
        )
    ]


def torch_build(facts: Installation) -> Outcome:
    """A CPU build of torch cannot use the GPUs that are there."""
    if facts.torch == MISSING:
        return []
    if facts.gpus is None or facts.torch_cuda is None:
        return facts.why("gpus") or facts.why("torch_cuda")
    if not facts.gpus or facts.torch_cuda:
        return []
    return [
        Finding(
            id="torch-build",
            severity=ERROR,
            subject=HERE,
            evidence=f"torch {facts.torch} has cuda=None in its version.py; gpus={facts.gpus}",
            expected="a CUDA build of torch on a host with GPUs",
            seen="a CPU build",
            remedy="install a CUDA build of torch, as pytorch.org/get-started says",
            source=REQUIREMENTS,
        )
    ]


def bindings(facts: Installation) -> Outcome:
    """Kernels are loaded and launched through cuda-python."""
    if facts.gpus is None or facts.bindings is None:
        return facts.why("gpus") or facts.why("bindings")
    if not facts.gpus or (facts.bindings and fits("cuda-python", facts.bindings)):
        return []
    return [
        Finding(
            id="cuda-bindings",
            severity=ERROR,
            subject=HERE,
            evidence=f"version={facts.bindings or None}, from package metadata",
            expected=wanted("cuda-python"),
            seen=facts.bindings or "not installed",
            remedy=f"pip install '{wanted('cuda-python')}'",
            source=REQUIREMENTS,
        )
    ]


def driver(facts: Installation) -> Outcome:
    """CUDA must start where there are GPUs."""
    if facts.library is None:
        return facts.why("library")
    if facts.library == MISSING:
        if facts.gpus is None:
            return facts.why("gpus")
        seen, remedy = "libcuda.so.1 does not load", "install NVIDIA's driver"
        if facts.driver:
            remedy = "start the container with --gpus all, which brings libcuda along"
    elif facts.start is None:
        return facts.why("start")
    else:
        seen = facts.start
        remedy = "see that nvidia-smi works; unset CUDA_VISIBLE_DEVICES if it hides all GPUs"
    if not facts.gpus or not seen:
        return []
    return [
        Finding(
            id="driver",
            severity=ERROR,
            subject=HERE,
            evidence=f"gpus={facts.gpus} on the PCI bus, driver={facts.driver or None}",
            expected="libcuda loads and starts",
            seen=seen,
            remedy=remedy,
            source="CUDA Driver API, cuInit",
        )
    ]


def driver_version(facts: Installation) -> Outcome:
    """A driver serves the major version of CUDA that it was made for, and older ones."""
    if not facts.library:
        return facts.why("library") or []
    newest = numbers(facts.library)[0]
    needs = {"torch": facts.torch_cuda, "cuda-bindings": facts.bindings}
    newer = {
        name: version for name, version in needs.items() if version and numbers(version)[0] > newest
    }
    if not newer:
        return []
    major = max(numbers(version)[0] for version in newer.values())
    least = DRIVERS.get(major)
    return [
        Finding(
            id="driver-version",
            severity=ERROR if "torch" in newer else WARNING,
            subject=HERE,
            evidence=f"libcuda serves CUDA {facts.library}; made for newer ones: {newer}",
            expected=f"a driver for CUDA {major}" + (f", {least} or newer" if least else ""),
            seen=f"driver={facts.driver or 'unknown'}",
            remedy=f"update the driver, or install what is made for CUDA {newest}",
            source=COMPATIBILITY,
        )
    ]


def dsl(facts: Installation) -> Outcome:
    """The compiler may be missing where kernels are prebuilt, but an untested one is a risk."""
    if facts.dsl is None:
        return facts.why("dsl")
    name = "nvidia-cutlass-dsl"
    if not facts.dsl or fits(name, facts.dsl):
        return []
    return [
        Finding(
            id="dsl",
            severity=WARNING,
            subject=HERE,
            evidence=f"version={facts.dsl}, from package metadata",
            expected=wanted(name),
            seen=facts.dsl,
            remedy=f"pip install '{name}[cu13]{wanted(name).removeprefix(name)}'",
            source=REQUIREMENTS,
        )
    ]


def _holding(counts: Mapping[str, int], capability: tuple[int, int]) -> list[str]:
    """Return the architectures with a full set of kernels that run on a GPU."""
    full = max(counts.values(), default=0)
    return [arch for arch, n in counts.items() if runs_on(arch, capability) and n == full]


def kernels(facts: Installation) -> Outcome:
    """Every GPU needs kernels that are built, or a compiler."""
    if facts.gpus == 0:
        return []
    for name in ("capabilities", "prebuilt", "own_kernels"):
        if getattr(facts, name) is None:
            return facts.why(name)
    prebuilt, own = facts.prebuilt or {}, facts.own_kernels or {}
    bare = sorted(
        capability
        for capability in set(facts.capabilities or ())
        if not _holding(prebuilt, capability) and not _holding(own, capability)
    )
    if not bare:
        return []
    archs = [native_arch(capability) for capability in bare]
    build = f"pcie-comm compile {' '.join(f'--arch {arch}' for arch in archs)} --out kernels"
    remedy = f"nothing, or ahead of time: {build}, then PCIE_COMM_KERNELS=kernels"
    if not facts.dsl:
        remedy = f"pip install 'nvidia-cutlass-dsl[cu13]', or on another machine: {build}"
    return [
        Finding(
            id="kernels",
            severity=INFO if facts.dsl else ERROR,
            subject=", ".join(archs),
            evidence=f"prebuilt={dict(prebuilt)}, PCIE_COMM_KERNELS={dict(own)}",
            expected="all kernels built for every GPU, or the CuTe DSL to build them",
            seen=f"CuTe DSL {facts.dsl} builds them at first use" if facts.dsl else "neither",
            remedy=remedy,
            source="docs/concepts.md, where kernels come from",
        )
    ]

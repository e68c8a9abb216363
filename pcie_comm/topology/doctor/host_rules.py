"""Rules about the host as a whole, and about GPUs one by one."""

from __future__ import annotations

from ..identity import VISIBLE
from ..labels import labels
from ..model import ROOT_COMPLEX, Gpu
from .finding import ERROR, INFO, WARNING, Case, Finding, Outcome

MOST_PEERS = 8
SMALL_BAR_NBYTES = 256 << 20
NCCL_TROUBLES = "NCCL documentation, Troubleshooting, GPU Direct"
CUDA_GUIDE = "CUDA Programming Guide, Peer-to-Peer Memory Access"
MIG_GUIDE = "NVIDIA Multi-Instance GPU User Guide, Application Considerations"


def _gpus(case: Case) -> tuple[Gpu, ...] | str:
    host = case.host
    return host.why("gpus") if host.gpus is None else host.gpus


def _all_unknown(gpus: tuple[Gpu, ...], name: str) -> str:
    """Return why a field is known of no GPU, nothing if it is known of one."""
    reasons = [gpu.why(name) for gpu in gpus]
    return reasons[0] if reasons and all(reasons) else ""


def mig(case: Case) -> Outcome:
    """MIG instances have no peer access."""
    gpus = _gpus(case)
    if isinstance(gpus, str):
        return gpus
    if reason := _all_unknown(gpus, "mig"):
        return [] if "no such mode" in reason else reason
    return [
        Finding(
            id="mig",
            severity=ERROR,
            subject=gpu.name,
            evidence="mig=on, from NVML",
            expected="MIG off on every GPU of a group",
            seen=f"on, with {len(gpu.mig_uuids or ())} instances",
            remedy="leave the GPU out, or have an administrator switch MIG off",
            source=MIG_GUIDE,
        )
        for gpu in gpus
        if gpu.mig
    ]


def small_bar(case: Case) -> Outcome:
    """Peers address a GPU's memory through BAR1."""
    gpus = _gpus(case)
    if isinstance(gpus, str):
        return gpus
    if reason := _all_unknown(gpus, "bar1_nbytes"):
        return reason
    found = []
    for gpu in gpus:
        size, memory = gpu.bar1_nbytes, gpu.memory_nbytes
        if size is None or size >= (memory or SMALL_BAR_NBYTES + 1):
            continue
        found.append(
            Finding(
                id="small-bar",
                severity=WARNING,
                subject=gpu.name,
                evidence=f"bar1_nbytes={size}, memory_nbytes={memory}",
                expected="a BAR1 that holds all of the GPU's memory",
                seen=f"{size >> 20} MiB",
                remedy="switch on Resizable BAR and Above 4G Decoding in the firmware",
                source="NVIDIA GPUDirect RDMA documentation, BAR sizes",
            )
        )
    return found


def display(case: Case) -> Outcome:
    """A GPU that draws a screen runs kernels late."""
    gpus = _gpus(case)
    if isinstance(gpus, str):
        return gpus
    if reason := _all_unknown(gpus, "display"):
        return reason
    return [
        Finding(
            id="display",
            severity=WARNING,
            subject=gpu.name,
            evidence="display=active, from NVML",
            expected="no display on a GPU of a group",
            seen="a display is active",
            remedy="move the display to another adapter, or leave this GPU out",
            source="NVML, nvmlDeviceGetDisplayActive",
        )
        for gpu in gpus
        if gpu.display
    ]


def ordinals(case: Case) -> Outcome:
    """CUDA ordinals that are not NVML indices send users to the wrong GPU."""
    gpus = _gpus(case)
    if isinstance(gpus, str):
        return gpus
    if reason := _all_unknown(gpus, "ordinal"):
        return reason
    mixed = [
        gpu
        for gpu in gpus
        if gpu.ordinal is not None and gpu.nvml_index is not None and gpu.ordinal != gpu.nvml_index
    ]
    if not mixed:
        return []
    return [
        Finding(
            id="ordinal-mix",
            severity=WARNING,
            subject=", ".join(gpu.name for gpu in mixed),
            evidence=f"environment={dict(case.host.system.environment or {})}",
            expected="the same number in CUDA and in nvidia-smi",
            seen=", ".join(f"cuda:{gpu.ordinal} is nvidia-smi's {gpu.nvml_index}" for gpu in mixed),
            remedy=f"name GPUs by UUID in {VISIBLE}; `pcie-comm advise` prints the line",
            source="CUDA Programming Guide, CUDA Environment Variables",
        )
    ]


def peers(case: Case) -> Outcome:
    """CUDA serves eight peers of a device on hosts without NVSwitch."""
    gpus = _gpus(case)
    if isinstance(gpus, str):
        return gpus
    if len(gpus) <= MOST_PEERS + 1:
        return []
    return [
        Finding(
            id="many-peers",
            severity=WARNING,
            subject="host",
            evidence=f"{len(gpus)} GPUs",
            expected=f"at most {MOST_PEERS} peers of a GPU in a group",
            seen=f"{len(gpus) - 1} peers",
            remedy=f"use groups of at most {MOST_PEERS + 1} GPUs, or the transport host_pinned",
            source=CUDA_GUIDE,
        )
    ]


def sockets(case: Case) -> Outcome:
    """Pairs on two NUMA nodes cross the link between processors."""
    gpus = _gpus(case)
    if isinstance(gpus, str):
        return gpus
    every = labels(case.host)
    if len(gpus) > 1 and all(
        label.best is None for (one, other), label in every.items() if one != other
    ):
        return "no label of a pair is known"
    across = [pair for pair, label in every.items() if label.best == "SYS"]
    if not across:
        return []
    return [
        Finding(
            id="dual-socket",
            severity=INFO,
            subject="host",
            evidence=f"{len(across) // 2} pairs are SYS, such as {across[0][0]}-{across[0][1]}",
            expected="a group within one NUMA node, if its GPUs suffice",
            seen="GPUs on several NUMA nodes",
            remedy="take the GPUs of `pcie-comm advise --gpus K`, or measure that it is no loss",
            source="legend of nvidia-smi topo -m",
        )
    ]


def iommu(case: Case) -> Outcome:
    """A translating IOMMU sends peer traffic through the root complex, or breaks it."""
    mode = case.host.system.iommu
    if mode is None:
        return case.host.system.why("iommu")
    if mode != "translated":
        return []
    return [
        Finding(
            id="iommu-translated",
            severity=WARNING,
            subject="host",
            evidence="iommu=translated, from the IOMMU groups of the GPUs",
            expected="off or passthrough on a host without virtual machines",
            seen="translated",
            remedy="have an administrator boot with iommu=pt, or switch the IOMMU off",
            source=NCCL_TROUBLES,
        )
    ]


def flat_tree(case: Case) -> Outcome:
    """In most virtual machines the tree shows nothing of the real one."""
    gpus = _gpus(case)
    if isinstance(gpus, str):
        return gpus
    host = case.host
    if host.system.virtual_machine is None:
        return host.system.why("virtual_machine")
    if host.system.virtual_machine == "none" or host.nodes is None or len(gpus) < 2:
        return []
    above = {gpu.name: host.path(gpu.address)[1:2] for gpu in gpus}
    flat = [name for name, nodes in above.items() if nodes and nodes[0].role == ROOT_COMPLEX]
    if len(flat) < len(gpus):
        return []
    return [
        Finding(
            id="flat-vm-tree",
            severity=WARNING,
            subject="host",
            evidence=f"virtual_machine={host.system.virtual_machine!r}, no GPU is below a bridge",
            expected="the tree of the real host",
            seen="every GPU directly on a root complex",
            remedy="do not trust labels here; measure, or use the provider's NCCL topology XML",
            source="legend of nvidia-smi topo -m, which needs the real tree",
        )
    ]


def missing_tree(case: Case) -> Outcome:
    """Without sysfs nothing can be derived."""
    host = case.host
    live = any(source.startswith("sysfs") for source in host.sources)
    if host.nodes is not None:
        return []
    if not live:
        return host.why("nodes")
    return [
        Finding(
            id="missing-sysfs",
            severity=ERROR,
            subject="host",
            evidence=host.why("nodes"),
            expected="/sys/bus/pci/devices",
            seen="nothing there",
            remedy="mount sysfs in the container (read-only is enough)",
            source="Linux, Documentation/ABI/testing/sysfs-bus-pci",
        )
    ]


def stale_advice(case: Case) -> Outcome:
    """Advice of another machine, or of this one before a change, misleads."""
    if case.advice is None:
        return "no advice file was given"
    changed = case.advice.changed_parts(case.host)
    if not changed:
        return []
    return [
        Finding(
            id="stale-advice",
            severity=ERROR,
            subject=case.advice.source,
            evidence=f"fingerprint differs in: {', '.join(changed)}",
            expected="the fingerprint of this machine",
            seen=f"changed: {', '.join(changed)}",
            remedy="write it again: `pcie-comm advise --out FILE`",
            source="docs/topology.md, fingerprint",
        )
    ]

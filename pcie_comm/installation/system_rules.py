"""Rules about what the system allows a process: shared memory, limits, namespaces."""

from __future__ import annotations

from ..layout import MAX_WORLD
from ..topology.doctor.finding import ERROR, INFO, WARNING, Finding
from .facts import HOST, UNLIMITED, Installation
from .software_rules import HERE, Outcome

FEW_FILES = 1024
"""Python, torch and CUDA open some hundred; each rank adds a few for each of its peers."""

DOCKER = "Docker documentation, docker container run"


def shm(facts: Installation) -> Outcome:
    """Ranks that are processes meet in /dev/shm, whatever their transport."""
    free = facts.shm_nbytes
    if free is None:
        return facts.why("shm_nbytes")
    if free >= 0:
        return []
    return [
        Finding(
            id="shm",
            severity=ERROR,
            subject="/dev/shm",
            evidence="not a folder that this process can write to",
            expected="a tmpfs that all ranks share",
            seen="none",
            remedy="mount a tmpfs there (docker run --ipc=host or --shm-size=1g)",
            source="docs/failure.md, limits",
        )
    ]


def shm_size(facts: Installation) -> Outcome:
    """Without peer access every rank keeps its slabs in /dev/shm."""
    free, slab = facts.shm_nbytes, facts.slab_nbytes
    if free is None or slab is None:
        return facts.why("shm_nbytes") or facts.why("slab_nbytes")
    ranks = min(max(2, facts.gpus or 0), MAX_WORLD)
    if free < 0 or free >= ranks * slab:
        return []
    return [
        Finding(
            id="shm-size",
            severity=WARNING,
            subject="/dev/shm",
            evidence=f"free_nbytes={free}, {slab} for each rank and channel",
            expected=f"{ranks * slab >> 20} MiB for {ranks} ranks with one channel",
            seen=f"{free >> 20} MiB",
            remedy="docker run --shm-size=1g or --ipc=host; or a smaller PCIE_COMM_SLOT_NBYTES",
            source="pcie_comm/layout.py, SlabLayout",
        )
    ]


def memlock(facts: Installation) -> Outcome:
    """CUDA pins memory without regard to this limit; RDMA, which others use, obeys it."""
    limit = facts.memlock_nbytes
    if limit is None or facts.slab_nbytes is None:
        return facts.why("memlock_nbytes") or facts.why("slab_nbytes")
    if limit == UNLIMITED or limit >= facts.slab_nbytes:
        return []
    return [
        Finding(
            id="memlock",
            severity=INFO,
            subject=HERE,
            evidence=f"RLIMIT_MEMLOCK={limit}, soft",
            expected="no limit where a process also uses RDMA (NCCL over InfiniBand)",
            seen=f"{limit >> 10} KiB",
            remedy="nothing for this package; else ulimit -l unlimited (--ulimit memlock=-1)",
            source="NVIDIA/open-gpu-kernel-modules, os-mlock.c: pins without asking for the limit",
        )
    ]


def open_files(facts: Installation) -> Outcome:
    """A process that runs out of files fails in odd places."""
    limit = facts.files
    if limit is None:
        return facts.why("files")
    if limit == UNLIMITED or limit >= FEW_FILES:
        return []
    return [
        Finding(
            id="nofile",
            severity=WARNING,
            subject=HERE,
            evidence=f"RLIMIT_NOFILE={limit}, soft",
            expected=f"at least {FEW_FILES}",
            seen=str(limit),
            remedy=f"ulimit -n {4 * FEW_FILES} (docker run --ulimit nofile={4 * FEW_FILES})",
            source="getrlimit(2)",
        )
    ]


def ipc_namespace(facts: Installation) -> Outcome:
    """Ranks in containers of their own do not see each other's shared memory."""
    if facts.ipc_namespace is None:
        return facts.why("ipc_namespace")
    if facts.ipc_namespace == HOST:
        return []
    return [
        Finding(
            id="ipc-namespace",
            severity=INFO,
            subject=HERE,
            evidence="/proc/self/ns/ipc is not the one that the host booted with",
            expected="one IPC namespace for all ranks",
            seen="a container's own",
            remedy="nothing if all ranks run in this container; else docker run --ipc=host",
            source=DOCKER,
        )
    ]


def pid_namespace(facts: Installation) -> Outcome:
    """Across PID namespaces exit codes of dead ranks stay unknown."""
    if facts.pid_namespace is None:
        return facts.why("pid_namespace")
    if facts.pid_namespace == HOST:
        return []
    return [
        Finding(
            id="pid-namespace",
            severity=INFO,
            subject=HERE,
            evidence="/proc/self/ns/pid is not the one that the host booted with",
            expected="one PID namespace for all ranks",
            seen="a container's own",
            remedy="nothing if all ranks run in this container; else docker run --pid=host",
            source="docs/failure.md, limits",
        )
    ]

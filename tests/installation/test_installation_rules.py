"""Each rule finds its fault, is silent where there is none, and says what it cannot judge."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from pcie_comm import build
from pcie_comm.installation import RULES, Installation, examine
from pcie_comm.installation.facts import MISSING, UNLIMITED
from pcie_comm.topology.model import ANY

SLAB = 17 << 20
GOOD = Installation(
    package="0.1.0",
    python="3.12.3",
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    bindings="13.4.4",
    dsl="4.8.1",
    toolkit=MISSING,
    gpus=4,
    driver="580.159.04",
    library="13.0",
    start=MISSING,
    capabilities=((12, 0),) * 4,
    prebuilt=dict.fromkeys(build.WHEEL_ARCHS, 34),
    own_kernels={},
    slab_nbytes=SLAB,
    shm_nbytes=64 * SLAB,
    memlock_nbytes=UNLIMITED,
    files=UNLIMITED,
    ipc_namespace="host",
    pid_namespace="host",
)
UNBUILT = {"prebuilt": {}}
CPU_ONLY = {"gpus": 0, "driver": MISSING, "library": MISSING, "torch_cuda": MISSING}


def found(**changes):
    findings, _ = examine(replace(GOOD, **changes))
    return {finding.id: finding for finding in findings if finding.id != "versions"}


# Rule, what is wrong, severity, a part of what was seen, a part of the remedy.
FAULTS = [
    ("torch", {"torch": MISSING}, "error", "not installed", "pip install 'torch>=2.6,<3'"),
    ("torch", {"torch": "2.5.1"}, "error", "2.5.1", "pip install"),
    ("torch", {"torch": "3.0.0"}, "error", "3.0.0", "pip install"),
    ("torch-build", {"torch_cuda": MISSING}, "error", "CPU build", "CUDA build"),
    ("cuda-bindings", {"bindings": MISSING}, "error", "not installed", "pip install 'cuda-python"),
    ("cuda-bindings", {"bindings": "12.8.0"}, "error", "12.8.0", "pip install 'cuda-python"),
    ("driver", {"library": MISSING, "driver": MISSING}, "error", "does not load", "install NVIDIA"),
    ("driver", {"library": MISSING}, "error", "does not load", "--gpus all"),
    ("driver", {"start": "CUDA_ERROR_NO_DEVICE"}, "error", "NO_DEVICE", "CUDA_VISIBLE_DEVICES"),
    ("driver-version", {"library": "12.8", "driver": "570.1"}, "error", "570.1", "update the driv"),
    ("dsl", {"dsl": "4.7.9"}, "warning", "4.7.9", "nvidia-cutlass-dsl[cu13]>=4.8,<5"),
    ("kernels", UNBUILT, "info", "at first use", "--arch sm_120a --out kernels"),
    ("kernels", {**UNBUILT, "dsl": MISSING}, "error", "neither", "pip install 'nvidia-cutlass-dsl"),
    ("kernels", {"capabilities": ((12, 1),), "dsl": MISSING}, "error", "neither", "--arch sm_121a"),
    ("kernels", {"prebuilt": {"sm_90a": 34, "sm_120a": 33}}, "info", "at first use", "compile"),
    ("shm", {"shm_nbytes": -1}, "error", "none", "--shm-size"),
    ("shm-size", {"shm_nbytes": 64 << 20}, "warning", "64 MiB", "--shm-size"),
    ("shm-size", {"shm_nbytes": 4 * SLAB - 1}, "warning", "67 MiB", "--ipc=host"),
    ("nofile", {"files": 256}, "warning", "256", "ulimit -n 4096"),
    ("memlock", {"memlock_nbytes": 65536}, "info", "64 KiB", "memlock=-1"),
    ("ipc-namespace", {"ipc_namespace": "private"}, "info", "container", "--ipc=host"),
    ("pid-namespace", {"pid_namespace": "private"}, "info", "container", "--pid=host"),
]


@pytest.mark.parametrize(("rule", "changes", "severity", "seen", "remedy"), FAULTS)
def test_a_fault_is_found(rule, changes, severity, seen, remedy):
    finding = found(**changes)[rule]
    assert finding.severity == severity
    assert seen in finding.seen
    assert remedy in finding.remedy
    assert "\n" not in finding.remedy
    assert all(vars(finding).values()), "every part of a finding says something"


def test_every_rule_but_the_list_of_versions_has_a_fault_above():
    assert {fault[0] for fault in FAULTS} == set(RULES) - {"versions"}


def test_a_good_installation_has_no_fault():
    findings, unjudged = examine(GOOD)
    assert [finding.id for finding in findings] == ["versions"]
    assert unjudged == []


def test_versions_are_listed():
    findings, _ = examine(replace(GOOD, dsl=MISSING, torch_cuda=None, unknown={ANY: "?"}))
    (listed,) = (finding for finding in findings if finding.id == "versions")
    for part in ("torch 2.13.0+cu130", "CuTe DSL none", "CUDA of torch unknown", "driver 580"):
        assert part in listed.seen


@pytest.mark.parametrize(
    "changes",
    [
        {**CPU_ONLY, "bindings": MISSING, "dsl": MISSING, "prebuilt": {}},  # no GPU, none needed
        {"dsl": MISSING},  # kernels are prebuilt
        {"prebuilt": {}, "own_kernels": {"sm_120a": 34}, "dsl": MISSING},  # or the user's
        {"capabilities": ((8, 7),)},  # sm_86 serves it
        {"library": "13.2"},  # newer than what torch was built for
        {"torch_cuda": "12.8", "bindings": "12.9.1"},  # older than the driver
        {"shm_nbytes": 4 * SLAB},
        {"files": 1024},
        {"memlock_nbytes": SLAB},
    ],
)
def test_what_is_enough_is_no_fault(changes):
    assert found(**changes) == {}


def test_bindings_alone_that_are_newer_than_the_driver_are_a_warning():
    finding = found(library="12.8", torch_cuda="12.8")["driver-version"]
    assert finding.severity == "warning"
    assert "580 or newer" in finding.expected


MAYBE_UNKNOWN = [item.name for item in fields(Installation) if item.default is None]


@pytest.mark.parametrize("name", MAYBE_UNKNOWN)
def test_unknown_is_unknown(name):
    """A fact that is not known makes no finding; a rule that lacks it says why."""
    findings, unjudged = examine(replace(GOOD, **{name: None}, unknown={ANY: f"no {name}"}))
    assert [finding.id for finding in findings] == ["versions"]
    assert {gap.reason for gap in unjudged} <= {f"no {name}"}
    if name not in ("driver", "toolkit"):  # only shown
        assert unjudged


def test_nothing_known_at_all_is_no_finding():
    blank = Installation(package="0.1.0", python="3.12", unknown={ANY: "nobody knows"})
    findings, unjudged = examine(blank)
    assert [finding.id for finding in findings] == ["versions"]
    assert len(unjudged) == len(RULES) - 1

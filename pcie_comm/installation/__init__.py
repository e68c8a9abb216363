"""Judges the installation: packages, driver, kernels, and what the system allows a process.

`pcie-comm doctor` adds these rules to those about the host. Nothing here imports torch, CUDA or the
DSL, so it works where they are missing. No CUDA context is created.
"""

from __future__ import annotations

from collections.abc import Callable

from ..topology.doctor import Finding, Unjudged
from ..topology.doctor.finding import SEVERITIES
from ..topology.model import Host
from . import software_rules, system_rules
from .facts import Installation
from .read import read

__all__ = ["RULES", "Installation", "add_to", "examine", "read"]

Rule = Callable[[Installation], list[Finding] | str]

RULES: dict[str, Rule] = {
    "torch": software_rules.torch,
    "torch-build": software_rules.torch_build,
    "cuda-bindings": software_rules.bindings,
    "driver": software_rules.driver,
    "driver-version": software_rules.driver_version,
    "dsl": software_rules.dsl,
    "kernels": software_rules.kernels,
    "shm": system_rules.shm,
    "shm-size": system_rules.shm_size,
    "nofile": system_rules.open_files,
    "memlock": system_rules.memlock,
    "ipc-namespace": system_rules.ipc_namespace,
    "pid-namespace": system_rules.pid_namespace,
    "versions": software_rules.versions,
}
"""By id; docs/versions.md lists them."""

Judgement = tuple[list[Finding], list[Unjudged]]


def examine(facts: Installation) -> Judgement:
    """Run every rule. Returns the findings, and the rules that cannot judge."""
    findings: list[Finding] = []
    unjudged: list[Unjudged] = []
    for name, rule in RULES.items():
        outcome = rule(facts)
        if isinstance(outcome, str):
            unjudged.append(Unjudged(name, outcome))
        else:
            findings.extend(outcome)
    return findings, unjudged


def add_to(judged: Judgement, host: Host) -> Judgement:
    """Return a judgement of this host together with one of this installation, the worst first."""
    findings, unjudged = judged
    more, gaps = examine(read(None if host.gpus is None else len(host.gpus)))
    both = sorted([*findings, *more], key=lambda finding: SEVERITIES.index(finding.severity))
    return both, [*unjudged, *gaps]

"""The doctor: rules that judge a host by what is known of it, and say what they cannot judge.

Faults that show only under load or in data are judged from a report that was verified or measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import figure_rules, host_rules, link_rules, load_rules, pair_rules
from .finding import ERROR, SEVERITIES, WARNING, Case, Finding, Rule, Unjudged

__all__ = ["RULES", "Case", "Finding", "Unjudged", "examine", "exit_code"]

RULES: dict[str, Rule] = {
    "missing-sysfs": host_rules.missing_tree,
    "mig": host_rules.mig,
    "one-way-pair": pair_rules.one_way,
    "data-fault": load_rules.data_fault,
    "false-access": load_rules.false_access,
    "stale-advice": host_rules.stale_advice,
    "link-errors": link_rules.link_errors,
    "no-access": pair_rules.no_access,
    "acs-redirect": link_rules.acs_redirect,
    "iommu-translated": host_rules.iommu,
    "narrow-link": link_rules.narrow_link,
    "low-ceiling": link_rules.low_ceiling,
    "small-bar": host_rules.small_bar,
    "display": host_rules.display,
    "slow-p2p": figure_rules.slow_p2p,
    "write-collapse": figure_rules.write_collapse,
    "slow-pair": figure_rules.slow_pair,
    "slow-link-under-load": load_rules.slow_link,
    "errors-under-load": load_rules.load_errors,
    "oversubscribed-uplink": load_rules.oversubscribed,
    "uplink-collapse": load_rules.uplink_collapse,
    "label-mismatch": pair_rules.label_mismatch,
    "label-numa-conflict": pair_rules.far_in_node,
    "rank-order": pair_rules.rank_order,
    "many-peers": host_rules.peers,
    "ordinal-mix": host_rules.ordinals,
    "flat-vm-tree": host_rules.flat_tree,
    "dual-socket": host_rules.sockets,
    "shared-uplink": link_rules.shared_uplink,
    "virtual-switch": link_rules.virtual_switch,
    "idle-link": link_rules.idle_link,
}
"""By id; docs/topology.md lists them."""


def examine(case: Case) -> tuple[list[Finding], list[Unjudged]]:
    """Run every rule. Returns the findings, the worst first, and the rules that cannot judge."""
    findings: list[Finding] = []
    unjudged: list[Unjudged] = []
    for name, rule in RULES.items():
        outcome = rule(case)
        if isinstance(outcome, str):
            unjudged.append(Unjudged(name, outcome))
        else:
            findings.extend(outcome)
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return findings, unjudged


def exit_code(findings: Sequence[Finding], strict: bool) -> int:
    """Return 1 if there is an error, or, if strict, a warning; else 0."""
    grave = (ERROR, WARNING) if strict else (ERROR,)
    return int(any(finding.severity in grave for finding in findings))

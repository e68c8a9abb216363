"""Each rule finds its fault on a host that has it, and is silent on one that has not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_host import (
    ACS_REDIRECT,
    FakeHost,
    FakeNvml,
    Gpu,
    Root,
    Switch,
    flat_machine,
    nested,
    pairs_of_switches,
    sixteen,
)
from topology_texts import ACS_LINES, P2P_TEST, TOPO_M

from pcie_comm.topology.advice import advise
from pcie_comm.topology.collect import collect, from_sysfs
from pcie_comm.topology.doctor import RULES, Case, examine, exit_code
from pcie_comm.topology.readers import read_text

HEALTHY = ("idle-link", "shared-uplink", "dual-socket")


def host_of(fake: FakeHost, tmp_path, **options):
    return collect(fake.write(tmp_path / "host"), FakeNvml(fake, **options))


def found(host, advice=None) -> dict[str, list]:
    findings, _ = examine(Case(host, advice))
    by_id: dict[str, list] = {}
    for finding in findings:
        by_id.setdefault(finding.id, []).append(finding)
    return by_id


def two(**facts) -> FakeHost:
    return FakeHost([Root([Switch([Gpu(), Gpu(**facts)])])])


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


FAULTS = {
    "mig": (lambda: two(mig=("MIG-1", "MIG-2")), "GPU1", "error"),
    "narrow-link": (lambda: two(width=8), "GPU1 0000:04:00.0", "warning"),
    "low-ceiling": (lambda: two(port_speed=8.0), "GPU1 0000:04:00.0", "warning"),
    "small-bar": (lambda: two(bar1=256 << 20), "GPU1", "warning"),
    "display": (lambda: two(display=True), "GPU1", "warning"),
    "link-errors": (lambda: two(correctable=5), "0000:04:00.0", "warning"),
    "idle-link": (two, "host", "info"),
    "iommu-translated": (lambda: replace(two(), iommu="DMA-FQ"), "host", "warning"),
    "flat-vm-tree": (flat_machine, "host", "warning"),
    "many-peers": (sixteen, "host", "warning"),
    "dual-socket": (pairs_of_switches, "host", "info"),
    "shared-uplink": (pairs_of_switches, "0000:01:00.0", "info"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, tmp_path):
    build, subject, severity = FAULTS[name]
    finding = found(host_of(build(), tmp_path))[name][0]
    assert (finding.subject, finding.severity) == (subject, severity)
    assert all(vars(finding).values()), "every part of a finding says something"


def test_a_healthy_host_has_no_fault(tmp_path):
    """Negative control: idle links are seen, and are no fault."""
    findings, _ = examine(Case(host_of(pairs_of_switches(), tmp_path)))
    assert {finding.severity for finding in findings} == {"info"}
    assert {finding.id for finding in findings} == set(HEALTHY)
    assert exit_code(findings, strict=True) == 0


def test_full_speed_links_are_not_idle(tmp_path):
    host = host_of(FakeHost([Root([Switch([Gpu(speed=32.0), Gpu(speed=32.0)])])]), tmp_path)
    assert "idle-link" not in found(host)


def test_acs_redirect_names_the_ports(tmp_path):
    host = host_of(FakeHost([Root([Switch([Gpu(), Gpu()], acs=ACS_REDIRECT)])]), tmp_path)
    findings = found(host)["acs-redirect"]
    assert [finding.subject for finding in findings] == ["0000:02:00.0", "0000:02:01.0"]
    assert findings[0].seen == "ReqRedir, CmpltRedir"


def test_unreadable_acs_is_not_judged(tmp_path):
    fake = replace(two(), privileged=False)
    findings, unjudged = examine(Case(host_of(fake, tmp_path)))
    assert "acs-redirect" not in {finding.id for finding in findings}
    assert "64 bytes" in next(gap.reason for gap in unjudged if gap.id == "acs-redirect")


def test_acs_lines_without_devices_are_judged():
    (finding,) = found(read_text(ACS_LINES, "x"))["acs-redirect"]
    assert finding.subject == "a port that the source does not name"


def test_one_way_pair(tmp_path):
    by_id = found(host_of(nested(), tmp_path, refused=[(2, 0)]))
    assert [finding.subject for finding in by_id["one-way-pair"]] == ["GPU0-GPU2"]
    assert by_id["no-access"][0].subject == "GPU2-GPU0"


def test_pair_without_access_is_not_one_way(tmp_path):
    by_id = found(host_of(nested(), tmp_path, refused=[(2, 0), (0, 2)]))
    assert "one-way-pair" not in by_id


def test_label_mismatch(tmp_path):
    host = host_of(nested(), tmp_path, levels={(0, 1): "NODE", (1, 0): "NODE"})
    assert found(host)["label-mismatch"][0].evidence == "tree: PIX, driver: NODE"


def test_far_pairs_in_a_numa_node():
    text = TOPO_M.replace("PIX", "SYS")
    assert found(read_text(text, "x"))["label-numa-conflict"][0].severity == "warning"
    assert "label-numa-conflict" not in found(read_text(TOPO_M, "x"))


def test_alternating_ranks(tmp_path):
    fake = FakeHost([Root([Switch([Gpu(), Gpu()])]), Root([Switch([Gpu(), Gpu()])])])
    finding = found(host_of(fake, tmp_path, order=[0, 2, 1, 3]))["rank-order"][0]
    assert finding.seen.startswith("4 ")
    assert finding.expected.startswith("2 ")


def test_ordinal_mix(tmp_path):
    fake = FakeHost([Root([Gpu()]), Root([Gpu()])])
    finding = found(host_of(fake, tmp_path, order=[1, 0]))["ordinal-mix"][0]
    assert finding.seen == "cuda:1 is nvidia-smi's 0, cuda:0 is nvidia-smi's 1"


def test_missing_sysfs(tmp_path):
    assert found(from_sysfs(tmp_path))["missing-sysfs"][0].severity == "error"


def test_figures():
    by_id = found(read_text(P2P_TEST, "x"))
    assert by_id["slow-p2p"][0].seen.startswith("0.49")
    title = P2P_TEST.splitlines()[5].replace("Writes", "Reads")
    reads = f"{title}\n   D\\D     0      1\n     0 912.68   52.0\n     1   52.0 922.37\n"
    text = P2P_TEST + reads
    assert "write-collapse" in found(read_text(text, "x"))
    assert "write-collapse" not in by_id


def test_stale_advice(tmp_path):
    fake = pairs_of_switches()
    host = host_of(fake, tmp_path)
    advice = advise(host)
    assert "stale-advice" not in found(host, advice)
    changed = replace(host, system=replace(host.system, iommu="translated"))
    finding = found(changed, advice)["stale-advice"][0]
    assert finding.seen == "changed: iommu"


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 1)])
def test_strict_counts_warnings(strict, code, tmp_path):
    findings, _ = examine(Case(host_of(two(width=8), tmp_path)))
    assert exit_code(findings, strict) == code


def test_no_rule_fails_on_an_empty_host(tmp_path):
    for host in (
        read_text(ACS_LINES, "x"),
        host_of(FakeHost([Root([])]), tmp_path),
        host_of(FakeHost([Root([Gpu()])]), tmp_path / "one"),
    ):
        findings, unjudged = examine(Case(host))
        assert len({gap.id for gap in unjudged} | {finding.id for finding in findings}) <= len(
            RULES
        )

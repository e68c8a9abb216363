"""What is made of a host that was verified and measured: findings, advice, text, page, exchange."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fake_host import FakeHost, FakeNvml, Gpu, Root, Switch
from probed_hosts import NONE, exchange, matrix, probed, same_switch, spoilt

from pcie_comm.crossovers import from_limits
from pcie_comm.errors import InvalidArgumentError
from pcie_comm.topology import codec
from pcie_comm.topology.advice import advise, load_advice, read_advice
from pcie_comm.topology.collect import collect
from pcie_comm.topology.compare import differences
from pcie_comm.topology.doctor import Case, examine
from pcie_comm.topology.model import Link
from pcie_comm.topology.ordering import best_order
from pcie_comm.topology.probed import COPY_ENGINE, HOST, PINNED, VRAM, LinkLoad
from pcie_comm.topology.redact import redact
from pcie_comm.topology.render import to_html, to_text
from pcie_comm.topology.traffic import crossovers, slower_than_host, traffic_islands

FAULTS = (
    "data-fault",
    "false-access",
    "one-way-pair",
    "slow-p2p",
    "write-collapse",
    "slow-pair",
    "slow-link-under-load",
    "errors-under-load",
    "oversubscribed-uplink",
    "uplink-collapse",
)


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeHost([Root([Switch([Gpu(), Gpu()])]), Root([Switch([Gpu(), Gpu()])])])
    return probed(collect(fake.write(tmp_path / "host"), FakeNvml(fake)))


def found(host) -> dict[str, list]:
    by_id: dict[str, list] = {}
    for finding in examine(Case(host))[0]:
        by_id.setdefault(finding.id, []).append(finding)
    return by_id


def test_a_good_host_has_none_of_the_faults(host):
    """Negative control; and every one of the rules has judged."""
    findings, unjudged = examine(Case(host))
    assert not set(FAULTS) & {finding.id for finding in findings}
    assert not set(FAULTS) & {gap.id for gap in unjudged}


def test_without_figures_the_rules_say_what_to_run(host):
    bare = replace(host, checks=(), measurements=(), exchanges=(), patterns=(), loads=())
    reasons = {gap.id: gap.reason for gap in examine(Case(bare))[1]}
    assert "topo --verify" in reasons["data-fault"]
    for name in ("slow-link-under-load", "oversubscribed-uplink", "slow-pair"):
        assert "topo --measure" in reasons[name]


@pytest.mark.parametrize("verdict", ["DROPPED", "MIRRORED", "CORRUPT", "HANG"])
def test_bad_data_is_an_error(host, verdict):
    (finding,) = found(spoilt(host, "GPU0", "GPU1", verdict))["data-fault"]
    assert (finding.subject, finding.severity) == ("GPU0-GPU1", "error")
    assert finding.seen == f"store {verdict}"
    assert "3 of 9 words" in finding.evidence


def test_a_bad_direction_is_a_one_way_pair(host):
    (finding,) = found(spoilt(host, "GPU0", "GPU1", "DROPPED"))["one-way-pair"]
    assert finding.subject == "GPU1-GPU0"
    both = spoilt(spoilt(host, "GPU0", "GPU1", "DROPPED"), "GPU1", "GPU0", "DROPPED")
    assert "one-way-pair" not in found(both)


def test_access_that_fails_in_use(host):
    (finding,) = found(spoilt(host, "GPU2", "GPU3", "NO-ACCESS"))["false-access"]
    assert finding.subject == "GPU2-GPU3"
    pairs = tuple(replace(pair, cuda_access=False, unknown=NONE) for pair in host.pairs)
    refused = replace(spoilt(host, "GPU2", "GPU3", "NO-ACCESS"), pairs=pairs)
    assert "false-access" not in found(refused)


def test_p2p_that_is_slower_than_staged_copies(host):
    slow = matrix(host, lambda a, b: 9.0, title="copies", engine=COPY_ENGINE)
    (finding,) = found(replace(host, measurements=(slow, *host.measurements[3:])))["slow-p2p"]
    assert finding.subject == "copies" and finding.seen.startswith("0.60")


def test_an_exchange_that_is_slower_than_through_the_host(host):
    others = tuple(
        one
        for one in host.exchanges
        if (one.source, one.target, one.memory) != ("GPU0", "GPU1", VRAM)
    )
    slow = replace(host, exchanges=(*others, exchange("GPU0", "GPU1", VRAM, 9.0)))
    (finding,) = found(slow)["slow-p2p"]
    assert finding.subject == "GPU0-GPU1"
    assert set(slower_than_host(slow)) == {("GPU0", "GPU1")}
    vetoes = {(veto.source, veto.target) for veto in advise(slow).vetoes}
    uuids = [gpu.uuid for gpu in host.gpus]
    assert vetoes == {(uuids[0], uuids[1]), (uuids[1], uuids[0])}


def test_one_pair_whose_writes_collapse(host):
    rate = lambda a, b: 2.0 if (a, b) == (0, 1) else same_switch(a, b)  # noqa: E731
    bad = replace(host, measurements=(matrix(host, rate, title="writes"), *host.measurements[1:]))
    (finding,) = found(bad)["write-collapse"]
    assert finding.evidence == "GPU0-GPU1: 2 GB/s written, 50 read"
    (finding,) = found(bad)["slow-pair"]
    assert finding.subject == "GPU0-GPU1"


@pytest.mark.parametrize(
    ("link", "seen"),
    [(Link(8.0, 32.0, 16, 16), "8 GT/s x16"), (Link(32.0, 32.0, 8, 16), "32 GT/s x8")],
)
def test_a_link_that_stays_slow_under_load(host, link, seen):
    loads = (LinkLoad("GPU0", link, None, 0, {}, {"*": "a test"}), *host.loads[1:])
    (finding,) = found(replace(host, loads=loads))["slow-link-under-load"]
    assert (finding.subject, finding.seen) == ("GPU0", seen)


@pytest.mark.parametrize(
    ("facts", "severity"),
    [
        ({"replays": 3}, "warning"),
        ({"errors": {"0000:02:00.0 correctable BadTLP": 2}}, "warning"),
        ({"errors": {"0000:02:00.0 nonfatal CmpltTO": 1}}, "error"),
    ],
)
def test_errors_under_load(host, facts, severity):
    loads = (replace(host.loads[0], **facts), *host.loads[1:])
    (finding,) = found(replace(host, loads=loads))["errors-under-load"]
    assert (finding.subject, finding.severity) == ("GPU0", severity)


def test_uplinks_that_hold_sources_back(host):
    uplink, roots, other = host.patterns
    shared = replace(host, patterns=(replace(uplink, gbps=31.0), roots, other))
    (finding,) = found(shared)["oversubscribed-uplink"]
    assert finding.seen == "0.48 of it"
    collapsed = replace(host, patterns=(uplink, replace(roots, gbps=3.0), other))
    (finding,) = found(collapsed)["uplink-collapse"]
    assert finding.expected == "at least the 32 GB/s of one alone"


# ---- advice


def test_bad_ways_are_vetoed_in_both_directions_and_avoided(host):
    bad = spoilt(host, "GPU0", "GPU1", "MIRRORED")
    advice = advise(bad)
    zero, one, two, three = (gpu.uuid for gpu in host.gpus)
    assert "store: MIRRORED, 3 of 9 words" in advice.vetoed(zero, one)
    assert "in the other direction" in advice.vetoed(one, zero)
    assert len(advice.vetoes) == 2
    assert advise(bad, 2).order == (two, three)


def test_bad_host_memory_vetoes_no_pair(host):
    assert advise(spoilt(host, "GPU0", HOST, "DROPPED")).vetoes == ()


def test_a_bad_way_within_a_gpu_moves_its_groups(host):
    advice = advise(spoilt(host, "GPU0", "GPU0", "CORRUPT"))
    zero, one = (gpu.uuid.removeprefix("GPU-").replace("-", "") for gpu in host.gpus[:2])
    assert "store: CORRUPT" in advice.veto_among([zero, zero])
    assert advice.veto_among([one, one]) is None


def test_islands_by_traffic_and_the_order_they_give(host):
    assert traffic_islands(host) == [("GPU0", "GPU1"), ("GPU2", "GPU3")]
    across = probed(host, lambda a, b: 50.0 if a % 2 == b % 2 else 20.0, lambda a, b: 1.0)
    assert traffic_islands(across) == [("GPU0", "GPU2"), ("GPU1", "GPU3")]
    assert best_order(across) == ["GPU0", "GPU2", "GPU1", "GPU3"]
    far = probed(host, lambda a, b: 50.0, lambda a, b: 1.0 if a // 2 == b // 2 else 3.0)
    assert traffic_islands(far) == [("GPU0", "GPU1"), ("GPU2", "GPU3")]
    assert traffic_islands(replace(host, measurements=())) is None


def test_protocols_by_payload(host, tmp_path):
    found = crossovers(host)
    assert found == {
        VRAM: {"tagged_nbytes": 8192, "push_nbytes": 65_536},
        PINNED: {"tagged_nbytes": 65_536, "push_nbytes": 65_536},
    }
    path = tmp_path / "advice.json"
    path.write_text(advise(host).to_json())
    read = load_advice(path, host)
    assert read == replace(advise(host), source=str(path))
    limits = from_limits(read.crossovers, "x")
    assert limits.vram.tagged_nbytes == found[VRAM]["tagged_nbytes"]
    assert crossovers(replace(host, exchanges=())) is None


def test_ranks_of_different_gpus_decide_where_there_are_any(host):
    slow_alone = tuple(
        replace(one, points=tuple(replace(p, tagged_us=1e6) for p in one.points))
        if one.source == one.target
        else one
        for one in host.exchanges
    )
    assert crossovers(replace(host, exchanges=slow_alone)) == crossovers(host)


@pytest.mark.parametrize(
    "limits", [[], {"disk": {}}, {"vram": {"tagged_nbytes": -1, "push_nbytes": None}}]
)
def test_damaged_limits_are_refused(host, tmp_path, limits):
    data = {**json.loads(advise(host).to_json()), "crossovers": limits}
    path = tmp_path / "advice.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidArgumentError):
        read_advice(path)


def test_a_file_without_figures_is_still_read(host, tmp_path):
    data = json.loads(advise(host).to_json())
    del data["crossovers"], data["traffic_islands"]
    path = tmp_path / "advice.json"
    path.write_text(json.dumps(data))
    assert read_advice(path).crossovers is None


# ---- shown and exchanged


def test_text_has_verdicts_figures_and_reasons(host):
    text = to_text(spoilt(host, "GPU0", "GPU1", "DROPPED"))
    assert "GPU0 -> GPU1 DROPPED   OK          OK" in text
    assert "GPU0 -> GPU1 store: DROPPED: 3 of 9 words" in text
    assert "one to all: a test" in text
    assert "islands by traffic: GPU0 GPU1 | GPU2 GPU3" in text
    assert "exchange of two ranks, slabs in pinned: pull / push / tagged (us)" in text
    assert "GPU0 - GPU1 6 / 2.082 / 1.764" in text
    assert "32 GT/s x16" in text and text.isascii()


def test_page_has_heat_maps_and_verdicts(host):
    page = to_html(spoilt(host, "GPU0", "GPU1", "DROPPED"))
    assert page.count("<svg") == 2 + len(host.measurements)
    assert '<td class="error">DROPPED</td>' in page
    assert '<td class="good">OK</td>' in page
    assert "several transfers at once" in page


def test_json_goes_round_and_fits_the_schema(host):
    jsonschema = pytest.importorskip("jsonschema")
    text = codec.to_json(host)
    assert codec.from_json(text, "x") == host
    jsonschema.validate(json.loads(text), codec.schema())


def test_redaction_reaches_evidence(host):
    secret = host.gpus[0].uuid
    detail = f"no slab of {secret} in /dev/shm/pcie_comm.1 on {host.system.hostname}"
    checks = (replace(host.checks[0], verdict="SKIPPED", detail=detail), *host.checks[1:])
    text = codec.to_json(redact(replace(host, checks=checks)))
    assert not [word for word in (secret, "/dev/shm", host.system.hostname) if word in text]


def test_diff_names_the_check(host):
    assert differences(host, host) == []
    lines = differences(host, spoilt(host, "GPU0", "GPU1", "DROPPED"))
    assert "checks[GPU0-GPU1 store].verdict: OK -> DROPPED" in lines
    assert len(lines) == 3

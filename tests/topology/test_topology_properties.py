"""What holds for every host, on hosts that hypothesis builds."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from fake_host import FakeHost, FakeNvml, Gpu, Root, Switch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from probed_hosts import number, probed, spoilt

from pcie_comm.topology import codec
from pcie_comm.topology.advice import advise
from pcie_comm.topology.collect import collect
from pcie_comm.topology.doctor import Case, examine
from pcie_comm.topology.labels import best_matrix, islands
from pcie_comm.topology.merge import with_names
from pcie_comm.topology.nccl_export import to_nccl_xml
from pcie_comm.topology.ordering import best_order, best_subset
from pcie_comm.topology.readers import read_text
from pcie_comm.topology.redact import redact
from pcie_comm.topology.render import to_text
from pcie_comm.topology.traffic import traffic_islands

FEW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)

children = st.recursive(
    st.builds(Gpu),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(Switch),
    max_leaves=4,
)
hosts = st.lists(
    st.builds(Root, st.lists(children, max_size=2), st.integers(0, 1)), min_size=1, max_size=4
).map(FakeHost)


def collected(fake: FakeHost, order=None):
    with tempfile.TemporaryDirectory() as folder:
        fake.write(Path(folder) / "host")
        return collect(Path(folder) / "host", FakeNvml(fake, order=order))


def by_uuid(host):
    names = {gpu.name: gpu.uuid for gpu in host.gpus}
    matrix = best_matrix(host)
    return {
        (names[row], names[column]): matrix.get(row, column)
        for row in matrix.rows
        for column in matrix.columns
    }


@FEW
@given(hosts)
def test_labels_are_symmetric_and_those_of_the_blueprint(fake):
    matrix = best_matrix(collected(fake))
    assert matrix.cells == fake.matrix()
    assert tuple(zip(*matrix.cells, strict=True)) == matrix.cells


@FEW
@given(hosts)
def test_islands_are_a_partition(fake):
    host = collected(fake)
    names = [name for group in islands(host) for name in group]
    assert sorted(names) == sorted(gpu.name for gpu in host.gpus)


@FEW
@given(hosts, st.data())
def test_order_is_a_permutation_and_mates_are_neighbours(fake, data):
    numbers = range(len(collected(fake).gpus))
    host = collected(fake, data.draw(st.permutations(numbers)))
    order = best_order(host)
    assert sorted(order) == sorted(gpu.name for gpu in host.gpus)
    for group in islands(host):
        places = sorted(order.index(name) for name in group)
        assert places == list(range(places[0], places[0] + len(group)))
    if order:
        count = data.draw(st.integers(1, len(order)))
        assert len(set(best_subset(host, count))) == count


@FEW
@given(hosts, st.data())
def test_another_numbering_permutes_everything(fake, data):
    one = collected(fake)
    other = collected(fake, data.draw(st.permutations(range(len(one.gpus)))))
    assert by_uuid(one) == by_uuid(other)
    names = [{gpu.name: gpu.uuid for gpu in host.gpus} for host in (one, other)]
    groups = [
        {frozenset(name[at] for at in group) for group in islands(host)}
        for name, host in zip(names, (one, other), strict=True)
    ]
    assert groups[0] == groups[1]


@FEW
@given(hosts)
def test_export_then_import_is_the_identity(fake):
    host = collected(fake)
    assert codec.from_json(codec.to_json(host), "x") == host
    if host.gpus:
        again = read_text(to_nccl_xml(host), "x")
        assert [gpu.address for gpu in again.gpus or ()] == [gpu.address for gpu in host.gpus]


def findings_by_uuid(host):
    names = {gpu.name: gpu.uuid for gpu in host.gpus}

    def translated(text):
        return re.sub(r"GPU\d+(?!-)\b|GPU\d+(?=-GPU|-host)", lambda m: names[m[0]], text)

    ids = ("data-fault", "one-way-pair", "slow-p2p", "errors-under-load", "false-access")
    found, _ = examine(Case(host))
    return sorted((one.id, translated(one.subject)) for one in found if one.id in ids)


@FEW
@given(hosts, st.data())
def test_another_numbering_permutes_what_was_probed(fake, data):
    count = len(collected(fake).gpus)
    order = data.draw(st.permutations(range(count)))
    bad = [data.draw(st.integers(0, max(count - 1, 0))) for _ in range(2)]
    seen = []
    for host in (probed(collected(fake)), probed(collected(fake, order))):
        if count:
            ends = [next(g.name for g in host.gpus if number(host, g.name) == at) for at in bad]
            host = spoilt(host, *ends, "DROPPED")
        names = {gpu.name: gpu.uuid for gpu in host.gpus}
        near = traffic_islands(host) or []
        advice = advise(host) if count else None
        seen.append(
            (
                findings_by_uuid(host),
                {frozenset(names[name] for name in group) for group in near},
                advice
                and sorted((veto.source, veto.target, veto.reason) for veto in advice.vetoes),
                advice and advice.crossovers,
            )
        )
    assert seen[0] == seen[1]
    assert not count or any(name == "data-fault" for name, _ in seen[0][0])


@FEW
@given(hosts, st.data())
def test_other_names_and_back_is_the_identity(fake, data):
    host = probed(collected(fake))
    names = [gpu.name for gpu in host.gpus]
    new = dict(zip(names, data.draw(st.permutations(names)), strict=True))
    back = {other: name for name, other in new.items()}
    renamed = with_names(host, new)
    assert with_names(renamed, back) == host
    assert [check.source for check in renamed.checks] == [new[c.source] for c in host.checks]
    assert codec.from_json(codec.to_json(renamed), "x") == renamed


hostnames = st.from_regex(r"[a-z]{3,8}-[a-z0-9]{2,6}", fullmatch=True)


@FEW
@given(hosts, hostnames)
def test_redaction_leaves_no_name(fake, hostname):
    fake = replace(fake, hostname=hostname, gpus=[])
    host = collected(fake)
    remarks = (f"{hostname} has {[gpu.serial for gpu in host.gpus]}",)
    clean = redact(replace(host, remarks=remarks))
    secrets = [hostname, "12345678-1234"]
    secrets += [secret for gpu in host.gpus for secret in (gpu.uuid, gpu.serial)]
    for text in (codec.to_json(clean), to_text(clean), to_nccl_xml(clean)):
        assert not [secret for secret in secrets if secret in text]
    json.loads(codec.to_json(clean))

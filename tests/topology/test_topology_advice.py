"""Order, best GPUs, vetoes, and the file that holds them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fake_host import FakeHost, FakeNvml, Gpu, Root, Switch, nested, pairs_of_switches, sixteen
from topology_texts import LSPCI, TOPO_M

from pcie_comm.errors import InvalidArgumentError
from pcie_comm.topology.advice import advise, load_advice, read_advice
from pcie_comm.topology.collect import collect
from pcie_comm.topology.fingerprint import changed_parts, fingerprint
from pcie_comm.topology.labels import islands
from pcie_comm.topology.ordering import best_order, best_subset, crossings
from pcie_comm.topology.readers import read_text


def host_of(fake: FakeHost, tmp_path, **options):
    return collect(fake.write(tmp_path / "host"), FakeNvml(fake, **options))


def test_mates_come_side_by_side_at_every_level(tmp_path):
    fake = pairs_of_switches()  # two sockets, two switches each, two GPUs each
    host = host_of(fake, tmp_path, order=[0, 4, 2, 6, 1, 5, 3, 7])
    numbers = [host.gpus[int(name[3:])].address for name in best_order(host)]
    sockets = [next(g.numa for g in fake.gpus if g.address == address) for address in numbers]
    assert sockets == [0, 0, 0, 0, 1, 1, 1, 1]
    assert crossings(best_order(host), islands(host)) == 4
    assert crossings([gpu.name for gpu in host.gpus], islands(host)) == 8


def test_an_order_that_is_good_already_is_kept(tmp_path):
    host = host_of(sixteen(), tmp_path)
    assert best_order(host) == [f"GPU{at}" for at in range(16)]


def test_numa_nodes_group_what_labels_do_not():
    text = TOPO_M.replace("PIX", "SYS").replace(
        "GPU1\tSYS\t X \tSYS\tSYS\t0-7,16-23\t0", "GPU1\tSYS\t X \tSYS\tSYS\t8\t1"
    )
    assert best_order(read_text(text, "x")) == ["GPU0", "GPU1", "GPU2"]


@pytest.mark.parametrize(("count", "names"), [(2, "GPU0 GPU1"), (4, "GPU0 GPU1 GPU2 GPU3")])
def test_best_gpus_are_the_nearest(count, names, tmp_path):
    assert " ".join(best_subset(host_of(nested(), tmp_path), count)) == names


def test_best_gpus_avoid_vetoes(tmp_path):
    host = host_of(nested(), tmp_path, refused=[(0, 1)])
    advice = advise(host, 2)
    assert advice.order == (host.gpus[2].uuid, host.gpus[3].uuid)


def test_many_choices_are_made_one_by_one(tmp_path):
    fake = FakeHost([Root([Switch([Gpu(), Gpu(), Gpu()])]) for _ in range(8)])
    host = host_of(fake, tmp_path)
    assert best_subset(host, 9) == [f"GPU{at}" for at in range(9)]


def test_vetoes_hold_in_both_directions(tmp_path):
    host = host_of(nested(), tmp_path, refused=[(2, 0)])
    advice = advise(host)
    zero, two = host.gpus[0].uuid, host.gpus[2].uuid
    assert "CNS" in advice.vetoed(two, zero)
    assert "other direction" in advice.vetoed(zero, two)
    assert advice.vetoed(zero, host.gpus[1].uuid) is None


def test_visible_devices_are_uuids_or_nothing(tmp_path):
    host = host_of(nested(), tmp_path)
    line = advise(host, 2).visible_devices
    assert line == f"{host.gpus[0].uuid},{host.gpus[1].uuid}"
    assert advise(read_text(LSPCI, "x")).visible_devices is None


@pytest.mark.parametrize("count", [0, 6, -1])
def test_a_count_that_there_is_not(count, tmp_path):
    with pytest.raises(InvalidArgumentError, match="is not 1 to 5"):
        advise(host_of(nested(), tmp_path), count)


def test_no_gpus(tmp_path):
    with pytest.raises(InvalidArgumentError, match="there is none"):
        advise(host_of(FakeHost([Root([])]), tmp_path))


def test_the_file_says_the_same_when_read(tmp_path):
    host = host_of(nested(), tmp_path, refused=[(2, 0)])
    path = tmp_path / "advice.json"
    path.write_text(advise(host, 3).to_json())
    assert load_advice(path, host) == replace(advise(host, 3), source=str(path))


CHANGES = {
    "iommu": lambda host: replace(host, system=replace(host.system, iommu="translated")),
    "driver": lambda host: replace(host, system=replace(host.system, driver="1.2.3")),
    "command line": lambda host: replace(host, system=replace(host.system, cmdline="quiet")),
    "gpus": lambda host: replace(
        host, gpus=(replace(host.gpus[0], uuid="GPU-new"), *host.gpus[1:])
    ),
    "links": lambda host: replace(
        host,
        nodes=tuple(
            replace(node, link=replace(node.link, max_width=8)) if node.link else node
            for node in host.nodes
        ),
    ),
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_changed_machine_is_refused_with_the_part(part, tmp_path):
    host = host_of(nested(), tmp_path)
    path = tmp_path / "advice.json"
    path.write_text(advise(host).to_json())
    with pytest.raises(InvalidArgumentError, match=f"changed={part};"):
        load_advice(path, CHANGES[part](host))


def test_links_that_wake_up_are_no_change(tmp_path):
    host = host_of(nested(), tmp_path)
    awake = tuple(
        replace(node, link=replace(node.link, speed_gts=32.0)) if node.link else node
        for node in host.nodes
    )
    assert not changed_parts(fingerprint(host), fingerprint(replace(host, nodes=awake)))


def test_hosts_that_share_no_essential_part_do_not_fit():
    one, other = (fingerprint(read_text(text, "x")) for text in (TOPO_M, LSPCI))
    assert changed_parts(one, other) == ("identity",)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "pcie_comm advice 1"}',
        json.dumps({"format": "pcie_comm advice 1", "fingerprint": [], "visible_devices": None}),
        '{"format": "pcie_comm advice 2"}',
    ],
)
def test_a_damaged_file_is_refused(text, tmp_path):
    path = tmp_path / "advice.json"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"advice=.*write it again"):
        read_advice(path)

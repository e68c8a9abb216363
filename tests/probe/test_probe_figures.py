"""Figures come out of a fake, with their gaps; wrong bytes are no figure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_gpu import HOST, FakeDriver

from pcie_comm.probe import figures, load, plan, program, region, works
from pcie_comm.probe.matrices import KINDS, assemble
from pcie_comm.probe.plan import Scale
from pcie_comm.probe.task import Figure, Task
from pcie_comm.topology.model import ANY, Gpu, Host, NumaNode, unknown_system
from pcie_comm.topology.probed import (
    PINNED,
    VRAM,
    Exchange,
    ExchangePoint,
    Flow,
    Ladder,
    LinkLoad,
    Pattern,
)

SMALL = Scale(16, 16, 16, 0.0005, 1 << 14)
OPEN = {ANY: "open"}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(figures, "CHAIN_NBYTES", 1 << 14)
    monkeypatch.setattr(figures, "LADDER_NBYTES", (16, 4096))
    monkeypatch.setattr(figures, "EXCHANGE_NBYTES", (4096, 16_384))
    monkeypatch.setattr(load, "NBYTES", 4096)
    monkeypatch.setattr(load, "LONG", 2)
    monkeypatch.setattr(load, "SETTLE_S", 0.0)


def host(count: int, nodes: int = 0) -> Host:
    system = unknown_system("a test")
    if nodes:
        numa = tuple(NumaNode(at, cpus="0-63", unknown=OPEN) for at in range(nodes))
        system = replace(system, numa=numa)
    gpus = tuple(Gpu(f"GPU{at}", unknown=OPEN) for at in range(count))
    return Host(("a test",), system, gpus=gpus, unknown=OPEN)


def measured(lab_of, faults=None, gpus=2):
    lab = lab_of(FakeDriver(gpus, faults))
    names = {f"GPU{at}": at for at in range(gpus)}
    records = []
    for task in plan.measure(host(gpus), names, SMALL):
        if task.work:
            records += works.perform(lab, task).records
        else:
            records += task.blanks
    return records


def test_every_figure_of_good_ways_is_there(lab_of):
    records = measured(lab_of)
    found = {(one.kind, one.row, one.column): one for one in records if isinstance(one, Figure)}
    assert {kind for kind, _, _ in found} == set(KINDS)
    assert [key for key, one in found.items() if one.value is None] == []
    assert found["chase", "GPU0", "GPU1"].value == 1.0
    assert found["flag", "GPU1", "GPU0"].value == 1.0
    assert found["ce-write", "GPU0", "GPU1"].nbytes == SMALL.nbytes
    pairs = {(row, column) for kind, row, column in found if kind == "sm-write"}
    assert pairs == {(a, b) for a in ("GPU0", "GPU1") for b in ("GPU0", "GPU1")}


def test_patterns_ladders_exchanges_and_links(lab_of):
    records = measured(lab_of)
    exchanges = [one for one in records if isinstance(one, Exchange)]
    assert {(one.source, one.target, one.memory) for one in exchanges} == {
        (a, b, memory)
        for a, b in (("GPU0", "GPU0"), ("GPU0", "GPU1"), ("GPU1", "GPU1"))
        for memory in (VRAM, PINNED)
    }
    for one in exchanges:
        assert one.points is not None
        assert one.points[0] == ExchangePoint(8192, 2.0, 2.0, 2.0)
    ladders = [one for one in records if isinstance(one, Ladder)]
    assert len(ladders) == 12 and all(one.points for one in ladders)
    patterns = {one.name: one for one in records if isinstance(one, Pattern)}
    ring = patterns["ring in rank order"]
    assert ring.flows is not None and ring.gbps
    assert [(flow.source, flow.target) for flow in ring.flows] == [
        ("GPU0", "GPU1"),
        ("GPU1", "GPU0"),
    ]
    assert all(flow.gbps and flow.alone_gbps for flow in ring.flows)
    assert patterns["ring in advised order"].why("flows") == "the advised order is the rank order"
    loads = [one for one in records if isinstance(one, LinkLoad)]
    assert [one.gpu for one in loads] == ["GPU0", "GPU1"]


def test_one_gpu_has_its_own_rows_and_says_what_it_cannot(lab_of):
    records = measured(lab_of, gpus=1)
    kinds = {one.kind for one in records if isinstance(one, Figure) and one.value is not None}
    assert kinds == set(KINDS) - {"ce-staged"}
    patterns = [one for one in records if isinstance(one, Pattern)]
    assert {one.why("flows") for one in patterns} == {"there is one GPU"}


@pytest.mark.parametrize("fault", ["drop", "spoil", "mirror"])
def test_wrong_bytes_are_no_figure(lab_of, fault):
    lab = lab_of(FakeDriver(2, {(0, 1): fault}))
    blank = Figure("sm-write", "GPU0", "GPU1", unknown=OPEN)
    task = Task("bandwidth", {"GPU0": 0, "GPU1": 1}, (blank,), SMALL.transfer)
    answer = works.perform(lab, task)
    (found,) = answer.records
    assert found.value is None
    assert "words are wrong at the target" in found.why("value")
    assert answer.wrong[:2] == ("GPU0", "GPU1") and not answer.broken


@pytest.mark.parametrize("bad", [(0, 1), (2, 0)])
def test_of_many_flows_the_bad_one_is_named(lab_of, bad):
    lab = lab_of(FakeDriver(3, {bad: "spoil"}))
    names = {f"GPU{at}": at for at in range(3)}
    task = next(
        task
        for task in plan.measure(host(3), names, SMALL)
        if task.options.get("title") == "all to all, write"
    )
    answer = works.perform(lab, task)
    assert answer.records[0].flows is None
    assert answer.wrong[:2] == tuple(f"GPU{at}" for at in bad)
    (check,) = program._faults(task, answer)
    assert (check.source, check.target, check.verdict) == (*answer.wrong[:2], "CORRUPT")


def test_a_hang_is_a_gap_and_its_reason(lab_of):
    records = measured(lab_of, {(0, 1): "hang"})
    flag = next(
        one
        for one in records
        if isinstance(one, Figure) and (one.kind, one.row, one.column) == ("flag", "GPU0", "GPU1")
    )
    assert flag.why("value") == "it gave up after 0 of 16 rounds"
    exchange = next(
        one
        for one in records
        if isinstance(one, Exchange) and (one.target, one.memory) == ("GPU1", VRAM)
    )
    assert exchange.points and exchange.points[0].push_us is None


def test_peer_access_is_not_enabled_for_staged_copies(lab_of):
    fake = FakeDriver(2)
    lab = lab_of(fake)
    blank = Figure("ce-staged", "GPU0", "GPU1", unknown=OPEN)
    task = Task("bandwidth", {"GPU0": 0, "GPU1": 1}, (blank,), SMALL.transfer)
    assert works.perform(lab, task).records[0].value is not None
    assert fake.access == set()
    tasks = [task.blanks[0] for task in plan.measure(host(3), {"GPU0": 0, "GPU1": 1}, SMALL)]
    kinds = [one.kind for one in tasks if isinstance(one, Figure)]
    assert kinds[:2] == ["ce-staged"] * 2 and "ce-staged" not in kinds[2:]


def node_task(**options):
    blank = Figure("host-ce-write", "GPU0", "node1", unknown=OPEN)
    facts = {**SMALL.transfer, "node": 1, "cpus": (0, 1, 2, 3), **options}
    return Task("host bandwidth", {"GPU0": 0}, (blank,), facts)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ({1: 4}, ""),
        ({0: 4}, "the memory lies on NUMA nodes [0], not 1"),
        ({0: 1, 1: 3}, "the memory lies on NUMA nodes [0, 1], not 1"),
        ("hidden", "it is not known on which NUMA node the memory lies: hidden"),
    ],
)
def test_memory_that_is_not_on_its_node_is_not_measured(lab_of, monkeypatch, nodes, reason):
    monkeypatch.setattr(figures, "nodes_of", lambda region: nodes)
    (found,) = works.perform(lab_of(FakeDriver(1)), node_task()).records
    assert (found.value is None) == bool(reason)
    assert found.why("value").startswith(reason)


def test_a_node_without_allowed_processors(lab_of):
    (found,) = works.perform(lab_of(FakeDriver(1)), node_task(cpus=(65_000,))).records
    assert "no processor of NUMA node 1 may be used" in found.why("value")


def test_where_memory_lies_is_read_from_the_kernel(tmp_path, lab_of):
    maps = tmp_path / "numa_maps"
    maps.write_text(
        "7f0000000000 default anon=3 dirty=3 N0=1 N1=2 kernelpagesize_kB=4\n"
        "7f0000100000 default anon=9 N0=9\n"
    )
    place = region.Region(None, 4096, {}, host_address=0x7F0000000000)
    assert region.nodes_of(place, maps) == {0: 1, 1: 2}
    assert "does not list" in region.nodes_of(replace(place, host_address=1), maps)
    assert "not readable" in region.nodes_of(place, tmp_path / "none")


def test_where_memory_of_this_machine_lies(lab_of):
    fake = FakeDriver(1)
    lab = lab_of(fake)
    with lab.memory() as memory:
        found = region.nodes_of(memory.near(lab.gpu("GPU0"), 1 << 16, ()))
        if isinstance(found, dict):
            assert sum(found.values()) == 16


def test_each_of_several_numa_nodes_has_a_column():
    def columns(nodes: int) -> set[str]:
        tasks = plan.measure(host(1, nodes), {"GPU0": 0}, SMALL)
        return {
            blank.column
            for task in tasks
            for blank in task.blanks
            if isinstance(blank, Figure) and blank.kind == "host-sm-read"
        }

    assert columns(0) == columns(1) == {HOST}
    assert columns(2) == {HOST, "node0", "node1"}


def test_matrices():
    figures = [
        Figure("sm-write", "GPU0", "GPU1", 10.0, 64),
        Figure("sm-write", "GPU1", "GPU0", unknown={ANY: "it broke"}),
        Figure("chase", "GPU0", "GPU1", 1.5),
    ]
    write, chase = assemble(figures)
    assert (write.rows, write.columns) == (("GPU0", "GPU1"), ("GPU1", "GPU0"))
    assert write.cells == ((10.0, None), (None, None))
    assert [(gap.row, gap.column, gap.reason) for gap in write.gaps] == [
        ("GPU1", "GPU0", "it broke")
    ]
    assert (write.unit, write.engine, write.access, write.p2p, write.nbytes) == (
        "GB/s",
        "SM",
        "write",
        True,
        64,
    )
    assert chase.unit == "us" and chase.nbytes is None


def test_flows_are_names():
    assert Flow("a", HOST, unknown=OPEN).gbps is None

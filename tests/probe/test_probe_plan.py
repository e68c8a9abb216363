"""Capability merged into a host, and which patterns a host gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_gpu import FakeDriver

from pcie_comm import driver
from pcie_comm.probe import plan
from pcie_comm.probe.capability import ask, with_cuda
from pcie_comm.probe.pattern_plan import ONE_GPU, plans
from pcie_comm.topology.doctor import Case, examine
from pcie_comm.topology.model import ANY, Gpu, Host, Pair, PciNode, unknown_system
from pcie_comm.topology.probed import HOST, ONE_ROOT, TWO_ROOTS, TWO_SWITCHES, UPLINK

OPEN = {ANY: "a test"}


def host(*gpus: Gpu, **facts) -> Host:
    return Host(("a test",), unknown_system("a test"), gpus=gpus, unknown=OPEN, **facts)


def gpu(name: str, **facts) -> Gpu:
    return Gpu(name, unknown=OPEN, **facts)


def answer(monkeypatch, count: int, faults=None):
    monkeypatch.setattr(driver, "_bindings", FakeDriver(count, faults))
    return ask()


def test_gpus_are_matched_by_uuid_then_by_address(monkeypatch):
    found = answer(monkeypatch, 3)
    assert [one.address for one in found.gpus] == [f"0000:4{at}:00.0" for at in range(3)]
    known = host(
        gpu("GPU0", uuid=found.gpus[2].uuid),
        gpu("GPU1", address=found.gpus[0].address),
        gpu("GPU2", uuid="GPU-else", ordinal=7),
    )
    merged, ordinals = with_cuda(known, found)
    assert ordinals == {"GPU0": 2, "GPU1": 0, "GPU3": 1}
    by_name = {one.name: one for one in merged.gpus}
    assert by_name["GPU1"].uuid == found.gpus[0].uuid
    assert by_name["GPU2"].why("ordinal") == "CUDA does not show it"
    assert by_name["GPU3"].product == "Fake GPU"
    assert merged.remarks == ("GPU2 is a GPU that CUDA does not show",)


def test_gpus_without_names_are_matched_by_order(monkeypatch):
    merged, ordinals = with_cuda(host(gpu("GPU0"), gpu("GPU1")), answer(monkeypatch, 2))
    assert ordinals == {"GPU0": 0, "GPU1": 1}
    assert len(merged.gpus) == 2


def test_a_host_without_anything_gets_cudas_gpus(monkeypatch):
    bare = Host(("a test",), unknown_system("a test"), unknown=OPEN)
    merged, _ = with_cuda(bare, answer(monkeypatch, 2))
    assert [one.name for one in merged.gpus] == ["GPU0", "GPU1"]
    assert {(pair.source, pair.target) for pair in merged.pairs} == {
        ("GPU0", "GPU1"),
        ("GPU1", "GPU0"),
    }


def test_pairs_keep_what_nvml_said(monkeypatch):
    found = answer(monkeypatch, 2, {(0, 1): "deny"})
    stated = Pair("GPU0", "GPU1", p2p={"read": "OK"}, unknown={ANY: "CUDA was not asked"})
    known = host(
        gpu("GPU0", uuid=found.gpus[0].uuid), gpu("GPU1", uuid=found.gpus[1].uuid), pairs=(stated,)
    )
    merged, _ = with_cuda(known, found)
    there, back = merged.pairs
    assert there.p2p == {"read": "OK"}
    assert (there.cuda_access, back.cuda_access) == (False, True)
    assert there.why("performance_rank") == "CUDA has no answer"
    assert (back.performance_rank, back.native_atomics) == (0, False)
    one_way = [one for one in examine(Case(merged))[0] if one.id == "one-way-pair"]
    assert [one.subject for one in one_way] == ["GPU1-GPU0"]


# ---- patterns


def tree(*switches: int) -> Host:
    """A root complex for each number, with a switch of so many GPUs."""
    nodes, gpus = [], []
    for root, count in enumerate(switches):
        top, port, up = f"pci0000:{root}0", f"0000:{root}0:01.0", f"0000:{root}1:00.0"
        nodes += [
            PciNode(top, role="root complex", unknown=OPEN),
            PciNode(port, parent=top, role="root port", unknown=OPEN),
            PciNode(up, parent=port, role="switch upstream", unknown=OPEN),
        ]
        for at in range(count):
            down, end = f"0000:{root}2:0{at}.0", f"0000:{root}{at + 3}:00.0"
            nodes += [
                PciNode(down, parent=up, role="switch downstream", unknown=OPEN),
                PciNode(end, parent=down, role="endpoint", unknown=OPEN),
            ]
            gpus.append(gpu(f"GPU{len(gpus)}", address=end))
    return replace(host(*gpus), nodes=tuple(nodes))


def by_name(found: Host) -> dict[str, list]:
    names = [one.name for one in found.gpus]
    result: dict[str, list] = {}
    for one in plans(found, names):
        result.setdefault(one.name, []).append(one)
    return result


def test_three_switches_give_every_pattern():
    found = by_name(tree(2, 2, 2))
    assert [one.place for one in found[UPLINK]] == [f"0000:{root}1:00.0" for root in range(3)]
    assert found[UPLINK][0].flows == (("GPU0", "GPU2"), ("GPU1", "GPU3"))
    assert found[TWO_ROOTS][0].flows == (("GPU0", "GPU2"), ("GPU1", "GPU4"))
    assert found[ONE_ROOT][0].flows == (("GPU0", "GPU2"), ("GPU1", "GPU3"))
    assert found[TWO_SWITCHES][0].flows == (("GPU0", "GPU2"), ("GPU3", "GPU4"))
    assert len(found["all to all"][0].flows) == 30
    assert found["one to all"][0].flows[0] == ("GPU0", "GPU1")
    assert found["ring in rank order"][0].flows[-1] == ("GPU5", "GPU0")


def test_one_switch_sends_to_the_host():
    found = by_name(tree(3))
    assert found[UPLINK][0].flows == tuple((f"GPU{at}", HOST) for at in range(3))
    assert found[TWO_ROOTS][0].reason == "no GPUs below two other roots"


def test_no_switch_is_shared():
    found = by_name(tree(1, 1))
    assert found[UPLINK][0].reason == "no two GPUs share an uplink"
    assert found["all to all"][0].flows is not None


def test_an_alternating_order_is_measured_beside_the_advised_one():
    mixed = tree(2, 2)
    zero, one, two, three = mixed.gpus
    order = [replace(g, name=f"GPU{at}") for at, g in enumerate((zero, two, one, three))]
    found = by_name(replace(mixed, gpus=tuple(order)))
    assert found["ring in rank order"][0].flows[0] == ("GPU0", "GPU1")
    assert found["ring in advised order"][0].flows[0] == ("GPU0", "GPU2")
    assert by_name(tree(2, 2))["ring in advised order"][0].flows is None


def test_one_gpu_says_so():
    assert {one.reason for one in plans(tree(1), ["GPU0"])} == {ONE_GPU}


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_every_ordered_pair_is_covered(count):
    names = {f"GPU{at}": at for at in range(count)}
    pairs = {(a, b) for a in names for b in (*names, HOST)}
    tasks = plan.verify(names, plan.QUICK)
    for name in ("store", "load", "copy 8 B", "copy 64 MiB", "litmus push", "ipc"):
        blanks = [b for task in tasks for b in task.blanks if b.name == name]
        assert {(b.source, b.target) for b in blanks} == pairs
        assert len(blanks) == len(pairs)
    measured = {
        pair
        for task in plan.measure(host(*map(gpu, names)), names, plan.QUICK)
        for pair in plan.pairs_of(task)
    }
    assert measured == pairs


def test_quick_on_one_gpu_is_planned_for_less_than_its_limit():
    tasks = [*plan.verify({"GPU0": 0}, plan.QUICK), *plan.measure(tree(1), {"GPU0": 0}, plan.QUICK)]
    assert 10 < sum(task.seconds for task in tasks) < 30

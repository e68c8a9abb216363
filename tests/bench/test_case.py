"""One case: outputs are poisoned and checked on both sides of the timing; evictions come off."""

from __future__ import annotations

import pytest
import torch
from worlds import small

from pcie_comm import local_world
from pcie_comm.bench import workload
from pcie_comm.bench.case import blank_row, measure
from pcie_comm.bench.cold import ColdStage
from pcie_comm.bench.contenders import Contender
from pcie_comm.bench.measure import WARM_UPS
from pcie_comm.bench.options import PAIR, SHARED
from pcie_comm.bench.report import COLD, EVICTION, WARM
from pcie_comm.bench.worlds import Worlds

CPU = torch.device("cpu")
SAMPLES = 4


class StubStage:
    """Runs a contender in place; every take lasts as long as it is told."""

    def __init__(self, lasts_ns=1000.0):
        self.lasts_ns = lasts_ns
        self.spun = 0

    def take_of(self, enqueue):
        def take():
            for rank in range(2):
                enqueue(rank)
            return self.lasts_ns

        return take

    def warm_up(self, local):
        for rank in range(2):
            local(rank)

    def settle(self):
        pass

    def spin(self):
        self.spun += 1


class StubColdStage(ColdStage):
    """The same, with evictions that last 400 ns."""

    def __init__(self):
        self.stub = StubStage(1400.0)
        for name in ("take_of", "warm_up", "settle", "spin"):
            setattr(self, name, getattr(self.stub, name))

    def take_of_eviction(self):
        return lambda: 400.0


@pytest.fixture
def work():
    return workload.make(PAIR, 2, [CPU] * 2)


@pytest.fixture
def template(work):
    with local_world(2, "cpu", config=small()) as world:
        return blank_row(work, Worlds(SHARED, {"push": world}))


def contender(work, stops_after=None, spoils_at=None):
    """A contender that writes what is right; after some calls nothing, or at one a wrong bit."""
    outputs, calls = work.outputs(), []

    def enqueue(rank):
        calls.append(rank)
        if stops_after is not None and len(calls) > stops_after:
            return
        for output, right in zip(outputs[rank], work.expected, strict=True):
            output.view(torch.uint8).copy_(right.view(torch.uint8))
        if spoils_at == len(calls):
            outputs[rank][0].view(torch.uint8)[0, 0] ^= 1

    return Contender("it", "push", enqueue, outputs), calls


def test_a_right_contender(work, template):
    it, calls = contender(work)
    stage = StubStage()
    (row,) = measure(stage, work, [it], SAMPLES, template)
    assert (row.contender, row.protocol, row.cache) == ("it", "push", WARM)
    assert (row.op, row.ranks, row.rows, row.memory, row.sharers) == (PAIR, 2, 2, SHARED, 2)
    assert row.samples_ns == (1000,) * SAMPLES
    assert row.correct
    assert stage.spun == 1
    assert len(calls) == 2 * (1 + WARM_UPS + SAMPLES)


def test_a_contender_that_is_wrong_from_the_start(work, template):
    it, _ = contender(work, stops_after=0)
    (row,) = measure(StubStage(), work, [it], SAMPLES, template)
    assert row.faults_before
    assert row.faults_after
    assert not row.correct


def test_a_contender_that_stops_writing_once_it_is_timed(work, template):
    """The poison between check and timing shows it: the bytes of the check are gone."""
    it, _ = contender(work, stops_after=2)
    (row,) = measure(StubStage(), work, [it], SAMPLES, template)
    assert not row.faults_before
    assert row.faults_after


def test_a_bit_that_is_wrong_after_the_last_sample(work, template):
    it, _ = contender(work, spoils_at=2 * (1 + WARM_UPS + SAMPLES))
    (row,) = measure(StubStage(), work, [it], SAMPLES, template)
    assert not row.faults_before
    assert row.faults_after == ("rank 1: output 0: 1 of 14336 bytes differ, first in row 0",)


def test_contenders_do_not_share_outputs(work, template):
    right, _ = contender(work)
    wrong, _ = contender(work, stops_after=0)
    rows = measure(StubStage(), work, [right, wrong], SAMPLES, template)
    assert [row.correct for row in rows] == [True, False]


def test_cold_samples_are_without_their_evictions(work, template):
    it, _ = contender(work)
    row, alone = measure(StubColdStage(), work, [it], SAMPLES, template)
    assert (row.cache, row.samples_ns) == (COLD, (1000,) * SAMPLES)
    assert (alone.contender, alone.cache, alone.samples_ns) == (EVICTION, COLD, (400,) * SAMPLES)


def test_what_a_contender_does_beside_communication_comes_first(work, template):
    order = []
    it, _ = contender(work)
    first = Contender(
        "it",
        "push",
        lambda rank: (order.append("enqueue"), it.enqueue(rank)),
        it.outputs,
        local=lambda rank: order.append("local"),
    )
    measure(StubStage(), work, [first], 1, template)
    assert order[:3] == ["local", "local", "enqueue"]
    assert order.count("local") == 2


def test_a_broken_group_ends_the_run(work, template):
    it, _ = contender(work)

    class Broken:
        def check(self):
            raise TimeoutError("gave up")

    broken = Contender("it", "push", it.enqueue, it.outputs, groups=[Broken()])
    with pytest.raises(TimeoutError, match="gave up"):
        measure(StubStage(), work, [broken], SAMPLES, template)

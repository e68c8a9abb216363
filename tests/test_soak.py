"""tools/soak: short soaks, faults that they must find, and what a report must not let pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pcie_comm import local_world
from pcie_comm.layout import EPOCH_MASK

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tools"), str(ROOT / "tests" / "gpu")]

from soak import cpu, plan  # noqa: E402
from soak.cpu import Soak  # noqa: E402
from soak.engines import installed  # noqa: E402
from soak.plan import Part  # noqa: E402
from soak.pool import KIMI, Pool, ops_for  # noqa: E402
from soak.script import LANES, LAP_STEPS, ROWS, draw_lap  # noqa: E402
from soak.tally import Tally, add_up  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

PROTOCOLS = pytest.mark.parametrize("protocol", ["push", "pull"])
LIMIT_S = 30.0


def test_every_rank_draws_the_same_calls_and_all_kinds_come_up():
    steps = draw_lap(7, 3, ops_for(4))
    assert steps == draw_lap(7, 3, ops_for(4)) != draw_lap(8, 3, ops_for(4))
    assert [step.number for step in steps] == list(range(3 * LAP_STEPS, 4 * LAP_STEPS))
    kinds = {(step.op, step.lane, step.given) for step in steps}
    assert len(kinds) == len(set(ops_for(4))) * LANES * 2
    assert {step.rows for step in steps} == set(ROWS)
    assert KIMI not in ops_for(3)


@PROTOCOLS
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_short_soak_finds_nothing(protocol, world_size):
    soak = Soak(5, world_size, protocol, LIMIT_S, 2 * LAP_STEPS * world_size)
    tally = cpu.run(soak)
    assert (tally.mismatches, tally.failure) == (0, "")
    assert tally.calls >= soak.calls
    assert tally.seconds > 0


@PROTOCOLS
@pytest.mark.parametrize("control", plan.CONTROLS)
def test_control_a_broken_protocol_is_caught_within_two_laps(control, protocol):
    tally = cpu.run(Soak(6, 3, protocol, LIMIT_S, 1 << 40, control=control))
    assert tally.mismatches > 0
    assert tally.failure == ""
    assert 0 <= tally.first < 2 * LAP_STEPS
    assert "seed=6 rank=" in tally.where
    assert "Step(" in tally.where


@pytest.mark.slow
@pytest.mark.parametrize("control", ["", *plan.CONTROLS])
def test_processes(control):
    tally = cpu.run(Soak(6, 3, "push", 3.0, 1 << 40, control=control, processes=True))
    assert tally.failure == ""
    assert tally.calls > 0
    assert bool(tally.mismatches) == bool(control)


def test_soaks_pass_the_wrap_of_the_counter(monkeypatch):
    monkeypatch.setattr(cpu, "STARTS", (EPOCH_MASK - 50,))
    epochs = []
    goes_on = cpu.Pace.goes_on

    def spy(pace, rank, tally):
        epochs.append(world.groups[rank].channel("second").engine.epoch)
        return goes_on(pace, rank, tally)

    monkeypatch.setattr(cpu.Pace, "goes_on", spy)
    soak = Soak(1, 2, "push", LIMIT_S, 1)
    pace = cpu.Pace(soak, cpu.multiprocessing.dummy)
    with installed("", 1), local_world(2, "cpu", config=soak.config) as world:
        tallies = world.run(lambda group: cpu.soak_rank(group, soak, pace))
    assert {tally.mismatches for tally in tallies} == {0}
    assert {tally.failure for tally in tallies} == {""}
    assert max(epochs) < LAP_STEPS


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_wrong_byte_is_noticed_in_every_kind_of_call(world_size, monkeypatch):
    pool = Pool(3, world_size)

    class Lane:
        """Answers rightly, but for one bit of one output."""

        def __getattr__(self, name):
            def answer(*inputs, out=None):
                shards = [pool._shards(step, which) for which in range(2 if "pair" in name else 1)]
                if name == KIMI:
                    begin, end = pool._router_rows(step)
                    right = [shards[0], [pool._weights[begin:end]], [pool._ids[begin:end]]]
                else:
                    right = shards
                found = [torch.cat(part, 1).clone() for part in right]
                if wrong is not None and found[wrong].numel():
                    found[wrong].view(torch.uint8).view(-1)[-1] ^= 1
                return found[0] if name == "all_gather_heads" else tuple(found)

            return answer

    seen = set()
    for step in draw_lap(1, 0, ops_for(world_size)):
        for wrong in (
            None,
            0,
            *([1] if "pair" in step.op else []),
            *([2] if "topk" in step.op else []),
        ):
            assert pool.call(Lane(), 0, step) == (wrong is None or step.rows == 0)
            seen.add((step.op, wrong))
    assert len(seen) == (9 if world_size == 1 else 5)


def test_a_rank_that_fails_ends_the_soak_and_is_named(monkeypatch):
    call = Pool.call

    def failing(pool, lane, rank, step):
        if rank == 1 and step.number == 20:
            raise MemoryError("no room")
        return call(pool, lane, rank, step)

    monkeypatch.setattr(Pool, "call", failing)
    tally = cpu.run(Soak(1, 2, "push", LIMIT_S, 1 << 40))
    assert "rank 1: MemoryError: no room" in tally.failure
    assert "rank 0: " in tally.failure
    assert tally.seconds < LIMIT_S


# --- the report ----------------------------------------------------------------------------------


def test_tallies_add_up_and_the_first_wrong_call_counts():
    one, two = Tally(calls=5, seconds=2.0), Tally(calls=5, failure="lost")
    one.wrong(30, "late")
    two.wrong(20, "early")
    two.wrong(25, "middle")
    told = add_up([one, two]).report()
    assert told == {
        "calls": 10,
        "mismatches": 3,
        "first_wrong_round": 20,
        "first_wrong_call": "early",
        "failure": "rank 1: lost",
        "seconds": 2.0,
        "calls_per_s": 5,
    }


def result(calls: int = 9, mismatches: int = 0, failure: str | None = None) -> dict:
    return {"calls": calls, "mismatches": mismatches, "failure": failure}


@pytest.mark.parametrize(
    ("control", "protocol", "found", "verdict"),
    [
        ("", "push", result(), "ok"),
        ("", "push", result(calls=0), "wrong bytes"),
        ("", "push", result(mismatches=1), "wrong bytes"),
        ("", "push", result(failure="PeerTimeoutError: x"), "failed"),
        ("one_slot", "push", result(mismatches=1), "ok"),
        ("one_slot", "push", result(), "a control was not caught"),
        ("one_slot", "push", result(failure="PeerTimeoutError: x"), "a control was not caught"),
        ("one_slot", "tagged", result(failure="PeerTimeoutError: x"), "ok"),
        ("one_slot", "tagged", result(failure="CudaError: x"), "a control was not caught"),
    ],
)
def test_verdicts(control, protocol, found, verdict):
    assert plan.verdict(Part(2, protocol, "threads", control=control), found) == verdict


def test_every_protocol_memory_and_kernel_has_a_part():
    parts = plan.gpu_parts((2, 4, 8), True, True)
    soaked = {(p.protocol, p.where, p.kernels) for p in parts if not p.control}
    assert len(soaked) == 4 * 2 * 2
    assert {(p.protocol, p.control) for p in parts if p.control} == {
        (protocol, control) for protocol in ("push", "pull", "tagged") for control in plan.CONTROLS
    }
    assert {p.world_size for p in parts if not p.control} == {2, 4, 8}
    assert {p.overlap for p in parts} == {True, False}
    assert not any(p.control or p.kernels for p in plan.gpu_parts((2,), False, True))


def test_the_program_writes_its_report(tmp_path):
    out = tmp_path / "soak.json"
    command = [sys.executable, "tools/soak", "--calls", "800", "--worlds", "2", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    told = json.loads(out.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (told["good"], told["complete"], told["mismatches"]) == (True, True, 0)
    assert (told["controls"], told["controls_caught"]) == (4, 4)
    assert told["calls"] >= 800
    assert all(part["first_wrong_call"] for part in told["parts"] if part["control"])


# --- the GPU's driver, on a CPU world of one -----------------------------------------------------


@pytest.fixture
def driver(monkeypatch):
    """A GPU soak whose streams, graphs and copies do nothing but the calls themselves."""
    import harness

    from soak import gpu

    monkeypatch.setattr(harness, "DEVICE", "cpu")
    for name in ("synchronize", "set_stream", "default_stream", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda *ignored: None)
    monkeypatch.setattr(gpu, "Traffic", lambda: SimpleNamespace(enqueue=lambda: None))
    monkeypatch.setattr(gpu, "ROWS", (1, 3))
    monkeypatch.setattr(gpu.Driver, "_capture", lambda *arguments: FakeGraph(*arguments))
    with local_world(1, "cpu") as world:
        made = gpu.Driver(world, gpu.GpuSoak(2, 1, "push", "host_shm", LIMIT_S, 1))
        world.streams = [None]
        yield made
        world.streams = []


class FakeGraph:
    def __init__(self, driver, rank, piece):
        self.calls = piece
        self.lanes = driver._lanes

    def replay(self):
        for call in self.calls:
            call.enqueue(self.lanes[0], 0)


def test_a_lap_on_a_gpu_makes_and_compares_every_call(driver):
    driver.run()
    assert driver.tally.calls == 3 * 2 * 2 * 48
    assert (driver.tally.mismatches, driver.tally.first) == (0, -1)
    assert driver.sources() == []


def test_a_lap_on_a_gpu_finds_a_wrong_call_and_says_where(driver, monkeypatch):
    from soak import gpu

    enqueue, made = gpu.Call.enqueue, []

    def spoil(call, lanes, rank):
        enqueue(call, lanes, rank)
        made.append(call)
        if len(made) in (100, 200):
            call.batch.views[call.index][rank][1][0].view(torch.uint8).view(-1)[-1] ^= 1

    monkeypatch.setattr(gpu.Call, "enqueue", spoil)
    driver.lap(0)
    assert driver.tally.mismatches == 2
    assert driver.tally.first == 99
    assert f"lap=0 place=99 rank=0 {made[99].batch.op} " in driver.tally.where


def test_a_call_that_is_not_made_is_noticed(driver, monkeypatch):
    from soak import gpu

    monkeypatch.setattr(gpu.Call, "enqueue", lambda *ignored: None)
    driver.lap(0)
    assert driver.tally.mismatches == driver.tally.calls

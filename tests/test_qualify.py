"""tools/qualify: a run on the CPU, what it must notice, and what is left out on which host."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pcie_comm import local_world
from pcie_comm.bench import workload
from pcie_comm.topology import codec

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tools"), str(ROOT / "tests" / "gpu")]

from qualify import cases, child, figures, jobs, latency, ranks, report, rivals, runner  # noqa: E402
from qualify.jobs import OUT, Job, Request  # noqa: E402

program = importlib.import_module("qualify.__main__")
REVISION = "0123abc"


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict:
    """Return what two runs on the CPU report, at the same time; threads need no process."""
    folder = tmp_path_factory.mktemp("qualify")

    def run(steps: str) -> dict:
        out = folder / f"{steps}.json"
        command = [sys.executable, "tools/qualify", "--device", "cpu", "--ranks", "2"]
        done = subprocess.run(
            [*command, "--rounds", "1", "--only", steps, "--out", str(out)],
            cwd=ROOT,
            env={**os.environ, "PCIE_COMM_REVISION": REVISION},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{steps.partition(',')[0]}, ranks=2, ok" in done.stdout
        return json.loads(out.read_text())

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(run, ("processes,topology", "latency,faults"))
    ran = [entry for entry in one["steps"] + other["steps"] if entry["verdict"] != "left out"]
    return {**one, "good": one["good"] and other["good"], "steps": ran}


def step(told: dict, name: str) -> dict:
    return next(one for one in told["steps"] if one["step"] == name)


def test_a_run_on_the_cpu_is_right_and_complete(told):
    assert (told["complete"], told["good"]) == (True, True)
    steps = [one for one in jobs.STEPS if one != "threads"]
    assert sorted(one["step"] for one in told["steps"]) == sorted(steps)
    assert {(one["verdict"], one["exit_code"]) for one in told["steps"]} == {("ok", 0)}
    assert told["provenance"]["source"]["revision"] == REVISION
    assert not re.search(r"[\" ]/(tmp|home|root|usr)/", json.dumps(told))


def check_counts(found: dict) -> None:
    """Two ranks have made one call of every case, under two protocols."""
    assert (found["calls"], found["mismatches"], found["transport"]) == (76, 0, "host_shm")
    chosen = cases.operations(2, (1, 8))
    assert len(chosen) == 19
    counted = {(case["op"], case["rows"], case["protocol"]) for case in found["cases"]}
    assert counted == {(*one, protocol) for one in chosen for protocol in ("push", "pull")}
    assert {case["calls"] for case in found["cases"]} == {2}
    assert set(found["left_out"]) == {"captured", "tagged"}


def test_every_operation_is_checked_between_processes(told):
    check_counts(step(told, "processes")["figures"])


def test_every_operation_is_checked_between_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    out = tmp_path / "out.json"
    (job,) = jobs.jobs(Request("cpu", (2,), rounds=1, only=("threads",)))[1:2]
    assert job.command[:3] == ("python", "tools/qualify/child.py", "threads")
    command = [str(out) if part == OUT else part for part in job.within(60.0).command]
    assert child.main(command[2:]) == 0
    check_counts(json.loads(out.read_text()))


def test_latencies_stand_beside_those_of_gloo(told):
    found = step(told, "latency")["figures"]
    assert set(found["left_out"]) == {"ours, overlapping", "symmetric memory"}
    assert len(found["cases"]) == 6
    for case in found["cases"]:
        ours, gloo = case["contenders"]
        assert (ours["name"], gloo["name"]) == ("ours", "gloo")
        assert ours["correct"]
        assert gloo["correct"]
        assert len(ours["samples_us"]) == len(gloo["samples_us"]) == 11
        time = gloo["median_us"] / ours["median_us"]
        assert gloo["ratio"] == {"of": "gloo", "to": "ours", "time": pytest.approx(time, abs=1e-3)}


def test_topology_and_faults_are_in_the_report(told):
    assert step(told, "topology")["figures"]["host"]["format"].startswith("pcie_comm")
    rounds = step(told, "faults")["figures"]["rounds"]
    assert [one["plan"]["kind"] for one in rounds] == ["kill", "stop", "mismatch"]


# --- what must be noticed ------------------------------------------------------------------------


def test_control_a_wrong_byte_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    out = tmp_path / "out.json"
    options = ["threads", "--world", "2", "--rounds", "1", "--control", "wrong_byte"]
    assert child.main([*options, "--out", str(out)]) == 1
    found = json.loads(out.read_text())
    assert {(case["calls"], case["mismatches"]) for case in found["cases"]} == {(2, 1)}
    assert found["failure"] == "38 of 76 calls are wrong"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return what runs the program with given jobs, and returns its exit code and report."""

    def with_jobs(*given: Job, options: tuple[str, ...] = ()) -> tuple[int, dict]:
        known = {"gpu_count": 0}
        monkeypatch.setattr(program, "provenance", lambda device: (known, ""))
        monkeypatch.setattr(program, "jobs", lambda request: list(given))
        monkeypatch.setattr(program.signal, "signal", lambda *ignored: None)
        out = tmp_path / "report.json"
        code = program.main(["--device", "cpu", "--out", str(out), *options])
        return code, json.loads(out.read_text())

    return with_jobs


def python(text: str, step: str = "threads", limit_s: float = 60.0) -> Job:
    return Job(step, ("python", "-c", text, OUT), 2, limit_s)


WRITES = "import sys; open(sys.argv[1], 'w').write('{\"failure\": \"%s\"}'); sys.exit(%d)"


def test_a_job_that_fails_is_reported_and_the_next_one_runs(run):
    dies = python("raise SystemExit('no such thing in /some/where/else.py')")
    code, told = run(dies, python(WRITES % ("2 of 9 calls are wrong", 1)), python(WRITES % ("", 0)))
    assert (code, told["complete"], told["good"]) == (1, True, False)
    assert [one["verdict"] for one in told["steps"]] == ["failed", "failed", "ok"]
    assert told["steps"][0]["why"] == "exit code 1, it has written no figures"
    assert told["steps"][0]["said"] == "no such thing in else.py\n"
    assert told["steps"][1]["why"] == "2 of 9 calls are wrong"


def test_a_job_that_hangs_is_ended_with_all_that_it_started(run, tmp_path):
    file = tmp_path / "pid"
    text = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *ignored: sys.exit(0))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
open({str(file)!r}, "w").write(str(child.pid))
time.sleep(100)
"""
    started = time.monotonic()
    code, told = run(python(text, limit_s=0.7))
    assert time.monotonic() - started < 10
    assert (code, told["complete"], told["steps"][0]["exit_code"]) == (1, True, None)
    assert told["steps"][0]["why"] == "ended after its 0.7 s"
    status = Path(f"/proc/{file.read_text()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_what_there_is_no_time_for_is_not_complete(run):
    code, told = run(python(WRITES % ("", 0)), options=("--limit", "5"))
    assert (code, told["complete"], told["good"]) == (1, False, False)
    assert told["steps"][0]["verdict"] == "not reached"


def test_a_run_of_nothing_is_not_good(run):
    code, told = run(Job("threads", left_out="for a reason"))
    assert (code, told["complete"], told["good"]) == (1, True, False)
    assert told["steps"][0]["why"] == "for a reason"


def test_faults_that_were_not_as_they_must_be():
    bad = {"rounds": [{"faults": []}, {"faults": ["rank 1 hung"]}], "good": 1}
    outcome = runner.Outcome(1, 2.0, json.dumps(bad), "", "")
    found = report.entry(Job("faults", ("python",), 2), False, outcome)
    assert (found["verdict"], found["why"]) == ("failed", "1 of 2 rounds: rank 1 hung")
    none = runner.Outcome(0, 2.0, '{"rounds": []}', "", "")
    assert report.entry(Job("faults", ("python",), 2), False, none)["verdict"] == "failed"


def test_what_the_doctor_finds_on_a_host_is_told_and_fails_nothing(told):
    host = step(told, "topology")["figures"]["host"]
    assert codec.from_json(json.dumps(host), "the report").gpus is not None
    job = Job("topology", ("python",), prints=False)
    found = report.entry(job, False, runner.Outcome(1, 2.0, json.dumps(host), "", ""))
    assert (found["verdict"], found["exit_code"]) == ("ok", 1)
    assert "errors found on this host" in report.line(found)
    assert report.entry(job, False, runner.Outcome(2, 2.0, "", "", "said"))["verdict"] == "failed"


def test_no_paths_and_names_of_this_machine():
    text = f'File "{ROOT}/tools/x.py", in GPU-0a1b2c3d-4e5f, /opt/some/lib/torch/y.so: 3/4 of a/b'
    assert runner.clean([text]) == ['File "tools/x.py", in GPU, y.so: 3/4 of a/b']


# --- which jobs there are ------------------------------------------------------------------------


def chosen(**facts) -> list[Job]:
    return jobs.jobs(Request(**{"device": "cuda", "ranks": (2, 4, 8), "gpus": 4, **facts}))


def of(found: list[Job], name: str) -> list[tuple[int, str]]:
    return [(job.ranks, job.left_out) for job in found if job.step == name]


def test_ranks_beyond_the_gpus_are_left_out_with_a_reason():
    found = chosen()
    why = "8 ranks want 8 GPUs, found 4; --share lets them share"
    assert of(found, "processes") == of(found, "latency") == [(2, ""), (4, ""), (8, why)]
    assert of(found, "threads") == [(4, ""), (16, "")]
    assert of(found, "faults") == [(4, "")]
    assert [job.step for job in chosen(gpus=8)][:4] == ["processes"] * 3 + ["threads"]
    assert of(chosen(gpus=1), "faults")[0][1].startswith("no world of (2, 4, 8) fits 1")


def test_ranks_may_share_one_gpu():
    request = Request("cuda", (2,), gpus=1, share=True)
    found = jobs.jobs(request)
    assert not any(job.left_out for job in found)
    assert request.shares(2)
    commands = {job.step: job.command for job in found}
    assert "--shared" in commands["latency"]
    assert ("cuda_ipc" in commands["faults"], "4000" in commands["processes"]) == (True, True)


def test_steps_and_limits():
    found = chosen(only=("faults",), limit_s=30.0)
    assert [job.step for job in found if not job.left_out] == ["faults"]
    job = found[-1].within(20.0)
    assert job.limit_s == 20.0
    assert job.command[job.command.index("--seconds") + 1] == "12"
    plain = next(job for job in chosen(has_typer=False) if job.step == "topology")
    assert plain.command[1] == "tools/probe_topology.py"
    with pytest.raises(ValueError, match="'sleep' is none of"):
        jobs.steps_of("faults,sleep")
    with pytest.raises(ValueError, match="world sizes"):
        jobs.ranks_of("2,17")


# --- figures -------------------------------------------------------------------------------------


def test_counts_add_up_and_ranks_must_have_drawn_alike():
    line = {"op": "a", "rows": 1, "protocol": "push", "mode": "eager", "calls": 3, "digest": 7}
    lines = [{**line, "rank": 0, "mismatches": 1}, {**line, "rank": 1, "mismatches": 0}]
    found = figures.counts(lines)
    assert (found["calls"], found["mismatches"], found["drawn_alike"]) == (6, 1, True)
    assert not figures.counts([*lines, {**line, "digest": 8, "mismatches": 0}])["drawn_alike"]


def test_a_sample_is_that_of_the_slowest_rank():
    def line(*samples):
        pairs = zip(("ours", "NCCL"), samples, strict=True)
        sides = [{"name": name, "samples_ns": some, "faults": []} for name, some in pairs]
        return {"op": "a", "rows": 1, "contenders": sides}

    lines = [line([1000, 3000, 2000], [9000] * 3), line([2000, 1000, 4000], [6000] * 3)]
    (case,) = figures.latencies(lines, 2)
    assert case["contenders"][0]["samples_us"] == [2.0, 3.0, 4.0]
    assert case["contenders"][1]["ratio"] == {"of": "NCCL", "to": "ours", "time": 3.0}
    assert figures.latencies(lines[:1], 2) == []


# --- what a GPU is needed for, with stand-ins ----------------------------------------------------


@pytest.mark.parametrize("op", ["all_gather_pair", "all_gather_pair_kimi_topk", "all_reduce"])
def test_replays_take_new_inputs_and_give_up_their_outputs(op):
    with local_world(1, "cpu") as world:
        group = world.groups[0]
        rounds = cases.rounds_of(op, 2, 5, group)
        rounds.refresh(0)
        lane = ranks.Lane(group, None, rounds)
        inputs, outputs = rounds.tensors(0)
        lane._fresh = [torch.empty_like(one) for one in inputs]
        lane._result = tuple(torch.zeros_like(one) for one in outputs)
        lane._graph = SimpleNamespace(replay=lambda: None)
        lane.play(5)
        assert rounds.mismatches() == 5
        calls = SimpleNamespace(replay=lambda: rounds.call(group, lane._fresh, lane._result))
        lane._graph = calls
        for lap in range(2):
            rounds.refresh(lap)
            lane.play(5)
            assert rounds.mismatches() == 0


def test_what_of_torch_refuses_is_left_out():
    def refuse(rank):
        raise RuntimeError("operation not permitted when stream is capturing")

    with local_world(1, "cpu") as world:
        timing = latency.Timing("cpu", (1,), 2, shared=False, alone=True, meeting="")
        left_out: dict[str, str] = {}
        bench = latency.Bench(timing, world.groups * 2, left_out)
        other = rivals.Contender("other", "-", refuse, [()], False)
        bench._makers.append(lambda work: other)
        found = bench.case("all_gather_pair", 1)
    assert [side["name"] for side in found["contenders"]] == ["ours"]
    assert left_out["other, all_gather_pair"].startswith("rank 0: RuntimeError: operation not")
    assert left_out["torch.distributed"] == "--alone"


@pytest.mark.parametrize("op", ["all_gather_pair", "all_gather_heads", "all_gather_pair_kimi_topk"])
def test_symmetric_memory_gathers_rightly(op):
    """Its buffers are of this process. Ranks run in turn: the third time all shards are there."""
    world_size, nbytes = 4, 1 << 20
    work = workload.make(op, 3, [torch.device("cpu")] * world_size)
    buffers = torch.zeros(2, world_size, nbytes // 4, dtype=torch.int32)

    class Handle:
        def __init__(self, slot):
            self.slot = slot

        def get_buffer(self, peer, shape, dtype, begin):
            count = shape[0] * shape[1]
            return buffers[self.slot, peer, begin : begin + count].view(shape)

        def barrier(self, channel):
            assert channel == self.slot

    memories = []
    for rank in range(world_size):
        memory = rivals.Symmetric.__new__(rivals.Symmetric)
        memory.rank, memory.world_size, memory._handles = rank, world_size, [Handle(0), Handle(1)]
        memories.append(memory)
    sides = [rivals.symmetric(memory, work) for memory in memories]
    for _ in range(3):
        for rank, side in enumerate(sides):
            side.enqueue(rank)
    assert work.faults([side.outputs[rank] for rank, side in enumerate(sides)], ours=False) == []
    buffers[0, 1, 0] ^= 1
    sides[0].enqueue(0)  # slot 1
    sides[0].enqueue(0)
    assert work.faults([sides[0].outputs[0]], ours=False) != []

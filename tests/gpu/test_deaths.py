"""Ranks of one GPU that are killed or stopped: who is told, how soon, and what goes on working."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import harness
import launcher
import pytest
import torch
from launcher import RanksFailedError, run_ranks
from lifetimes import PAIR, assert_eager, capture, enqueue, prepare
from mps_server import FEW_QUEUES, mps_server

from pcie_comm import CommError, Config, PcieDcpGroup, PeerTimeoutError, local_world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(110)]

TIMEOUT_S, SETUP_S, HEAD_START_S = 2.0, 20.0, 0.3
CONFIG = Config(timeout_s=TIMEOUT_S, setup_timeout_s=SETUP_S, slot_nbytes=1 << 16)
WITHIN_MS = 100
"""What docs/failure.md promises between a death and the errors of the others."""

Round = tuple[str, str, str]
"""Fate of the last rank, kill or stop; where it meets it, call, replay or spinning; transport."""


@pytest.fixture
def mps(tmp_path):
    """Yield the environment of the clients of a server that no other test uses."""
    with mps_server(tmp_path) as environment:
        yield environment


# --- in the ranks' processes ---------------------------------------------------------------------


def shards(rank: int, turn: int) -> list[torch.Tensor]:
    """Return what a rank brings to a call, on the CPU."""
    start = 1000.0 * (16 * turn + rank)
    return [torch.arange(2.0 * width).view(2, width) + start for width in (24, 10)]


def make_call(group: PcieDcpGroup, turn: int) -> None:
    """Make a call, wait for it, compare every byte."""
    gathered = group.all_gather_pair(*(one.to(harness.DEVICE) for one in shards(group.rank, turn)))
    torch.cuda.synchronize()
    group.check()
    everyone = [shards(rank, turn) for rank in range(group.world_size)]
    for got, parts in zip(gathered, zip(*everyone, strict=True), strict=True):
        assert torch.equal(got.cpu(), torch.cat(parts, dim=1))


def wait_for_error(group: PcieDcpGroup, told: dict[str, Any]) -> None:
    """Wait for what was enqueued and for the group's error; note both."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        told["context"] = str(error).partition("\n")[0]
    deadline = time.monotonic() + TIMEOUT_S + 5
    while time.monotonic() < deadline:
        try:
            group.check()
        except CommError as error:
            told["at_ns"] = time.monotonic_ns()
            told.update(error=type(error).__name__, peer=error.peer, text=str(error))
            told["exit_code"] = getattr(error, "exit_code", None)
            return
        time.sleep(0.001)


def meet(group: PcieDcpGroup, number: int, plan: Round, folder: Path) -> dict[str, Any]:
    """Play one round up to its error; return what this rank saw. The last rank is the victim."""
    fate, where, _ = plan
    victim = group.rank == group.world_size - 1
    first, second = (one.to(harness.DEVICE) for one in shards(group.rank, 9))
    graph = torch.cuda.CUDAGraph()
    if where == "replay":
        with torch.cuda.graph(graph):
            group.all_gather_pair(first, second)
    told: dict[str, Any] = {"error": "", "rank": group.rank}
    pids = [int(pid) for pid in group._bootstrap.all_gather(b"%d" % os.getpid(), SETUP_S)]
    if where == "spinning" and group.rank != 1:  # rank 1 does not come: all others wait for it
        group.all_gather_pair(first, second)
    if victim:
        time.sleep(HEAD_START_S)
        (folder / f"{number}.ns").write_text(str(time.monotonic_ns()))
        os.kill(os.getpid(), signal.SIGKILL if fate == "kill" else signal.SIGSTOP)
    elif where == "call":
        group.all_gather_pair(first, second)
    elif where == "replay":
        graph.replay()
    if not victim:
        wait_for_error(group, told)
    if fate == "stop" and group.rank == 0:
        time.sleep(0.2)  # the others' limits end, too
        os.kill(pids[-1], signal.SIGCONT)
    return told


def live_on(group: PcieDcpGroup, told: dict[str, Any]) -> None:
    """Close, and use torch on the same GPU; note what fails."""
    started = time.monotonic()
    try:
        group.close()
        square = torch.full((256, 256), 2.0, device=harness.DEVICE)
        assert float((square @ square).sum()) == 4.0 * 256**3
    except (CommError, RuntimeError) as error:
        told["context"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    told["close_s"] = time.monotonic() - started


def survive(rank: int, world_size: int, rounds: tuple[Round, ...], folder: Path) -> None:
    """Play all rounds, with one rank less after each that kills, and build one group more."""
    torch.cuda.set_device(0)
    members, told = list(range(world_size)), {}
    for number in range(len(rounds) + 1):
        plan = rounds[min(number, len(rounds) - 1)]
        try:
            group = PcieDcpGroup(members, harness.DEVICE, transport=plan[2], config=CONFIG)
            group.prepare(PAIR)
            group._bootstrap.all_gather(b"prepared", SETUP_S)
            for turn in range(3):
                make_call(group, turn)
        except (CommError, RuntimeError) as error:
            told["next"] = f"{type(error).__name__}: {error}".partition("\n")[0]
            note(told, number - 1, folder)
            return
        if number == len(rounds):
            group.close()
            return
        told = meet(group, number, plan, folder)
        live_on(group, told)
        note(told, number, folder)
        members = members[:-1] if plan[0] == "kill" else members


def note(told: dict[str, Any], number: int, folder: Path) -> None:
    """Write down what this rank saw in a round, unless it was the victim."""
    if told["error"]:
        (folder / f"{number}.{told['rank']}.json").write_text(json.dumps(told))


# --- the tests -----------------------------------------------------------------------------------


def play(
    world_size: int, rounds: tuple[Round, ...], environment: dict[str, str], folder: Path
) -> list[list[dict[str, Any]]]:
    """Play rounds; return, for each, what the ranks saw that it was not about, delays in ms."""
    killed = sum(fate == "kill" for fate, _, _ in rounds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "GRACE_S", 60.0)  # the survivors have more to do
        with pytest.raises(RanksFailedError) as caught:
            run_ranks(survive, world_size, timeout_s=80, args=(rounds, folder), env=environment)
    dead = range(world_size - killed, world_size)
    assert caught.value.reports == dict.fromkeys(dead, "died with exit code -9")
    told = []
    for number in range(len(rounds)):
        fault_ns = int((folder / f"{number}.ns").read_text())
        files = sorted(folder.glob(f"{number}.*.json"))
        told.append([json.loads(file.read_text()) for file in files])
        for seen in told[-1]:
            seen["ms"] = (seen.pop("at_ns") - fault_ns) / 1e6
    return told


def assert_told(seen: list[dict[str, Any]], error: str, peer: int) -> list[float]:
    """Check that all ranks below the victim report the same error; return the delays."""
    found = [(one["rank"], one["error"], one["peer"]) for one in seen]
    assert found == [(rank, error, peer) for rank in range(peer)], seen
    return [one["ms"] for one in seen]


ROUNDS: tuple[Round, ...] = (
    ("stop", "call", "cuda_ipc"),
    ("kill", "call", "cuda_ipc"),
    ("kill", "replay", "host_pinned"),
)


def test_b08_stopped_and_killed_ranks_under_mps(mps, tmp_path, figures):
    """Four processes; one is stopped and goes on, then one is killed in each round."""
    told = play(4, ROUNDS, mps, tmp_path)
    waited = assert_told(told[0], "PeerTimeoutError", 3)
    deaths = assert_told(told[1], "PeerDiedError", 3) + assert_told(told[2], "PeerDiedError", 2)
    codes = [one["exit_code"] for seen in told[1:] for one in seen]
    figures(
        kill_to_error_ms=[round(delay, 2) for delay in deaths],
        median_ms=round(statistics.median(deaths), 2),
        exit_codes=codes,
        stop_to_error_ms=[round(delay, 1) for delay in waited],
        close_s=[round(one["close_s"], 3) for seen in told for one in seen],
    )
    assert all("context" not in one and "next" not in one for seen in told for one in seen), told
    assert set(codes) <= {-9, None}
    limit_ms = 1000 * (TIMEOUT_S - HEAD_START_S)
    assert all(limit_ms - 500 < delay < limit_ms + 500 for delay in waited)
    assert max(deaths) < WITHIN_MS
    assert not list(Path("/dev/shm").glob("pcie_comm.*"))


def test_b08_a_killed_rank_without_mps(tmp_path, figures):
    """Time slices: the death of a process is nothing to the contexts of others."""
    ((seen,),) = play(2, (("kill", "call", "cuda_ipc"),), FEW_QUEUES, tmp_path)
    (delay,) = assert_told([seen], "PeerDiedError", 1)
    figures(kill_to_error_ms=round(delay, 2), exit_code=seen["exit_code"])
    assert "context" not in seen and "next" not in seen
    assert delay < WITHIN_MS


def pair_of_ranks(rank: int, world_size: int) -> None:
    torch.cuda.set_device(0)
    with PcieDcpGroup(world_size, harness.DEVICE, transport="cuda_ipc", config=CONFIG) as group:
        make_call(group, 1)


def test_b08_a_rank_that_is_killed_while_its_own_kernel_waits(mps, tmp_path, figures):
    """NVIDIA leaves open what becomes of the other clients' contexts then. If they are lost, the
    error still names the rank, what fails then says so, and new processes work."""
    (seen,) = play(3, (("kill", "spinning", "cuda_ipc"),), mps, tmp_path)
    lost = [one.get("context") or one.get("next", "") for one in seen]
    delays = [round(one["ms"], 2) for one in seen]
    figures(kill_to_error_ms=delays, contexts_survived=not any(lost), lost=lost)
    assert_told(seen, "PeerDiedError", 2)
    assert max(delays) < WITHIN_MS
    if any(lost):
        run_ranks(pair_of_ranks, 2, timeout_s=40, env=mps)


@pytest.mark.parametrize("protocol", ["push", "tagged"])
def test_a_look_up_with_ids_of_a_call_that_gave_up_does_not_fault(protocol):
    """In the launch that gives up and in the one after it; a fault would cost the context."""
    config = Config(timeout_s=0.3, protocol=protocol)
    with local_world(2, harness.DEVICE, config=config) as world:
        group, stream = world.groups[0], world.streams[0]
        down = torch.randn(64, 1792, device="cuda").bfloat16()
        logits = torch.randn(64, 448, device="cuda")
        bias, table = torch.randn(896, device="cuda"), torch.randn(896, device="cuda")
        out = (
            torch.empty(64, 3584, dtype=torch.bfloat16, device="cuda"),
            torch.empty(64, 16, device="cuda"),
            torch.empty(64, 16, dtype=torch.int32, device="cuda"),
        )
        group.prepare("all_gather_pair_kimi_topk")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            group.all_gather_pair_kimi_topk(down, logits, bias, out=out)
            found = table[out[2].long()]
        for _ in range(2):
            out[2].fill_(1 << 30)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(found, table[out[2].long()])
            with pytest.raises(PeerTimeoutError):
                group.check()


def test_torch_goes_on_after_a_timeout():
    """The context survives, with all that torch does in it; so does a next group."""
    config = Config(timeout_s=0.5, slot_nbytes=1 << 18)
    with local_world(2, harness.DEVICE, config=config) as world:
        prepare(world)
        batch = harness.make_batch(PAIR, 1, 2, 40)
        lonely = capture([batch], world.groups[0], 0, world.streams[0])
        for _ in range(3):
            with torch.cuda.stream(world.streams[0]):
                lonely.replay()
        torch.cuda.synchronize()
        with pytest.raises(PeerTimeoutError):
            world.groups[0].check()
        square = torch.randn(512, 512, dtype=torch.float64)
        found = square.cuda() @ square.cuda()
        torch.testing.assert_close(found.cpu(), square @ square)
        assert int(torch.ones(1 << 28, dtype=torch.uint8, device="cuda").sum()) == 1 << 28
        counter, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            counter.add_(1)
        for _ in range(5):
            graph.replay()
        assert counter.tolist() == [5.0] * 3
        with local_world(2, harness.DEVICE, config=config) as anew:
            prepare(anew)
            assert_eager(anew.groups, anew.streams, harness.make_batch(PAIR, 20, 2, 3))
        with torch.cuda.stream(world.streams[1]), pytest.raises(CommError):
            enqueue(batch, world.groups[0], 0)

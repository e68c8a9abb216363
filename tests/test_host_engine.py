"""The protocol as the host speaks it: slots, bounded waits, and what a failure leaves behind."""

from __future__ import annotations

import math
import random
import threading
import time

import pytest
import torch
from launcher import run_threads
from leaks import own_mappings
from worlds import Held, build_each, close_each, engine_of, hook_waits, on_each, pair_of, small

from pcie_comm import (
    BrokenError,
    CommError,
    MismatchError,
    PcieDcpGroup,
    PeerAbortedError,
    PeerTimeoutError,
    host_engine,
    local_world,
)
from pcie_comm.host_engine import HostEngine

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TIMEOUT_S = 0.3
MARGIN_S = 1.0
"""What a loaded machine may add to a limit."""

PROTOCOLS = pytest.mark.parametrize("protocol", ["push", "pull"])


def values_of(result) -> tuple[float, float]:
    """Return what rank 0's and rank 1's shards of a gathered pair hold; NaN where they are torn."""
    first = result[0][0]
    halves = first[: len(first) // 2], first[len(first) // 2 :]
    return tuple(float(h[0]) if bool((h == h[0]).all()) else math.nan for h in halves)


# --- two slots -----------------------------------------------------------------------------------


def call_twice_while_rank_1_is_held(monkeypatch, protocol) -> list[list[tuple[float, float]]]:
    """Two calls back to back; rank 1 reads the first when rank 0 has staged the second.

    Call n of rank r carries 10 * n + r. Rank 0 overwrites its inputs as soon as a call returns.
    """
    arrived, second_is_staged = Held(), Held()

    def before(engine: HostEngine) -> None:
        if (engine.rank, engine.epoch) == (0, 2):
            second_is_staged.open()

    def after(engine: HostEngine) -> None:
        if (engine.rank, engine.epoch) == (1, 1):
            arrived.open()
            second_is_staged.wait()

    hook_waits(monkeypatch, before=before, after=after)

    def on_rank(group: PcieDcpGroup) -> list[tuple[float, float]]:
        inputs = pair_of(0.0, 64)
        results = []
        for call in (1, 2):
            inputs[0].fill_(10 * call + group.rank)
            results.append(group.all_gather_pair(*inputs))
            inputs[0].fill_(-1.0)
            arrived.wait()
        return [values_of(result) for result in results]

    with local_world(2, "cpu", config=small(protocol=protocol)) as world:
        return world.run(on_rank)


@PROTOCOLS
def test_b05_a_slow_rank_reads_the_call_it_is_in(protocol, monkeypatch):
    calls = [(10.0, 11.0), (20.0, 21.0)]
    assert call_twice_while_rank_1_is_held(monkeypatch, protocol) == [calls, calls]


@PROTOCOLS
def test_b05_one_slot_gives_a_slow_rank_the_next_calls_bytes(protocol, monkeypatch):
    """Negative control: the same calls, with one slot instead of two."""
    monkeypatch.setattr(host_engine, "slot_of", lambda epoch: 0)
    rank_0, rank_1 = call_twice_while_rank_1_is_held(monkeypatch, protocol)
    assert rank_0[0] == (10.0, 11.0)
    assert rank_1[0] == (20.0, 11.0), "rank 1 found call 2's bytes of rank 0 in call 1"


@PROTOCOLS
def test_b05_calls_back_to_back_with_ranks_that_lag(protocol, monkeypatch):
    """Outputs are poisoned first; every rank dawdles between arriving and reading, now and then."""
    dawdle = random.Random(5)

    def after(engine: HostEngine) -> None:
        if dawdle.random() < 0.05:
            time.sleep(0.002)

    hook_waits(monkeypatch, after=after)

    def on_rank(group: PcieDcpGroup) -> int:
        inputs, wrong = pair_of(0.0, 16), 0
        out = torch.empty(1, 48), torch.empty(1, 48)
        for call in range(200):
            for tensor in inputs:
                tensor.fill_(1000 * group.rank + call)
            for tensor in out:
                tensor.fill_(math.nan)
            group.all_gather_pair(*inputs, out=out)
            for tensor in inputs:
                tensor.fill_(-1.0)
            want = torch.tensor([1000.0 * rank + call for rank in range(3)]).repeat_interleave(16)
            wrong += sum(not torch.equal(tensor[0], want) for tensor in out)
        return wrong

    with local_world(3, "cpu", config=small(protocol=protocol)) as world:
        assert world.run(on_rank) == [0, 0, 0]


# --- a peer that does not come -------------------------------------------------------------------


@PROTOCOLS
@pytest.mark.parametrize("made", [0, 3])
def test_a_missing_peer_ends_in_a_timeout_that_names_it(protocol, made):
    with local_world(2, "cpu", config=small(timeout_s=TIMEOUT_S, protocol=protocol)) as world:
        group = world.groups[0]
        for _ in range(made):
            world.run(lambda g: g.all_gather_pair(*pair_of(1.0)))
        started = time.monotonic()
        with pytest.raises(PeerTimeoutError) as caught:
            group.all_gather_pair(*pair_of(1.0))
        elapsed = time.monotonic() - started
        error = caught.value
        assert TIMEOUT_S <= elapsed < TIMEOUT_S + MARGIN_S
        assert TIMEOUT_S * 1e9 <= error.elapsed_ns <= elapsed * 1e9
        assert (error.rank, error.peer, error.op) == (0, 1, "all_gather_pair")
        assert (error.epoch, error.wanted) == (made + 1, made + 1)
        assert error.seen == max(made - 1, 0), "what the peer left in this slot"
        assert f"wanted epoch={made + 1}" in str(error)
        assert isinstance(error, TimeoutError)


def test_after_a_timeout_calls_fail_at_once_and_check_says_why():
    out = torch.full((1, 8), 7.0), torch.full((1, 8), 7.0)
    with local_world(2, "cpu", config=small(timeout_s=TIMEOUT_S)) as world:
        group, healthy = world.groups
        group.check()
        with pytest.raises(PeerTimeoutError) as caught:
            group.all_gather_pair(*pair_of(1.0), out=out)
        facts, text = vars(caught.value), str(caught.value)
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(BrokenError, match="PeerTimeoutError") as broken:
                group.all_gather_pair(*pair_of(1.0), out=out)
            assert time.monotonic() - started < TIMEOUT_S
            assert isinstance(broken.value.__cause__, PeerTimeoutError)
            assert vars(broken.value.__cause__) == facts
            assert broken.value.rank == 0
        for _ in range(3):
            with pytest.raises(PeerTimeoutError) as checked:
                group.check()
            assert vars(checked.value) == facts
            assert str(checked.value) == text
        assert out[0].tolist() == [[7.0] * 8], "a call that failed wrote to its outputs"
        healthy.check()


def test_a_late_peer_completes_that_call_and_fails_in_the_next():
    """docs/errors.md: the ranks need not agree on which call failed."""
    with local_world(2, "cpu", config=small(timeout_s=TIMEOUT_S)) as world:
        with pytest.raises(PeerTimeoutError):
            world.groups[0].all_gather_pair(*pair_of(1.0))
        assert values_of(world.groups[1].all_gather_pair(*pair_of(2.0))) == (1.0, 2.0)
        with pytest.raises(PeerTimeoutError) as caught:
            world.groups[1].all_gather_pair(*pair_of(2.0))
        assert (caught.value.rank, caught.value.peer, caught.value.wanted) == (1, 0, 2)


def test_a_failed_group_can_be_closed_and_followed_by_another():
    broken = local_world(2, "cpu", config=small(timeout_s=TIMEOUT_S))
    with broken as world, pytest.raises(PeerTimeoutError):
        world.groups[0].all_gather_pair(*pair_of(1.0))
    with local_world(2, "cpu", config=small()) as world:
        results = world.run(lambda g: g.all_gather_pair(*pair_of(float(g.rank))))
        assert [values_of(result) for result in results] == [(0.0, 1.0)] * 2


def test_the_failure_that_a_group_remembers_keeps_no_slab_mapped():
    """A raised error has frames, and those have views of the slabs."""
    groups = build_each([{"config": small(timeout_s=TIMEOUT_S)}] * 2)
    with pytest.raises(PeerTimeoutError) as caught:
        groups[0].all_gather_pair(*pair_of(1.0))
    del caught
    close_each(groups)
    assert own_mappings() == []
    assert groups[0].describe()["closed"]


# --- abort and interrupt -------------------------------------------------------------------------


def test_abort_wakes_a_waiting_rank_and_breaks_later_calls():
    with local_world(2, "cpu", config=small(timeout_s=20.0)) as world:
        group = world.groups[0]
        threading.Timer(0.1, group.abort).start()
        started = time.monotonic()
        with pytest.raises(PeerAbortedError) as caught:
            group.all_gather_pair(*pair_of(1.0))
        assert time.monotonic() - started < 0.1 + MARGIN_S
        assert (caught.value.rank, caught.value.op, caught.value.epoch) == (0, "all_gather_pair", 1)
        with pytest.raises(BrokenError) as broken:
            group.all_gather_pair(*pair_of(1.0))
        assert isinstance(broken.value.__cause__, PeerAbortedError)
        with pytest.raises(PeerAbortedError):
            group.check()


def test_abort_before_a_call_breaks_every_lane():
    with local_world(2, "cpu", config=small()) as world:
        lane = world.run(lambda g: g.channel("draft"))[0]
        group = world.groups[0]
        group.abort()
        group.abort()
        for calls in (group, lane):
            with pytest.raises(BrokenError):
                calls.all_gather_pair(*pair_of(1.0))
        with pytest.raises(PeerAbortedError, match="the group was aborted"):
            group.check()
    group.abort()  # of a closed group: nothing to do, no error


def interrupt_call_2_of_rank_0(monkeypatch) -> tuple[Held, Held]:
    """Rank 1 reads call 1 when rank 0 has staged call 3; rank 0's wait in call 2 is interrupted.

    Returns the gate that rank 1 opens when it is about to read, and the one that it waits at.
    """
    arrived, third_is_staged = Held(), Held()

    def before(engine: HostEngine) -> None:
        if (engine.rank, engine.epoch) == (0, 2):
            raise KeyboardInterrupt
        if (engine.rank, engine.epoch) == (0, 3):
            third_is_staged.open()

    def after(engine: HostEngine) -> None:
        if (engine.rank, engine.epoch) == (1, 1):
            arrived.open()
            third_is_staged.wait()

    hook_waits(monkeypatch, before=before, after=after)
    return arrived, third_is_staged


def test_an_interrupted_call_poisons_its_channel(monkeypatch):
    """Rank 0 gave up call 2 before it knew that rank 1 had finished call 1."""
    arrived, gate = interrupt_call_2_of_rank_0(monkeypatch)

    def on_rank(group: PcieDcpGroup):
        first = group.all_gather_pair(*pair_of(10.0 + group.rank))
        if group.rank == 1:
            return values_of(first)
        arrived.wait()
        with pytest.raises(KeyboardInterrupt):
            group.all_gather_pair(*pair_of(20.0))
        with pytest.raises(BrokenError) as caught:
            group.all_gather_pair(*pair_of(30.0))
        gate.open()
        assert "interrupted by KeyboardInterrupt" in str(caught.value.__cause__)
        with pytest.raises(CommError, match="interrupted by KeyboardInterrupt"):
            group.check()
        return values_of(first)

    with local_world(2, "cpu", config=small()) as world:
        assert world.run(on_rank) == [(10.0, 11.0)] * 2


def test_without_the_poison_an_interrupted_call_would_reuse_a_slot(monkeypatch):
    """Negative control: the poison is wiped off, and rank 1 finds call 3's bytes in call 1."""
    arrived, _ = interrupt_call_2_of_rank_0(monkeypatch)

    def on_rank(group: PcieDcpGroup):
        engine = engine_of(group)
        first = group.all_gather_pair(*pair_of(10.0 + group.rank))
        if group.rank == 0:
            arrived.wait()
            with pytest.raises(KeyboardInterrupt):
                group.all_gather_pair(*pair_of(20.0))
            engine.broken[0], engine._failure = 0, None
        else:
            group.all_gather_pair(*pair_of(21.0))
        group.all_gather_pair(*pair_of(30.0 + group.rank))
        return values_of(first)

    with local_world(2, "cpu", config=small(protocol="push")) as world:
        assert world.run(on_rank) == [(10.0, 11.0), (30.0, 11.0)]


# --- ranks that make different calls -------------------------------------------------------------


def rows_of(count: int) -> torch.Tensor:
    return torch.zeros(count, 16)


DIFFERENT = {
    "rows 4 and 8": lambda g: g.all_gather_pair(*[rows_of(4 + 4 * g.rank)] * 2),
    "no rows on rank 1": lambda g: g.all_gather_pair(*[rows_of(1 - g.rank)] * 2),
    "widths": lambda g: g.all_gather_pair(torch.zeros(1, 4 + g.rank), torch.zeros(1, 4)),
    "dtypes": lambda g: g.all_gather_pair(
        torch.zeros(1, 4, dtype=(torch.float16, torch.bfloat16)[g.rank]), torch.zeros(1, 4)
    ),
    "operations": lambda g: (
        g.all_gather_heads(torch.zeros(1, 1, 4).half())
        if g.rank
        else g.all_gather_pair(*pair_of(0.0))
    ),
}


@PROTOCOLS
@pytest.mark.parametrize("call", DIFFERENT.values(), ids=DIFFERENT)
def test_b36_different_calls_are_a_mismatch_on_all_ranks(call, protocol):
    groups = build_each([{"config": small(protocol=protocol)}] * 2)
    started = time.monotonic()
    errors = on_each(groups, call)
    assert time.monotonic() - started < 5.0
    for rank, error in enumerate(errors):
        assert isinstance(error, MismatchError), error
        assert (error.rank, error.peer, error.epoch) == (rank, 1 - rank, 1)
        assert set(error.values) == {0, 1}
        assert error.values[0] != error.values[1]
        assert error.values == errors[0].values
    for error in on_each(groups, lambda g: g.all_gather_pair(*pair_of(1.0))):
        assert isinstance(error, BrokenError)
        assert isinstance(error.__cause__, MismatchError)
    close_each(groups)


def test_one_rank_of_three_makes_another_call():
    groups = build_each([{}] * 3)
    errors = on_each(groups, lambda g: g.all_gather_pair(*[rows_of(1 + (g.rank == 1))] * 2))
    assert [type(error) for error in errors] == [MismatchError] * 3
    assert [errors[0].peer, errors[2].peer] == [1, 1]
    assert errors[1].peer in (0, 2)  # whoever comes first
    close_each(groups)


def test_a_mismatch_is_seen_although_a_rank_between_is_late():
    groups = build_each([{"config": small(timeout_s=20.0)}] * 3)
    started = time.monotonic()
    errors = on_each(
        groups,
        lambda g: None if g.rank == 1 else g.all_gather_pair(*[rows_of(1 + g.rank)] * 2),
    )
    assert time.monotonic() - started < 5.0
    assert [type(error) for error in errors[::2]] == [MismatchError] * 2
    assert [error.peer for error in errors[::2]] == [2, 0]
    close_each(groups)


def test_b36_no_call_has_too_many_rows_or_bytes():
    """It takes several epochs. Ranks that disagree about rows are told at once, in the first."""
    config = small(max_rows=8, slot_nbytes=4096, timeout_s=TIMEOUT_S)
    with local_world(2, "cpu", config=config) as world:
        for rows, width, epochs in ((9, 1, 1), (8, 64, 2), (1, 513, 2), (100, 100, 20)):
            before = engine_of(world.groups[0]).epoch
            first = torch.randn(rows, width)
            pairs = world.run(lambda g, x=first: g.all_gather_pair(x + g.rank, x[:, :1]))
            for gathered, second in pairs:
                assert torch.equal(gathered, torch.cat([first, first + 1], 1))
                assert torch.equal(second, first[:, :1].repeat(1, 2))
            assert engine_of(world.groups[0]).epoch == before + epochs
        errors = run_threads(
            lambda rank: world.groups[rank].all_gather_pair(*[rows_of(2000 + 1000 * rank)] * 2), 2
        )
        assert [type(error) for error in errors] == [MismatchError] * 2


def test_the_router_of_a_rank_is_part_of_its_call():
    from pcie_comm import KIMI_K3, RouterSpec

    specs = (KIMI_K3, RouterSpec(896, 16, numerics="vllm"))
    down, router = torch.zeros(1, 1792, dtype=torch.bfloat16), torch.zeros(1, 448)
    groups = build_each([{}] * 2)
    errors = on_each(
        groups,
        lambda g: g.all_gather_pair_kimi_topk(down, router, torch.zeros(896), spec=specs[g.rank]),
    )
    assert [type(error) for error in errors] == [MismatchError] * 2
    close_each(groups)

"""Contenders take turns, and what is timed on a CPU is the slowest rank."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import small

from pcie_comm import local_world
from pcie_comm.bench.measure import ThreadStage, take_turns, turn


def test_sample_i_starts_with_contender_i_modulo_their_number():
    assert [turn(3, sample) for sample in range(4)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


@given(st.integers(1, 20), st.integers(0, 100))
def test_every_contender_runs_once_in_a_sample(count, sample):
    order = turn(count, sample)
    assert sorted(order) == list(range(count))
    assert order[0] == sample % count
    assert all((b - a) % count == 1 % count for a, b in pairwise(order))


@given(st.integers(1, 6), st.integers(1, 24), st.integers(0, 4))
def test_samples_belong_to_their_contender_and_warm_ups_do_not_count(count, samples, warm_ups):
    ran: list[int] = []

    def contender(place):
        def take():
            ran.append(place)
            return 1000.0 * place + ran.count(place)

        return take

    taken = take_turns([contender(place) for place in range(count)], samples, warm_ups)
    rounds = [ran[start : start + count] for start in range(0, len(ran), count)]
    assert len(rounds) == samples + warm_ups
    assert rounds[warm_ups:] == [turn(count, sample) for sample in range(samples)]
    numbers = range(warm_ups + 1, warm_ups + samples + 1)
    assert taken == [[1000.0 * place + n for n in numbers] for place in range(count)]


def test_each_contender_goes_first_equally_often():
    first = Counter(turn(7, sample)[0] for sample in range(21))
    assert set(first.values()) == {3}


@pytest.mark.parametrize("ops", [1, 3])
def test_wall_time_is_that_of_the_slowest_rank_over_the_operations(ops):
    slow_s, calls = 0.02, Counter()

    def enqueue(rank):
        calls[rank] += 1
        time.sleep(slow_s if rank == 1 else 0)

    with local_world(3, "cpu", config=small()) as world:
        elapsed_ns = ThreadStage(world, ops).take_of(enqueue)()
    assert calls == {0: ops, 1: ops, 2: ops}
    assert slow_s * 1e9 <= elapsed_ns < 20 * slow_s * 1e9

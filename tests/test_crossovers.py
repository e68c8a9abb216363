"""Limits of protocols: what measured times speak for, and what a report's file may say."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcie_comm.crossovers import (
    BUILT_IN,
    PINNED,
    PULL_MARGIN,
    REPORT_FORMAT,
    VRAM,
    Crossovers,
    Limits,
    cost,
    derive_limits,
    from_report,
)
from pcie_comm.errors import InvalidArgumentError
from pcie_comm.policy import choose_protocol


def point(size, tagged, push, pull=None):
    times = {"tagged": tagged, "push": push}
    return size, times if pull is None else times | {"pull": pull}


# --- from measured times -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "limits"),
    [
        ([point(10, 1, 2), point(20, 2, 3), point(40, 5, 4)], Limits(20)),
        ([point(10, 1, 2), point(20, 2, 3)], Limits(20)),
        ([point(10, 2, 1), point(20, 3, 2)], Limits(0)),
        ([point(10, 1, 1)], Limits(0)),
        ([point(10, 1, 2, 3), point(20, 3, 2, 3), point(40, 5, 4, 3)], Limits(10, 20)),
        ([point(10, 3, 2, 1), point(20, 3, 2, 1)], Limits(0, 0)),
        ([point(10, 1, 2, 3), point(20, 1, 1.02, 1)], Limits(20)),
        ([point(10, 3, 1, 1 / 1.04)], Limits(0)),
        ([(10, {"tagged": 1.0}), (20, {"push": 1.0})], None),
        ([], None),
    ],
)
def test_exact_limits(points, limits):
    assert derive_limits(points) == limits


def test_one_odd_figure_does_not_move_the_limit():
    points = [point(size, 1 if size != 30 else 1.1, 1 if size == 30 else 2) for size in (10, 30)]
    points += [point(size, 1, 2) for size in (50, 70)] + [point(90, 3, 2)]
    assert derive_limits(points) == Limits(70)


def test_pull_is_left_out_where_it_was_not_measured_everywhere():
    points = [point(10, 3, 2), point(20, 3, 2, 1)]
    assert derive_limits(points) == Limits(0)


times = st.floats(0.5, 500.0)
measured = st.lists(
    st.tuples(
        st.integers(1, 1 << 20),
        st.fixed_dictionaries({"tagged": times, "push": times, "pull": times}),
    ),
    min_size=1,
    max_size=12,
)


@given(measured, st.integers(0, 1 << 20), st.none() | st.integers(0, 1 << 20))
def test_no_other_limits_are_faster(points, tagged, more):
    derived = derive_limits(points)
    other = Limits(tagged, None if more is None else tagged + more)
    assert cost(points, derived) <= cost(points, other) + 1e-6


@given(measured)
def test_the_cost_is_that_of_the_protocols_that_are_chosen(points):
    limits = derive_limits(points)
    assert limits.push_nbytes is None or limits.push_nbytes >= limits.tagged_nbytes
    total = 0.0
    for size, by_protocol in points:
        chosen = choose_protocol("auto", size, 1, 1 << 30, limits)
        total += math.log(by_protocol[chosen] * (PULL_MARGIN if chosen == "pull" else 1))
    assert total == pytest.approx(cost(points, limits), abs=1e-6)


@given(measured, st.floats(0.1, 10.0))
def test_limits_do_not_depend_on_the_unit_of_time(points, factor):
    scaled = [(size, {name: t * factor for name, t in by.items()}) for size, by in points]
    ours, theirs = derive_limits(points), derive_limits(scaled)
    assert cost(points, theirs) == pytest.approx(cost(points, ours), abs=1e-6)


# --- of a group --------------------------------------------------------------------------------


@pytest.mark.parametrize("sharers", [1, 2, 8, 16])
def test_ranks_that_share_a_link_to_pinned_memory_share_its_limits(sharers):
    crossovers = Crossovers(vram=Limits(1000, 2000), pinned=Limits(800, 4000))
    for transport in ("host_shm", "cuda_local", "cuda_ipc"):
        assert crossovers.limits(transport, sharers) == Limits(1000, 2000)
    assert crossovers.limits("host_pinned", sharers) == Limits(800 // sharers, 4000 // sharers)
    built_in = Limits(163_840 // sharers, None, 65_536 // sharers, 262_144 // sharers)
    assert Crossovers().limits("host_pinned", sharers) == built_in


def test_ranks_compare_numbers_and_not_where_they_are_from():
    here, there = Crossovers(source="/a"), Crossovers(source="/b")
    pinned = [163_840, None, 65_536, 262_144]
    vram = [65_536, None, None, None]
    assert here.contract() == there.contract() == {"vram": vram, "pinned": pinned}
    assert json.loads(json.dumps(here.contract())) == here.contract()
    assert Crossovers().source == BUILT_IN


# --- from a report -----------------------------------------------------------------------------


def report(**crossovers):
    return {"format": REPORT_FORMAT, "correct": True, "crossovers": crossovers, "rows": []}


def limits(tagged, push=None):
    return {"tagged_nbytes": tagged, "push_nbytes": push}


def test_a_report_sets_the_memories_that_it_measured():
    pinned = replace(PINNED, tagged_nbytes=10, push_nbytes=20)
    assert from_report(report(pinned=limits(10, 20)), "r") == Crossovers(VRAM, pinned, "r")
    both = from_report(report(vram=limits(0), pinned=limits(0, 0)), "r")
    assert (both.vram, both.pinned) == (Limits(0), replace(PINNED, tagged_nbytes=0, push_nbytes=0))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([], "no report"),
        (None, "no report"),
        ({}, "no report"),
        (report(vram=limits(1)) | {"format": "pcie_comm bench 99"}, "no report"),
        (report(vram=limits(1)) | {"correct": False}, "wrong outputs"),
        (report(vram=limits(1)) | {"correct": 1}, "wrong outputs"),
        (report(), "no crossovers"),
        (report(vram=limits(1)) | {"crossovers": None}, "no crossovers"),
        (report(vram=limits(1), tape=limits(1)), "no crossovers"),
        (report(vram=limits("1")), "damaged"),
        (report(vram=limits(True)), "damaged"),
        (report(vram=limits(-1)), "damaged"),
        (report(vram=limits(1.5)), "damaged"),
        (report(vram=limits(1 << 50)), "damaged"),
        (report(vram=limits(10, 9)), "damaged"),
        (report(vram=limits(10, "20")), "damaged"),
        (report(vram={"tagged_nbytes": 1}), "damaged"),
        (report(vram=limits(1) | {"more": 1}), "damaged"),
        (report(vram=[1, 2]), "damaged"),
    ],
)
def test_a_bad_report_is_refused_with_a_remedy(content, what):
    with pytest.raises(InvalidArgumentError, match=what) as caught:
        from_report(content, "policy file x.json")
    assert "policy file x.json" in str(caught.value)
    assert "pcie-comm bench --out FILE" in str(caught.value)
    assert "PCIE_COMM_POLICY" in str(caught.value)

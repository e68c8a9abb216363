"""Options: what a command line means, what is chosen for a device, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcie_comm import InvalidArgumentError, UnsupportedError
from pcie_comm.bench import options as module
from pcie_comm.bench.options import (
    FUSED,
    HEADS,
    OPERATIONS,
    PAIR,
    PINNED,
    ROUTER,
    SHARED,
    TRANSPORTS,
    VRAM,
    Options,
    parse,
)
from pcie_comm.transport import load


def test_nothing_given_is_everything():
    assert parse([]) == Options()
    gpu, cpu = Options().settled(on_gpu=True), Options().settled(on_gpu=False)
    assert gpu.operations == cpu.operations == OPERATIONS
    assert (gpu.ranks, gpu.rows, gpu.memories) == ((2, 4, 8, 16), (1, 8, 64), (VRAM, PINNED))
    assert (gpu.samples, gpu.ops, gpu.cold) == (21, 64, True)
    assert (cpu.ranks, cpu.memories, cpu.protocols) == ((2, 4), (SHARED,), ("push", "pull"))
    assert cpu.cold is False


def test_a_command_line_says_it_all(tmp_path):
    out = tmp_path / "report.json"
    arguments = f"--op {PAIR} --op {FUSED} --op {PAIR} --ranks 2,16,2 --rows 1 --memory VRAM,pinned"
    arguments += f" --protocol push,auto --samples 5 --ops 8 --no-cold --device cuda:1 --out {out}"
    assert parse(arguments.split()) == Options(
        operations=(PAIR, FUSED),
        ranks=(2, 16),
        rows=(1,),
        memories=(VRAM, PINNED),
        protocols=("push", "auto"),
        samples=5,
        ops=8,
        cold=False,
        device="cuda:1",
        out=out,
    )


def test_what_is_given_stays_whatever_the_device():
    given_options = Options(ranks=(3,), rows=(5,), samples=1, ops=1, protocols=("pull",))
    for on_gpu in (True, False):
        settled = given_options.settled(on_gpu)
        for name in ("ranks", "rows", "samples", "ops", "protocols"):
            assert getattr(settled, name) == getattr(given_options, name)
    assert Options(cold=False).settled(on_gpu=True).cold is False


def test_a_short_run_is_shorter_and_still_takes_options():
    short = parse(["--short"]).settled(on_gpu=True)
    assert short.operations == (FUSED, PAIR, ROUTER)
    assert (short.samples, short.cold, short.ranks) == (11, False, (2, 4, 8, 16))
    assert parse(["--short", "--samples", "3"]).settled(on_gpu=True).samples == 3
    assert parse(["--short", "--cold"]).settled(on_gpu=True).cold is True
    assert parse(["--short"]).settled(on_gpu=False).protocols == ("push", "pull")


@given(st.lists(st.integers(1, 16), min_size=1), st.sets(st.sampled_from(OPERATIONS), min_size=1))
def test_lists_keep_their_order_and_no_value_twice(ranks, operations):
    arguments = ["--ranks", ", ".join(map(str, ranks))]
    for op in operations:
        arguments += ["--op", op]
    found = parse(arguments)
    assert found.ranks == tuple(dict.fromkeys(ranks))
    assert set(found.operations) == operations


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("--op gossip", "operation='gossip' is unknown; choose from all_gather_pair_kimi_topk,"),
        ("--protocol smoke", "protocol='smoke' is unknown; choose from tagged, push, pull, auto"),
        ("--ranks 17", "ranks=17 is out of range; give 1 to 16"),
        ("--ranks 2,0", "ranks=0 is out of range"),
        ("--ranks two", "--ranks: 'two' is no list of such values"),
        ("--ranks 2,,4", "--ranks: '2,,4' is no list of such values"),
        ("--rows 0", "rows=0 is out of range; give 1 to 4096"),
        ("--rows 4097", "rows=4097 is out of range"),
        ("--memory tape", "--memory: 'tape' is no list of such values"),
        ("--samples 0", "--samples: '0' is not 1 to 10000"),
        ("--ops -1", "--ops: '-1' is not 1 to 10000"),
        ("--ops many", "--ops: 'many' is not 1 to 10000"),
        ("--out /nowhere/report.json", "out=/nowhere/report.json cannot be written"),
        ("--out /", "out=/ cannot be written (it is a folder)"),
        ("--nonsense", "unrecognized arguments: --nonsense; see pcie-comm bench --help"),
        ("surplus", "unrecognized arguments: surplus"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(arguments, what):
    with pytest.raises(InvalidArgumentError) as caught:
        parse(arguments.split())
    assert what in str(caught.value)


@pytest.mark.parametrize(
    "chosen", [Options(memories=(VRAM,)), Options(protocols=("tagged",)), Options(cold=True)]
)
def test_what_only_gpus_have_is_refused_on_a_cpu(chosen):
    assert chosen.settled(on_gpu=True)
    with pytest.raises(InvalidArgumentError, match="name a GPU with --device"):
        chosen.settled(on_gpu=False)


def test_values_are_checked_however_they_came():
    for bad in (Options(samples=-1), Options(ops=10_001), Options(out=Path("/nowhere/x"))):
        with pytest.raises(InvalidArgumentError):
            bad.check()


def test_a_plot_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'pcie_comm\[plot\]'"):
        parse(["--plot", str(tmp_path / "x.png")])


def test_every_memory_has_a_transport():
    assert set(TRANSPORTS) == {VRAM, PINNED, SHARED}
    for name in TRANSPORTS.values():
        load(name)
    assert HEADS in OPERATIONS

"""How groups end: closed together, alone, twice, by an exception, or not at all."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import time
import warnings
from pathlib import Path

import leaks
import pytest
import torch
from launcher import run_threads
from leaks import own_files, own_mappings
from worlds import build_each, close_each, on_each, pair_of, small

from pcie_comm import (
    ClosedError,
    CommWarning,
    InvalidArgumentError,
    PcieDcpGroup,
    PeerAbortedError,
    PeerTimeoutError,
    local_world,
)
from pcie_comm.bootstrap import ThreadBootstrap
from pcie_comm.transport import load
from pcie_comm.transport.base import TransportInfo

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

ROOT = Path(__file__).resolve().parent.parent


def impatient(groups):
    """Shorten how long groups that exist wait for their peers to close."""
    for group in groups:
        group.config = dataclasses.replace(group.config, setup_timeout_s=0.2)
    return groups


def test_a_closed_group_refuses_everything_by_one_error():
    groups = build_each([{}] * 2)
    lanes = on_each(groups, lambda group: group.channel("draft"))
    close_each(groups)
    close_each(groups)
    assert own_mappings() == []
    group, lane = groups[0], lanes[0]
    for call in (
        lambda: group.all_gather_pair(*pair_of(1.0)),
        lambda: group.all_gather_heads(torch.zeros(1, 1, 4).half()),
        lambda: group.channel("draft"),
        lambda: group.channel("other"),
        lambda: group.prepare("all_gather_pair"),
        group.check,
    ):
        with pytest.raises(ClosedError) as caught:
            call()
        assert caught.value.rank == 0
    for call in (lambda: lane.all_gather_pair(*pair_of(1.0)), lane.check):
        with pytest.raises(ClosedError, match="channel 'draft' is closed"):
            call()
    group.abort()


def test_leaving_the_block_by_an_exception_closes_and_lets_it_pass():
    groups = build_each([{}] * 2)

    def on_rank(group):
        with group:
            raise LookupError(f"rank {group.rank}")

    assert [str(error) for error in on_each(groups, on_rank)] == ["rank 0", "rank 1"]
    assert own_mappings() == []
    with pytest.raises(ClosedError):
        groups[0].check()


def test_b14_an_exception_in_the_block_reaches_the_peers_and_is_not_hidden_by_them():
    groups = build_each([{}] * 2)
    started = time.monotonic()
    with pytest.raises(LookupError, match="mine"), groups[0]:
        raise LookupError("mine")
    with pytest.raises(PeerAbortedError, match=r"by rank 0 .*left the block by LookupError: mine"):
        groups[1].check()
    groups[1].close()
    assert time.monotonic() - started < 2.0
    assert own_mappings() == []


def test_close_without_the_peers_says_so_and_tells_them():
    groups = impatient(build_each([{}] * 2))
    started = time.monotonic()
    with pytest.raises(PeerTimeoutError):
        groups[0].close()
    assert time.monotonic() - started < 2.0
    groups[0].close()
    assert len(own_mappings()) == 2, "only the peer's"
    with pytest.raises(PeerAbortedError, match=r"by rank 0 .*gave up after PeerTimeoutError"):
        groups[1].check()
    groups[1].close()
    assert own_mappings() == []


# --- B32: nobody closes --------------------------------------------------------------------------


class Recorded(ThreadBootstrap):
    """Notes every exchange."""

    exchanges = 0

    def _exchange(self, payload, timeout_s):
        type(self).exchanges += 1
        return super()._exchange(payload, timeout_s)


def test_b32_a_finaliser_talks_to_nobody_and_warns(monkeypatch):
    """An explicit close of the other rank then says that this one did not come."""
    ends = Recorded.create(2)
    groups = impatient(
        run_threads(lambda r: PcieDcpGroup.from_bootstrap(ends[r], "cpu", config=small()), 2)
    )
    before = Recorded.exchanges
    started = time.monotonic()
    with pytest.warns(CommWarning, match=r"rank=1 .* was never closed"):
        groups.pop()
    assert time.monotonic() - started < 0.2
    assert Recorded.exchanges == before
    assert own_files() == []
    assert len(own_mappings()) == 4, "kept for the peer that may still address it"
    with pytest.raises(PeerTimeoutError):
        groups[0].close()


def test_b32_a_constructor_that_failed_leaves_nothing_to_warn_of(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for error in build_each([{"transport": "pigeon"}] * 2):
            assert isinstance(error, InvalidArgumentError)
        with pytest.raises(InvalidArgumentError):
            PcieDcpGroup(0)
        del error
        gc.collect()


def test_b32_a_world_that_is_dropped_is_not_closed_by_its_finaliser():
    """Leaving the block closes; that the context manager is collected must not."""
    opening = local_world(2, "cpu", config=small())
    world = opening.__enter__()
    del opening
    gc.collect()
    assert world.run(lambda g: g.all_gather_pair(*pair_of(1.0))[0].shape) == [(1, 8)] * 2
    world.close()


OBJECTS = """
from pcie_comm import *
import torch
def call(group): group.all_gather_pair(torch.ones(1, 4), torch.ones(1, 4))
world = local_world(2, "cpu").__enter__()
world.run(call)
opening = local_world(2, "cpu")
opening.__enter__().run(call)
alone = PcieDcpGroup(1, device="cpu")
call(alone)
broken = local_world(2, "cpu", config=Config(timeout_s=0.1)).__enter__()
try: call(broken.groups[0])
except PeerTimeoutError: print("timed out")
{end}
"""


def test_b32_a_process_ends_without_close():
    """Normally, and by an exception; it neither hangs nor crashes, and nothing is left."""
    ends = {"print('end', flush=True)": 0, "raise SystemExit(3)": 3, "1 / 0": 1}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", OBJECTS.format(end=end)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for end in ends
    ]
    try:
        said = [process.communicate(timeout=60) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, (out, err), code in zip(running, said, ends.values(), strict=True):
        assert process.returncode == code, err
        assert out.splitlines() == ["timed out", *(["end"] if code == 0 else [])]
        assert "Exception ignored" not in err
        assert list(Path("/dev/shm").glob(f"pcie_comm.{process.pid}.*")) == []


def test_the_leak_check_notices_a_file_and_a_mapping():
    """Negative control of what most tests of groups end with."""
    transport = load("host_shm")(TransportInfo(0, 1))
    before = own_mappings()
    transport.allocate(20_000)
    with pytest.raises(AssertionError):
        leaks.assert_none(before)
    transport.seal()
    with pytest.raises(AssertionError):
        leaks.assert_none(before)
    transport.free()
    leaks.assert_none(before)

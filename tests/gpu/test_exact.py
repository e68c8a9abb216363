"""Every op, protocol, memory, world size and row count: exact, eager and replayed."""

from __future__ import annotations

import time

import harness
import pytest
import torch

from pcie_comm import Config, local_world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MEMORIES = {"VRAM": "cuda_local", "pinned host": "host_pinned"}
PROTOCOLS = ("push", "pull", "tagged")
ROWS = (1, 2, 7, 8, 64)
WORLDS = (1, 2, 3, 4, 8, 16)


def open_world(world_size: int, memory: str, protocol: str, overlap: bool = False):
    config = Config(protocol=protocol, timeout_s=10, overlap=overlap)
    return local_world(world_size, harness.DEVICE, MEMORIES[memory], config)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_eager_rounds_are_exact(protocol, memory, world_size, figures):
    started = time.monotonic()
    bad, calls = {}, 0
    with open_world(world_size, memory, protocol) as world:
        for op in harness.ops_for(world_size):
            for group in world.groups:
                group.prepare(op)
            for rows in ROWS:
                batch = harness.make_batch(op, harness.RING, world_size, rows)
                count = 0
                for _ in range(harness.FULL_ROUNDS // harness.RING):
                    batch.refresh()
                    harness.run_eager(world, batch)
                    count += batch.mismatches()
                    calls += batch.rounds * world_size
                if count:
                    bad[f"{op} rows={rows}"] = count
    figures(
        protocol=protocol,
        memory=memory,
        world=world_size,
        rounds=harness.FULL_ROUNDS,
        checked_calls=calls,
        mismatches=sum(bad.values()),
        seconds=round(time.monotonic() - started, 2),
    )
    assert not bad


REPLAYED = [(w, memory, False) for w in (2, 3, 8) for memory in MEMORIES]
REPLAYED += [(16, "VRAM", False), (2, "VRAM", True), (8, "pinned host", True), (16, "VRAM", True)]


@pytest.mark.parametrize(("world_size", "memory", "overlap"), REPLAYED)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_replays_back_to_back_are_exact(protocol, memory, world_size, overlap, figures):
    """Graphs of 1, 2 and 3 ops: an odd count is what exposes a frozen slot (B04)."""
    started = time.monotonic()
    bad, calls = {}, 0
    with open_world(world_size, memory, protocol, overlap) as world:
        for op in harness.ops_for(world_size):
            for group in world.groups:
                group.prepare(op, rows=8)
            for ops in (1, 2, 3):
                rows = [1, 8, 2][:ops]
                batches = [harness.make_batch(op, harness.RING, world_size, r) for r in rows]
                replayed = harness.Replayed(world, batches)
                count = 0
                for _ in range(harness.FULL_ROUNDS // harness.RING):
                    for batch in batches:
                        batch.refresh()
                    replayed.run()
                    count += sum(batch.mismatches() for batch in batches)
                    calls += harness.RING * world_size * ops
                if count:
                    bad[f"{op} ops={ops}"] = count
    figures(
        protocol=protocol,
        memory=memory,
        world=world_size,
        overlap=overlap,
        replays=harness.FULL_ROUNDS,
        checked_calls=calls,
        mismatches=sum(bad.values()),
        seconds=round(time.monotonic() - started, 2),
    )
    assert not bad


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("memory", MEMORIES)
def test_long_run_of_the_fused_op(memory, world_size, figures):
    """B15: a few hundred rounds prove nothing."""
    rounds, bad = 100 * harness.FULL_ROUNDS, 0
    with open_world(world_size, memory, "auto") as world:
        batch = harness.make_batch("all_gather_pair_kimi_topk", 500, world_size, 1)
        for _ in range(rounds // 500):
            batch.refresh()
            harness.run_eager(world, batch)
            bad += batch.mismatches()
    figures(memory=memory, world=world_size, rounds=rounds, mismatches=bad)
    assert bad == 0


@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 3])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_b09_epoch_wraps(protocol, memory, start):
    """Every op, eager and replayed, goes on across both wraps of the counter, tags included."""
    with open_world(4, memory, protocol) as world:
        ops = harness.ops_for(4)
        for group in world.groups:
            for op in ops:
                group.prepare(op)

        def seed() -> None:
            for group in world.groups:
                group._channels["default"].engine.seed_epoch(start)

        harness.run_eager(world, harness.make_batch(ops[0], 12, 4, 2))
        for first in range(len(ops)):  # each op is the one that crosses the wrap
            seed()
            for op in (*ops[first:], *ops[:first]):
                batch = harness.make_batch(op, 7, 4, 2)
                harness.run_eager(world, batch)
                assert batch.mismatches() == 0, op
        for op in ops:
            seed()
            batch = harness.make_batch(op, 9, 4, 1)
            harness.Replayed(world, [batch]).run()
            assert batch.mismatches() == 0, op


@pytest.mark.parametrize("protocol", ["push", "auto"])
def test_ops_with_different_grids_share_a_channel(protocol):
    """A block that an op does not have must not fall behind in epochs; protocols may mix."""
    with open_world(4, "VRAM", protocol) as world:
        batches = [
            harness.make_batch(op, 50, 4, rows) for op in harness.ops_for(4) for rows in (1, 64, 8)
        ]
        torch.cuda.synchronize()
        for index in range(50):
            for batch in batches:
                for group, stream in zip(world.groups, world.streams, strict=True):
                    torch.cuda.set_stream(stream)
                    batch.call(group, index)
        harness.settle(world)
        assert [batch.mismatches() for batch in batches] == [0] * len(batches)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_narrow_packs_are_exact(protocol):
    """B20: misaligned views take a narrower path; ranks may differ in alignment."""
    with open_world(2, "VRAM", protocol) as world:
        for shift in (1, 2, 4, 8):
            base = [harness.random_bytes((1, 4 * 97 + 16), torch.bfloat16) for _ in range(2)]
            local = [base[r][0, shift * (r + 1) :][: 4 * 96].view(4, 96) for r in range(2)]
            other = [harness.random_bytes((4, 33), torch.float8_e5m2) for _ in range(2)]
            results = world.run(
                lambda group, a=local, b=other: group.all_gather_pair(a[group.rank], b[group.rank])
            )
            for first, second in results:
                assert torch.equal(first.view(torch.int16), torch.cat(local, 1).view(torch.int16))
                assert torch.equal(
                    second.view(torch.uint8), torch.cat([t.view(torch.uint8) for t in other], 1)
                )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_row_strides_are_honoured(protocol):
    with open_world(2, "VRAM", protocol) as world:
        wide = [harness.random_bytes((5, 64), torch.float16) for _ in range(2)]
        heads = [harness.random_bytes((5, 6, 32), torch.bfloat16) for _ in range(2)]
        results = world.run(
            lambda g: (
                g.all_gather_pair(wide[g.rank][:, 8:24], wide[g.rank][::2][:3].repeat(2, 1)[:5]),
                g.all_gather_heads(heads[g.rank][:, 2:4]),
            )
        )
        for (first, _), gathered in results:
            want = torch.cat([w[:, 8:24] for w in wide], 1)
            assert torch.equal(first.view(torch.int16), want.view(torch.int16))
            want = torch.cat([h[:, 2:4] for h in heads], 1)
            assert torch.equal(gathered.view(torch.int16), want.view(torch.int16))

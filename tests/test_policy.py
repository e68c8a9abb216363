"""The choices that all ranks make alike: transport, protocol, grid."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pcie_comm import policy
from pcie_comm.crossovers import VRAM, Limits
from pcie_comm.kernels.collective import PlanInfo, TensorMeta
from pcie_comm.kernels.columns import GATHERED_DTYPES
from pcie_comm.kernels.registry import find
from pcie_comm.layout import (
    MAX_BLOCKS,
    MAX_WORLD,
    PACK_NBYTES,
    STAGED_ALIGNMENT,
    align_up,
)

ITEM_NBYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}

grids = st.integers(2, MAX_BLOCKS)
payloads = st.integers(0, 1 << 30)


@pytest.mark.parametrize(
    ("requested", "on_gpu", "one_process", "peers_reachable", "chosen"),
    [
        ("auto", False, True, False, "host_shm"),
        ("auto", False, False, False, "host_shm"),
        ("auto", True, True, True, "cuda_local"),
        ("auto", True, False, True, "cuda_ipc"),
        ("auto", True, True, False, "host_pinned"),
        ("auto", True, False, False, "host_pinned"),
        ("host_pinned", True, True, True, "host_pinned"),
        ("cuda_ipc", True, True, False, "cuda_ipc"),
    ],
)
def test_transport(requested, on_gpu, one_process, peers_reachable, chosen):
    transport, reason = policy.choose_transport(
        requested, on_gpu=on_gpu, one_process=one_process, peers_reachable=peers_reachable
    )
    assert transport == chosen
    assert (reason == "asked for") == (requested != "auto")
    assert reason


def test_a_veto_moves_gpus_that_reach_each_other_to_pinned_memory():
    facts = {"one_process": False, "peers_reachable": True, "veto": "advice says no"}
    choose = policy.choose_transport
    assert choose("auto", on_gpu=True, **facts) == ("host_pinned", "advice says no")
    assert choose("auto", on_gpu=False, **facts)[0] == "host_shm"
    assert choose("cuda_ipc", on_gpu=True, **facts) == ("cuda_ipc", "asked for")


def test_what_is_left_without_peer_access_and_pinned_memory():
    choose = policy.choose_transport
    facts = {"on_gpu": True, "one_process": False, "pins": False}
    name, reason = choose("auto", peers_reachable=False, **facts)
    assert name == "torch_dist"
    assert "cannot address each other's memory, and a device cannot address pinned" in reason
    assert choose("auto", peers_reachable=True, **facts)[0] == "cuda_ipc"
    assert choose("auto", peers_reachable=True, veto="no", **facts)[0] == "torch_dist"
    assert choose("host_pinned", peers_reachable=False, **facts)[0] == "host_pinned"


@pytest.mark.parametrize("requested", ["auto", "host_shm", "cuda_ipc"])
def test_over_hosts_what_is_asked_for_runs_inside_each(requested):
    facts = {"on_gpu": False, "one_process": False, "peers_reachable": False, "hosts": 2}
    reason = f"the ranks are on 2 hosts; inside each: {requested}"
    assert policy.choose_transport(requested, **facts) == ("torch_dist", reason)
    assert policy.choose_transport("torch_dist", **facts) == ("torch_dist", "asked for")


LIMIT = VRAM.tagged_nbytes


@pytest.mark.parametrize(
    ("requested", "staged", "world", "segment", "chosen"),
    [
        ("push", 64, 2, 4096, "push"),
        ("push", 1 << 20, 2, 4096, "push"),
        ("pull", 64, 2, 4096, "pull"),
        ("pull", 1 << 20, 2, 4096, "pull"),
        ("auto", 0, 2, 4096, "tagged"),
        ("auto", 2048, 2, 4096, "tagged"),
        ("auto", 2049, 2, 4096, "push"),
        ("auto", LIMIT // 8, 8, 1 << 20, "tagged"),
        ("auto", LIMIT // 8 + 16, 8, 1 << 20, "push"),
        ("tagged", LIMIT, 8, 1 << 20, "tagged"),
        ("tagged", 2048, 2, 4096, "tagged"),
        ("tagged", 2049, 2, 4096, "push"),
    ],
)
def test_protocol(requested, staged, world, segment, chosen):
    """Units are twice as large as their data, so tagged push needs twice the room."""
    assert policy.choose_protocol(requested, staged, world, segment, VRAM) == chosen


@pytest.mark.parametrize(
    ("staged", "chosen"), [(100, "tagged"), (101, "push"), (200, "push"), (201, "pull")]
)
def test_limits_of_a_host_are_obeyed(staged, chosen):
    limits = Limits(800, 1600)
    assert policy.choose_protocol("auto", staged, 8, 1 << 20, limits) == chosen


def test_what_no_slot_of_tagged_push_holds_goes_by_its_size():
    assert policy.choose_protocol("auto", 100, 8, 128, Limits(800, 1600)) == "push"
    assert policy.choose_protocol("auto", 100, 8, 128, Limits(600, 600)) == "pull"


sizes = st.integers(0, 1 << 20)
all_limits = st.builds(
    lambda tagged, more: Limits(tagged, None if more is None else tagged + more),
    sizes,
    st.none() | sizes,
)


@given(
    st.sampled_from(["auto", "push", "pull", "tagged"]),
    payloads,
    st.integers(1, MAX_WORLD),
    st.integers(256, 1 << 26),
    all_limits,
)
def test_a_protocol_is_one_that_was_prepared_and_fits(requested, staged, world, segment, limits):
    chosen = policy.choose_protocol(requested, staged, world, segment, limits)
    assert chosen in policy.protocols_of(requested, limits)
    assert chosen != "tagged" or 2 * staged <= segment
    if requested != "auto":
        assert chosen == requested or (requested, chosen) == ("tagged", "push")
    why = policy.explain(requested, chosen, staged * world, limits, "some file")
    assert why.startswith(f"{chosen}: ")
    assert ("asked for" in why) == (requested != "auto")
    assert ("some file" in why) == (requested == "auto" and "too many for a slot" not in why)


@pytest.mark.parametrize(
    ("requested", "chosen", "received", "limits", "why"),
    [
        ("pull", "pull", 9, VRAM, "pull: asked for"),
        ("tagged", "push", 9, VRAM, "push: asked for tagged, which does not fit its slot"),
        ("auto", "tagged", 9, Limits(9), "tagged: receives 9 bytes in all, at most 9 (host)"),
        (
            "auto",
            "push",
            10,
            Limits(9),
            "push: receives 10 bytes in all, more than 9; no limit to push (host)",
        ),
        (
            "auto",
            "push",
            10,
            Limits(9, 10),
            "push: receives 10 bytes in all, more than 9, at most 10 (host)",
        ),
        (
            "auto",
            "pull",
            11,
            Limits(9, 10),
            "pull: receives 11 bytes in all, more than 9, more than 10 (host)",
        ),
        (
            "auto",
            "push",
            9,
            Limits(9),
            "push: receives 9 bytes in all, too many for a slot of tagged push",
        ),
    ],
)
def test_reasons_in_words(requested, chosen, received, limits, why):
    assert policy.explain(requested, chosen, received, limits, "host") == why


@given(
    st.sampled_from(["push", "pull", "tagged"]),
    st.lists(payloads, min_size=1, max_size=2),
    st.integers(1, MAX_WORLD),
    st.integers(1, MAX_BLOCKS),
)
def test_a_gather_grid_covers_every_tensor(protocol, sizes, world, limit):
    grid = policy.gather_grid(protocol, sizes, world, limit)
    assert 1 <= grid.blocks <= limit
    assert len(grid.chunks) == len(sizes)
    for size, chunk in zip(sizes, grid.chunks, strict=True):
        assert chunk > 0
        assert chunk % PACK_NBYTES == 0
        assert chunk * grid.blocks >= size


@given(
    st.lists(st.integers(1, 8192), min_size=1, max_size=2),
    st.integers(2, MAX_WORLD),
    st.integers(1, MAX_BLOCKS),
)
def test_a_tagged_gather_takes_one_round_where_one_can_do(sizes, world, limit):
    def rounds(blocks, alignment):
        chunks = (align_up(-(-size // blocks), alignment) for size in sizes)
        return -(-sum(chunks) * (world - 1) // (8 * policy.TAGGED_BLOCK_UNITS))

    grid = policy.gather_grid("tagged", sizes, world, limit)
    taken = -(-sum(grid.chunks) * (world - 1) // (8 * policy.TAGGED_BLOCK_UNITS))
    possible = range(1, limit + 1)
    if any(rounds(blocks, PACK_NBYTES) == 1 for blocks in possible):
        assert taken == 1
    if any(rounds(blocks, STAGED_ALIGNMENT) == 1 for blocks in possible):
        assert all(chunk % STAGED_ALIGNMENT == 0 for chunk in grid.chunks)


@pytest.mark.parametrize(
    ("protocol", "sizes", "world", "blocks", "chunks"),
    [
        ("push", [0], 4, 1, (64,)),
        ("push", [2048], 4, 1, (2048,)),
        ("pull", [2049], 4, 2, (1088,)),
        ("push", [16_384], 4, 8, (2048,)),
        ("push", [1 << 30], 4, 32, (1 << 25,)),
        ("tagged", [0], 4, 1, (64,)),
        ("tagged", [1 << 20], 1, 1, (1 << 20,)),
        ("tagged", [1024], 3, 1, (1024,)),
        ("tagged", [1025], 3, 2, (576,)),
        ("tagged", [8192], 8, 32, (256,)),
        ("tagged", [8192], 16, 32, (256,)),
        ("tagged", [896, 448], 8, 7, (128, 64)),  # Kimi's row: 6 blocks would take two rounds
        ("tagged", [14_336, 7168], 4, 32, (448, 224)),  # lines would take two rounds
    ],
)
def test_exact_gather_grids(protocol, sizes, world, blocks, chunks):
    assert policy.gather_grid(protocol, sizes, world, 32) == policy.GatherGrid(blocks, chunks)


@given(
    st.sampled_from(["push", "pull", "tagged"]),
    st.integers(0, 65_536),
    st.integers(1, 16),
    payloads,
    st.integers(1, MAX_WORLD),
    grids,
)
def test_a_fused_grid_has_both_kinds_and_fits(protocol, rows, groups, nbytes, world, limit):
    grid = policy.split_fused_grid(protocol, rows, groups, nbytes, world, limit)
    assert grid.router_blocks >= 1
    assert grid.gather.blocks >= 1
    assert grid.router_blocks + grid.gather.blocks <= limit
    assert grid.rows_per_block * grid.router_blocks >= rows
    assert grid.tasks_per_block * grid.router_blocks >= rows * groups
    if protocol != "tagged":  # a block collects what the same block of its peers staged
        assert grid.router_blocks <= max(rows, 1)
        assert grid.tasks_per_block == grid.rows_per_block * groups


@pytest.mark.parametrize(
    ("protocol", "rows", "groups", "blocks", "rows_per_block", "tasks_per_block"),
    [
        ("tagged", 1, 8, 4, 1, 2),
        ("tagged", 1, 1, 1, 1, 1),
        ("tagged", 4, 8, 16, 1, 2),
        ("tagged", 64, 8, 30, 3, 18),
        ("push", 1, 8, 1, 1, 8),
        ("push", 8, 8, 8, 1, 8),
        ("push", 64, 1, 31, 3, 3),
    ],
)
def test_exact_fused_grids(protocol, rows, groups, blocks, rows_per_block, tasks_per_block):
    grid = policy.split_fused_grid(protocol, rows, groups, 4096, 2, 32)
    assert (grid.router_blocks, grid.rows_per_block) == (blocks, rows_per_block)
    assert grid.tasks_per_block == tasks_per_block


@given(payloads, st.integers(1, MAX_WORLD), st.none() | st.integers(0, 1 << 24))
def test_patience_is_for_much_payload(staged, world, limit):
    patient = policy.pace("tagged", staged, world, 7, Limits(patience_nbytes=limit))
    assert patient == (limit is not None and staged * world > limit)


@given(payloads, st.integers(1, MAX_WORLD), st.integers(1, 64), st.none() | st.integers(0, 1 << 24))
def test_push_stages_in_waves_of_much_payload(staged, world, blocks, limit):
    wave = policy.pace("push", staged, world, blocks, Limits(wave_nbytes=limit))
    assert 0 <= wave < blocks
    if limit is None or world == 1 or staged * world < 2 * limit:
        assert wave == 0
    elif wave:
        waves = -(-blocks // wave)
        assert waves <= max(1, staged * world // max(1, limit))


def test_waves_of_the_sizes_that_were_measured():
    limits = Limits(wave_nbytes=1000)
    cases = {(100, 8): 0, (100, 16): 0, (300, 16): 2, (800, 16): 1}
    assert {case: policy.pace("push", *case, 8, limits) for case in cases} == cases
    assert policy.pace("pull", 800, 16, 8, limits) == 0


@given(st.data())
def test_a_resident_grid_leaves_every_rank_its_share(data):
    """Where a device has a multiprocessor for each launch that it may hold, all grids fit it."""
    world = data.draw(st.integers(1, MAX_WORLD))
    device_of = data.draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
    units_of = data.draw(st.lists(st.integers(1, 200), min_size=4, max_size=4))
    sharers = [device_of.count(device) for device in device_of]
    units = [units_of[device] for device in device_of]
    overlap = data.draw(st.booleans())
    budget = policy.resident_budget(units, sharers, overlap, None)
    assert 2 <= budget <= MAX_BLOCKS
    assert budget <= policy.resident_budget(units, sharers, False, None)
    launches = [policy.launches_at_once(users, overlap) for users in sharers]
    assume(all(count >= held for count, held in zip(units, launches, strict=True)))
    for count, held in zip(units, launches, strict=True):
        assert budget * held <= max(2 * held, count * policy.BLOCKS_PER_UNIT)
        if held > 1 and budget > 2:  # some multiprocessors stay empty, whatever lies on the others
            assert budget * held <= count - policy.FREE_UNITS


@pytest.mark.parametrize(
    ("units", "sharers", "overlap", "budget"),
    [
        ([132], [1], False, 64),
        ([132], [1], True, 64),
        ([132] * 2, [2] * 2, False, 64),
        ([132] * 2, [2] * 2, True, 32),
        ([132] * 3, [3] * 3, False, 42),
        ([132] * 8, [8] * 8, False, 16),
        ([132] * 8, [8] * 8, True, 8),
        ([132] * 16, [16] * 16, False, 8),
        ([132] * 16, [16] * 16, True, 4),
        ([132, 10], [1, 1], False, 20),
        ([132, 10], [1, 1], True, 20),
        ([14] * 16, [16] * 16, False, 2),
    ],
)
def test_exact_resident_budgets(units, sharers, overlap, budget):
    assert policy.resident_budget(units, sharers, overlap, None) == budget


@pytest.mark.parametrize(
    ("sharers", "overlap", "wanted", "budget"),
    [
        (1, False, 4, 4),
        (8, False, 32, 32),
        (8, True, 32, 16),
        (16, False, 32, 16),
        (16, True, 32, 8),
    ],
)
def test_who_wants_many_blocks_may_fill_the_device(sharers, overlap, wanted, budget):
    world = [132] * sharers, [sharers] * sharers
    assert policy.resident_budget(*world, overlap, wanted) == budget


# --- the same plan on all ranks ------------------------------------------------------------------


@st.composite
def calls(draw):
    """An operation, its world, and the metadata of its tensors."""
    op = draw(st.sampled_from(["all_gather_pair", "all_gather_heads", "all_gather_pair_kimi_topk"]))
    rows = draw(st.integers(0, 64))
    if op == "all_gather_pair_kimi_topk":
        world = draw(st.sampled_from([1, 2, 4, 7, 8, 14, 16]))
        shapes = [((rows, 3584 // world), "bfloat16"), ((rows, 896 // world), "float32")]
        shapes.append(((896,), "float32"))
        return op, world, shapes
    world = draw(st.integers(1, MAX_WORLD))
    count, inner = (2, 1) if op == "all_gather_pair" else (1, 2)
    names = [name for name in GATHERED_DTYPES if inner == 1 or name != "float32"]
    sizes = st.integers(1, 96)
    return (
        op,
        world,
        [
            ((rows, *(draw(sizes) for _ in range(inner))), draw(st.sampled_from(names)))
            for _ in range(count)
        ],
    )


def metas(shapes, draw):
    """Metadata of one rank: alignment and row stride differ between ranks, shape and dtype not."""
    for shape, dtype in shapes:
        dense = [1]
        for size in shape[:0:-1]:
            dense.insert(0, dense[0] * size)
        if len(shape) > 1:
            dense[0] += draw(st.integers(0, 16))
        alignment = draw(st.sampled_from([ITEM_NBYTES[dtype], 16]))
        yield TensorMeta(shape, dtype, tuple(dense), ITEM_NBYTES[dtype], alignment)


@settings(deadline=None, max_examples=200)
@given(calls(), st.sampled_from(["push", "pull", "tagged", "auto"]), grids, st.data())
def test_all_ranks_plan_the_same_call(call, protocol, max_blocks, data):
    """Ranks may differ in alignment and strides: only the kernel's pack width depends on them."""
    op, world, shapes = call
    info = PlanInfo(0, world, protocol, 1 << 20, 64, max_blocks)
    plans = []
    for rank in range(min(world, 3)):
        own = dataclasses.replace(
            info, rank=rank, output_alignment=data.draw(st.sampled_from([2, 16]))
        )
        plans.append(find(op).plan(own, *metas(shapes, data.draw)))
    first = plans[0]
    assert 1 <= first.grid <= max_blocks
    for plan in plans:
        assert (plan.signature, plan.grid, plan.staged_nbytes, plan.outputs, plan.exchanged) == (
            first.signature,
            first.grid,
            first.staged_nbytes,
            first.outputs,
            first.exchanged,
        )
        assert plan.kernel in find(op).variants()
        assert len(plan.scalars) == find(op).num_scalars(plan.kernel)
    assert 0 < first.signature < 1 << 32


def test_a_plan_depends_on_nothing_but_its_arguments():
    info = PlanInfo(0, 4, "push", 1 << 20, 64, 32)
    meta = TensorMeta((8, 64), "bfloat16", (64, 1), 2)
    pair = find("all_gather_pair")
    assert pair.plan(info, meta, meta) == pair.plan(info, meta, meta)


PAIR = (TensorMeta((8, 64), "bfloat16", (64, 1), 2),) * 2
OTHERS = {
    "rows": (TensorMeta((4, 64), "bfloat16", (64, 1), 2),) * 2,
    "width": (TensorMeta((8, 32), "bfloat16", (32, 1), 2),) * 2,
    "dtype": (TensorMeta((8, 64), "float16", (64, 1), 2),) * 2,
    "second dtype": (PAIR[0], TensorMeta((8, 64), "float16", (64, 1), 2)),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_calls_that_do_not_match_have_other_signatures(other):
    info = PlanInfo(0, 4, "push", 1 << 20, 64, 32)
    pair = find("all_gather_pair")
    assert pair.plan(info, *PAIR).signature != pair.plan(info, *other).signature
    pull = dataclasses.replace(info, protocol="pull")
    assert pair.plan(info, *PAIR).signature != pair.plan(pull, *PAIR).signature

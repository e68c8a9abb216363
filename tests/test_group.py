"""What groups return on the CPU: every operation exact, the same bytes on every rank."""

from __future__ import annotations

import json

import exact
import pytest
import torch
from worlds import bytes_of, engine_of, pair_of, small

from pcie_comm import KIMI_K3, InvalidArgumentError, PcieDcpGroup, host_engine, local_world
from pcie_comm.calls import fused_collective
from pcie_comm.kernels.registry import find
from pcie_comm.kernels.router_presets import PRESETS
from pcie_comm.kernels.uneven import UNEVEN

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize("protocol", ["push", "pull", "auto"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_operation_is_exact_on_every_rank(world_size, protocol):
    config = small(protocol=protocol, slot_nbytes=1 << 20)
    with local_world(world_size, "cpu", config=config) as world:
        results = world.run(exact.run_all)
    assert len(set(results)) == 1, "ranks returned different bytes"
    assert results[0][0] >= 64


@pytest.mark.parametrize("protocol", ["push", "pull"])
@pytest.mark.parametrize("fault", ["order", "bit"])
def test_the_check_notices_a_wrong_byte(protocol, fault, monkeypatch):
    """Negative control: ranks' shards swapped, or one bit of one shard flipped."""
    read = host_engine.HostEngine._read

    def spoilt(engine, source, offset, like):
        fetched = read(engine, source, offset, like)
        if fault == "bit" and fetched[0].numel() > 700:
            fetched[0].view(-1).view(torch.uint8)[700] ^= 1
        return fetched

    monkeypatch.setattr(host_engine.HostEngine, "_read", spoilt)
    if fault == "order":
        exchange = host_engine.HostEngine._exchange
        monkeypatch.setattr(
            host_engine.HostEngine, "_exchange", lambda *arguments: exchange(*arguments)[::-1]
        )
    config = small(protocol=protocol, slot_nbytes=1 << 20)
    with local_world(2, "cpu", config=config) as world, pytest.raises(AssertionError):
        world.run(exact.run_all)


@pytest.mark.parametrize("world_size", [16, 7])
def test_the_largest_and_an_odd_world(world_size):
    with local_world(world_size, "cpu", config=small(slot_nbytes=1 << 20)) as world:
        results = world.run(exact.run_all)
    assert len(set(results)) == 1


@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 3])
@pytest.mark.parametrize("protocol", ["push", "pull"])
def test_b09_results_and_slots_survive_the_wrap_of_the_epoch(start, protocol, monkeypatch):
    """Six calls of two operations around each wrap; slots go 0, 1, 0, 1."""
    slots, slot_of = [], host_engine.slot_of

    def spy(epoch):
        slots.append(slot_of(epoch))
        return slots[-1]

    monkeypatch.setattr(host_engine, "slot_of", spy)
    with local_world(1, "cpu", config=small(protocol=protocol)) as world:
        engine_of(world.groups[0]).seed_epoch(start - 1)
        world.run(alternate)
    assert slots == [start % 2, 1 - start % 2] * 3
    with local_world(4, "cpu", config=small(protocol=protocol, slot_nbytes=1 << 20)) as world:
        for group in world.groups:
            engine_of(group).seed_epoch(start)
        world.run(alternate)
        world.run(exact.run_all)
        assert {engine_of(group).epoch for group in world.groups} == {
            engine_of(world.groups[0]).epoch
        }
        assert engine_of(world.groups[0]).epoch < 2**31 + 500


def alternate(group: PcieDcpGroup) -> None:
    """Six calls that alternate between two operations, each with values of its own."""
    ranks = range(group.world_size)
    for turn in range(6):
        if turn % 2:
            heads = torch.full((1, 1, 8), 100 * turn + group.rank, dtype=torch.float16)
            gathered = group.all_gather_heads(heads)
            assert gathered[0, :, 0].tolist() == [100 * turn + rank for rank in ranks]
        else:
            first, second = group.all_gather_pair(*pair_of(100.0 * turn + group.rank))
            assert first[0, ::4].tolist() == [100.0 * turn + rank for rank in ranks]
            assert torch.equal(first, -second)


def test_b39_worlds_of_different_sizes_follow_each_other_and_coexist():
    two, four = (local_world(size, "cpu", config=small()) for size in (2, 4))
    with two as first, four as second:
        for world in (first, second, first):
            world.run(alternate)
    with local_world(2, "cpu", config=small()) as world:
        world.run(alternate)


def test_no_rows_on_any_rank():
    """B36: empty outputs everywhere, and the group goes on."""
    down, router = torch.empty(0, 1792, dtype=torch.bfloat16), torch.empty(0, 448)
    with local_world(2, "cpu", config=small()) as world:
        for result in world.run(
            lambda g: g.all_gather_pair_kimi_topk(down, router, torch.zeros(896))
        ):
            assert [tuple(output.shape) for output in result] == [(0, 3584), (0, 16), (0, 16)]
        world.run(alternate)


def test_gradients_are_neither_needed_nor_tracked():
    """As on a GPU, bytes are read and written whatever autograd thinks of the tensors."""
    local = torch.ones(2, 4, requires_grad=True)
    with local_world(2, "cpu", config=small()) as world:
        outs = [tuple(torch.zeros(2, 8, requires_grad=True) for _ in range(2)) for _ in range(2)]
        world.run(lambda g: g.all_gather_pair(local, local, out=outs[g.rank]))
        for first, _ in outs:
            assert torch.equal(first, torch.ones(2, 8))
            assert first.grad_fn is None
        assert not world.run(lambda g: g.all_gather_pair(local, local))[0][0].requires_grad
        with torch.inference_mode():
            inferred = [tuple(torch.zeros(2, 8) for _ in range(2)) for _ in range(2)]
        world.run(lambda g: g.all_gather_pair(local, local, out=inferred[g.rank]))
        assert torch.equal(inferred[1][0], torch.ones(2, 8))


def test_inputs_are_left_alone_and_outputs_are_new():
    local = torch.randn(3, 8)
    before = bytes_of(local)
    with local_world(2, "cpu", config=small()) as world:
        one = world.run(lambda g: g.all_gather_pair(local, local))
        two = world.run(lambda g: g.all_gather_pair(local, local))
    assert bytes_of(local).tobytes() == before.tobytes()
    addresses = {output.data_ptr() for result in one + two for output in result}
    assert len(addresses) == 8


def test_many_calls_with_the_same_and_with_new_tensors():
    """Remembered calls are those of the tensors at hand, also when memory is used again."""
    with local_world(2, "cpu", config=small()) as world:

        def on_rank(group):
            kept = torch.empty(1, 4), torch.empty(1, 8)
            out = torch.empty(1, 8), torch.empty(1, 16)
            for turn in range(100):
                kept[0].fill_(turn + group.rank)
                group.all_gather_pair(*kept, out=out)
                assert out[0].tolist() == [[turn] * 4 + [turn + 1.0] * 4]
                width = 1 + turn % 5
                fresh = torch.full((1, width), float(turn + group.rank))
                outs = torch.empty(1, 2 * width), torch.empty(1, 2 * width)
                group.all_gather_pair(fresh, fresh, out=outs)
                assert outs[1].tolist() == [[turn] * width + [turn + 1.0] * width]

        world.run(on_rank)
        assert len(world.groups[0]._channels["default"]._bound) <= 2, "dead tensors are forgotten"


def test_an_output_that_moved_is_checked_anew():
    """A tensor object whose memory was replaced is another call."""
    with local_world(1, "cpu", config=small()) as world:
        group, local = world.groups[0], torch.ones(1, 4)
        out = torch.zeros(1, 4), torch.zeros(1, 4)
        group.all_gather_pair(local, local, out=out)
        out[0].data = torch.zeros(1, 4)
        group.all_gather_pair(local, local, out=out)
        assert out[0].tolist() == [[1.0] * 4]


# --- what a group says of itself -----------------------------------------------------------------


def test_description_is_plain_and_complete():
    with local_world(2, "cpu", config=small(protocol="pull")) as world:
        group = world.groups[1]
        world.run(lambda g: g.channel("draft"))
        facts = group.describe()
        assert json.loads(json.dumps(facts)) == facts
        assert (facts["rank"], facts["world_size"], facts["device"]) == (1, 2, "cpu")
        assert facts["transport"] == "host_shm"
        assert facts["transport_reason"] == "no GPU takes part"
        assert facts["closed"] is False
        assert facts["channel draft"]["protocol"] == "pull"
        assert facts["channel default"]["segment_nbytes"] == 1 << 15
        assert "POSIX shared memory" in facts["channel default"]["memory"]
        assert "rank=1 world_size=2 host_shm" in repr(group)
        assert "'draft' rank=1" in repr(group.channel("draft"))
    assert group.describe()["closed"] is True
    assert "closed" in repr(group)


def test_a_named_transport_is_taken_and_said():
    with local_world(2, "cpu", transport="host_shm", config=small()) as world:
        assert world.groups[0].describe()["transport_reason"] == "asked for"


@pytest.mark.parametrize(
    ("op", "tensors"),
    [
        *(("all_gather", count) for count in (0, 9, "3", True)),
        ("all_gather_pair", 3),
        ("barrier", 2),
    ],
)
def test_prepare_takes_as_many_tensors_as_a_call_does(op, tensors):
    with local_world(1, "cpu") as world:
        group = world.groups[0]
        for count in (1, 3, 8):
            group.prepare("all_gather", tensors=count)
        group.prepare("all_gather_pair", tensors=2)
        with pytest.raises(InvalidArgumentError, match="tensor"):
            group.prepare(op, tensors=tensors)


def test_a_plugin_says_what_to_pass_to_prepare():
    """A kernel that is missing in a capture names this call."""
    three = find("all_gather").for_inputs(3)
    assert three.prepared_by() == '"all_gather", tensors=3'
    assert find("barrier").prepared_by() == '"barrier"'
    assert fused_collective(KIMI_K3).prepared_by() == '"all_gather_pair_kimi_topk"'
    spec = PRESETS["gpt-oss-20b"]
    assert fused_collective(spec).prepared_by() == str(spec)
    assert fused_collective(spec, 50).prepared_by() == f"{spec}, width=50"


def test_prepare_takes_the_width_of_a_router_call():
    """A width that W does not divide has kernels of its own."""
    spec, asked = PRESETS["gpt-oss-20b"], []
    with local_world(2, "cpu", config=small()) as world:
        group = world.groups[0]
        engine = group._channels["default"].engine
        engine.prepare = lambda plugin, protocols: asked.extend(plugin.needed(2))
        group.prepare(spec)
        assert not any(UNEVEN in key.variant for key in asked)
        asked.clear()
        group.prepare(spec, width=51)
        assert asked
        assert all(UNEVEN in key.variant for key in asked)
        for wrong in ({"op": "all_gather_pair", "width": 4}, {"op": spec, "width": 0}):
            with pytest.raises(InvalidArgumentError, match="width"):
                group.prepare(**wrong)


def test_prepare_needs_no_gpu():
    with local_world(2, "cpu", config=small()) as world:
        for op in ("all_gather_pair", "all_gather_heads", "all_gather_pair_kimi_topk"):
            world.groups[0].prepare(op, rows=64)
            world.groups[1].prepare(op)


def test_a_group_of_one_needs_no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with PcieDcpGroup(1, device="cpu", config=small(slot_nbytes=1 << 20)) as group:
        exact.run_all(group)
    with PcieDcpGroup([0], device=torch.device("cpu"), config=small()) as group:
        alternate(group)

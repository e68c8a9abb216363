"""Kernels for shards that do not divide, run as PTX on the CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

import torch
from ptx_world import World
from router_rows import SPECS, hard_rows

from pcie_comm.calls import fused_collective, router_collective
from pcie_comm.kernels.all_gather_heads import AllGatherHeads
from pcie_comm.kernels.all_gather_pair import AllGatherPair
from pcie_comm.kernels.all_gathers import AllGather
from pcie_comm.kernels.registry import find
from pcie_comm.kernels.uneven_columns import UnevenColumns

pytestmark = pytest.mark.timeout(300)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def bits(generator, shape, dtype) -> torch.Tensor:
    nbytes = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, nbytes, generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize(
    ("size", "protocol"), [(3, "push"), (3, "pull"), (3, "tagged"), (5, "tagged")]
)
def test_gathers_are_exact(size, protocol):
    """Every pack, one launch and several, rows at a stride."""
    generator = torch.Generator().manual_seed(size)
    for dtypes, widths, slot_nbytes in (
        ((torch.float8_e5m2, torch.float16), (23, 101), 1 << 18),
        ((torch.bfloat16, torch.float32), (17, 16), 1 << 18),
        ((torch.bfloat16, torch.bfloat16), (301, 5), 256 * size),
    ):
        whole = [bits(generator, (4, w + 9), d) for w, d in zip(widths, dtypes, strict=True)]
        wanted = [one[:, :width] for one, width in zip(whole, widths, strict=True)]
        inputs = list(zip(*(one.tensor_split(size, 1) for one in wanted), strict=True))
        world = World(size, protocol, blocks=3, slot_nbytes=slot_nbytes, order=1, hosted=True)
        for got in world.call(AllGatherPair(widths), inputs):
            assert all(map(torch.equal, map(raw, got), map(raw, wanted)))
    heads = bits(generator, (3, 11, 8), torch.float16)
    inputs = [[one] for one in heads.tensor_split(size, 1)]
    for plugin in (AllGatherHeads(11), AllGather(1, (11,))):
        for got in World(size, protocol, blocks=3).call(plugin, inputs):
            assert torch.equal(raw(got[0]), raw(heads))


@pytest.mark.parametrize(
    ("size", "protocol"), [(3, "push"), (3, "pull"), (3, "tagged"), (12, "tagged")]
)
def test_kimi_is_stand_alone_bit_for_bit(size, protocol):
    spec = SPECS["kimi-k3"]
    logits, bias = hard_rows(spec)
    logits = logits[[0, 9]]
    down = torch.randn(2, 3584).to(torch.bfloat16)
    ((weights, ids),) = World(1).call(router_collective(spec), [[logits, bias]])
    shards = zip(down.tensor_split(size, 1), logits.tensor_split(size, 1), strict=True)
    inputs = [[a, b, bias] for a, b in shards]
    world = World(size, protocol, blocks=3, order=4, hosted=protocol == "tagged")
    for got in world.call(find("all_gather_pair_kimi_topk"), inputs):
        assert all(map(torch.equal, got, (down, weights, ids)))


OTHERS = {"deepseek-v3": 3, "gpt-oss-20b": 7}


@pytest.mark.parametrize("name", OTHERS)
def test_other_routers_are_stand_alone_bit_for_bit(name):
    spec, size = SPECS[name], OTHERS[name]
    logits, bias = hard_rows(spec)
    logits = logits[[0, 9, 16, 20]]
    down = torch.randn(4, 50).half()
    shared = [] if bias is None else [bias]
    ((weights, ids),) = World(1).call(router_collective(spec), [[logits, *shared]])
    shards = zip(down.tensor_split(size, 1), logits.tensor_split(size, 1), strict=True)
    inputs = [[a, b, *shared] for a, b in shards]
    for protocol in ("push", "tagged"):
        world = World(size, protocol, blocks=3, order=2)
        for got in world.call(fused_collective(spec, 50), inputs):
            assert all(map(torch.equal, map(raw, got), map(raw, (down, weights, ids))))


@pytest.mark.parametrize("fault", ["within", "shard_offset"])
def test_control_a_kernel_that_takes_shards_for_equal_is_noticed(fault, monkeypatch):
    from ptx_world import program_of

    from pcie_comm.kernels.all_gather import Columns

    monkeypatch.setattr(UnevenColumns, fault, getattr(Columns, fault))
    program_of.cache_clear()
    heads = torch.randn(3, 10, 8).half()
    inputs = [[one] for one in heads.tensor_split(3, 1)]
    try:
        results = World(3, "push", blocks=3).call(AllGatherHeads(10), inputs)
    except IndexError as error:
        results = [(torch.zeros(1),)]
        print(error)
    finally:
        program_of.cache_clear()
    assert not all(torch.equal(got[0], heads) for got in results)

"""Wrong arguments of every public call: typed errors, nothing enqueued, the group works on."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from worlds import bytes_of, small

from pcie_comm import KIMI_K3, InvalidArgumentError, PcieDcpGroup, local_world
from pcie_comm.kernels import router_presets
from pcie_comm.kernels.registry import find

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

DOWN = torch.randn(2, 1792).bfloat16()
ROUTER = torch.randn(2, 448)
BIAS = torch.randn(896)
HEADS = torch.randn(2, 2, 8).half()
PAIR = torch.randn(2, 8), torch.randn(2, 6).half()
OUT = torch.empty(2, 16), torch.empty(2, 12).half()
SPARSE = torch.eye(2).to_sparse()
NO_TENSORS = (None, 5, 1.5, "x", [1.0], np.zeros((2, 8), "S3"), object())


def kimi(group, *tensors, **options):
    return group.all_gather_pair_kimi_topk(*tensors, **options)


PAIR_CALLS = {
    "dtype int32": lambda g: g.all_gather_pair(PAIR[0].int(), PAIR[1]),
    "dtype float64": lambda g: g.all_gather_pair(PAIR[0], PAIR[1].double()),
    "dtype complex": lambda g: g.all_gather_pair(torch.zeros(2, 8, dtype=torch.cfloat), PAIR[1]),
    "dtype bool": lambda g: g.all_gather_pair(torch.zeros(2, 8, dtype=torch.bool), PAIR[1]),
    "0 dimensions": lambda g: g.all_gather_pair(torch.tensor(1.0), PAIR[1]),
    "1 dimension": lambda g: g.all_gather_pair(PAIR[0][0], PAIR[1]),
    "3 dimensions": lambda g: g.all_gather_pair(PAIR[0][None], PAIR[1]),
    "rows differ": lambda g: g.all_gather_pair(PAIR[0][:1], PAIR[1]),
    "empty rows": lambda g: g.all_gather_pair(PAIR[0][:, :0], PAIR[1]),
    "columns apart": lambda g: g.all_gather_pair(torch.randn(2, 16)[:, ::2], PAIR[1]),
    "transposed": lambda g: g.all_gather_pair(torch.randn(8, 2).t(), PAIR[1]),
    "rows overlap": lambda g: g.all_gather_pair(torch.randn(9).as_strided((2, 8), (1, 1)), PAIR[1]),
    "one row expanded": lambda g: g.all_gather_pair(torch.randn(1, 8).expand(2, 8), PAIR[1]),
    "sparse": lambda g: g.all_gather_pair(SPARSE, SPARSE),
    "mkldnn": lambda g: g.all_gather_pair(PAIR[0].to_mkldnn(), PAIR[1]),
    "on meta": lambda g: g.all_gather_pair(PAIR[0].to("meta"), PAIR[1]),
}
OUT_CALLS = {
    "one tensor": lambda g: g.all_gather_pair(*PAIR, out=OUT[0]),
    "three tensors": lambda g: g.all_gather_pair(*PAIR, out=(*OUT, OUT[0])),
    "none": lambda g: g.all_gather_pair(*PAIR, out=()),
    "no tensors": lambda g: g.all_gather_pair(*PAIR, out=(None, None)),
    "a number": lambda g: g.all_gather_pair(*PAIR, out=5),
    "a dict": lambda g: g.all_gather_pair(*PAIR, out={0: OUT[0], 1: OUT[1]}),
    "a generator": lambda g: g.all_gather_pair(*PAIR, out=(tensor for tensor in OUT)),
    "swapped": lambda g: g.all_gather_pair(*PAIR, out=OUT[::-1]),
    "shape": lambda g: g.all_gather_pair(*PAIR, out=(torch.empty(2, 15), OUT[1])),
    "same size": lambda g: g.all_gather_pair(*PAIR, out=(torch.empty(16, 2), OUT[1])),
    "dtype": lambda g: g.all_gather_pair(*PAIR, out=(OUT[0].half(), OUT[1])),
    "on meta": lambda g: g.all_gather_pair(*PAIR, out=(OUT[0].to("meta"), OUT[1])),
    "sparse": lambda g: g.all_gather_pair(*PAIR, out=(torch.zeros(2, 16).to_sparse(), OUT[1])),
    "B20 transposed": lambda g: g.all_gather_pair(*PAIR, out=(torch.empty(16, 2).t(), OUT[1])),
    "rows apart": lambda g: g.all_gather_pair(*PAIR, out=(torch.empty(2, 20)[:, :16], OUT[1])),
    "expanded": lambda g: g.all_gather_pair(*PAIR, out=(torch.empty(1, 16).expand(2, 16), OUT[1])),
    "twice the same": lambda g: g.all_gather_pair(PAIR[0], PAIR[0], out=(OUT[0], OUT[0])),
    "B20 permuted": lambda g: g.all_gather_heads(
        HEADS, out=torch.empty(4, 8, 2).half().permute(2, 0, 1)
    ),
    "a number for heads": lambda g: g.all_gather_heads(HEADS, out=5),
}
KIMI_CALLS = {
    "fp16 down": lambda g: kimi(g, DOWN.half(), ROUTER, BIAS),
    "bf16 router": lambda g: kimi(g, DOWN, ROUTER.bfloat16(), BIAS),
    "fp64 bias": lambda g: kimi(g, DOWN, ROUTER, BIAS.double()),
    "narrow down": lambda g: kimi(g, DOWN[:, :-8], ROUTER, BIAS),
    "whole router": lambda g: kimi(g, DOWN, torch.randn(2, 896), BIAS),
    "short bias": lambda g: kimi(g, DOWN, ROUTER, BIAS[:-1]),
    "bias of a rank": lambda g: kimi(g, DOWN, ROUTER, BIAS[:448]),
    "bias of two dimensions": lambda g: kimi(g, DOWN, ROUTER, BIAS[None]),
    "bias apart": lambda g: kimi(g, DOWN, ROUTER, torch.randn(1792)[::2]),
    "rows differ": lambda g: kimi(g, DOWN, ROUTER[:1], BIAS),
    "router transposed": lambda g: kimi(g, DOWN, torch.randn(448, 2).t(), BIAS),
    "swapped": lambda g: kimi(g, ROUTER, DOWN, BIAS),
    "spec None": lambda g: kimi(g, DOWN, ROUTER, BIAS, spec=None),
    "spec a dict": lambda g: kimi(g, DOWN, ROUTER, BIAS, spec={"top_k": 16}),
    "spec a name": lambda g: kimi(g, DOWN, ROUTER, BIAS, spec="kimi"),
    "out of two": lambda g: kimi(
        g, DOWN, ROUTER, BIAS, out=(torch.empty(2, 3584).bfloat16(), torch.empty(2, 16))
    ),
    "ids of 64 bits": lambda g: kimi(
        g,
        DOWN,
        ROUTER,
        BIAS,
        out=(torch.empty(2, 3584).bfloat16(), torch.empty(2, 16), torch.empty(2, 16).long()),
    ),
}
GLM = router_presets.GLM_4_5_AIR
PAIR_TOPK_CALLS = {
    "no router": lambda g: g.all_gather_pair_topk(DOWN, ROUTER, BIAS, spec=None),
    "kimi's logits": lambda g: g.all_gather_pair_topk(DOWN, ROUTER, BIAS, spec=GLM),
    "no bias": lambda g: g.all_gather_pair_topk(DOWN, ROUTER[:, :64], None, spec=GLM),
    "short bias": lambda g: g.all_gather_pair_topk(DOWN, ROUTER[:, :64], BIAS[:64], spec=GLM),
    "rows differ": lambda g: g.all_gather_pair_topk(DOWN, ROUTER[:1, :64], BIAS[:128], spec=GLM),
    "a bias too many": lambda g: g.all_gather_pair_topk(
        DOWN, ROUTER[:, :64], BIAS[:128], spec=router_presets.QWEN3_MOE
    ),
}
OTHER_CALLS = {
    "heads fp32": lambda g: g.all_gather_heads(HEADS.float()),
    "heads of two dimensions": lambda g: g.all_gather_heads(HEADS[0]),
    "heads apart": lambda g: g.all_gather_heads(torch.randn(2, 4, 8).half()[:, ::2]),
    "no heads": lambda g: g.all_gather_heads(HEADS[:, :0]),
    "run nothing": lambda g: g.run(None, *PAIR),
    "run a name of none": lambda g: g.run("all_scatter", *PAIR),
    "run a class": lambda g: g.run(type(find("all_gather_pair")), *PAIR),
    "run a bare object": lambda g: g.run(object(), *PAIR),
    "run without tensors": lambda g: g.run(find("all_gather_pair")),
    "run with one too many": lambda g: g.run(find("all_gather_pair"), *PAIR, PAIR[0]),
    "prepare unknown": lambda g: g.prepare("all_scatter"),
    "prepare nothing": lambda g: g.prepare(None),
    "prepare a number": lambda g: g.prepare(5),
    "prepare a list": lambda g: g.prepare(["all_gather_pair"]),
    "prepare too many rows": lambda g: g.prepare("barrier", rows=9),
    "prepare rows below 0": lambda g: g.prepare("all_gather_pair", rows=-1),
    "prepare rows of text": lambda g: g.prepare("all_gather_pair", rows="8"),
    "prepare half a row": lambda g: g.prepare("all_gather_pair", rows=0.5),
    "prepare True rows": lambda g: g.prepare("all_gather_pair", rows=True),
    "channel without a name": lambda g: g.channel(None),
}
WRONG = {
    f"{kind}: {name}": call
    for kind, calls in (
        ("pair", PAIR_CALLS),
        ("out", OUT_CALLS),
        ("kimi", KIMI_CALLS),
        ("pair topk", PAIR_TOPK_CALLS),
        ("other", OTHER_CALLS),
    )
    for name, call in calls.items()
}


@pytest.fixture(scope="module")
def world():
    with local_world(2, "cpu", config=small(max_rows=8, timeout_s=2.0)) as world:
        yield world


def assert_works(world) -> None:
    """Epochs still agree, nothing is broken: a good call on every rank is exact."""
    for first, second in world.run(lambda g: g.all_gather_pair(*PAIR, out=None)):
        assert torch.equal(first, PAIR[0].repeat(1, 2))
        assert torch.equal(second, PAIR[1].repeat(1, 2))


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused_on_one_rank_and_the_group_works_on(call, world):
    for output in OUT:
        output.fill_(7.0)
    with pytest.raises(InvalidArgumentError) as caught:
        call(world.groups[1])
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) > 20
    assert all(bool((output == 7.0).all()) for output in OUT), "refused, but written to"
    assert_works(world)


@pytest.mark.parametrize("thing", NO_TENSORS, ids=[type(thing).__name__ for thing in NO_TENSORS])
def test_what_is_no_tensor_is_refused_everywhere(thing, world):
    group = world.groups[0]
    for call in (
        lambda: group.all_gather_pair(thing, PAIR[1]),
        lambda: group.all_gather_pair(PAIR[0], thing),
        lambda: group.all_gather_pair(PAIR[0], thing, out=OUT),
        lambda: group.all_gather_heads(thing),
        lambda: kimi(group, thing, ROUTER, BIAS),
        lambda: kimi(group, DOWN, thing, BIAS),
        lambda: kimi(group, DOWN, ROUTER, thing),
        lambda: group.all_gather_pair(*PAIR, out=(OUT[0], thing)),
    ):
        with pytest.raises(InvalidArgumentError, match=type(thing).__name__):
            call()
    assert_works(world)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_what_has_no_memory_is_refused(world):
    """Fake tensors, also where a real one was seen before, and what transforms wrap."""
    group, right = world.groups[0], torch.ones(2, 4)
    world.run(lambda g: g.run("all_reduce", right))
    fake = FakeTensorMode().from_tensor(right)
    for call in (
        lambda: group.run("all_reduce", fake),
        lambda: group.run("all_reduce", right, out=fake),
        lambda: torch.vmap(lambda t: group.run("all_reduce", t))(torch.ones(3, 2, 4)),
        lambda: torch.func.grad(lambda t: group.run("all_reduce", t).sum())(right),
    ):
        with pytest.raises(InvalidArgumentError, match="no strided array in memory"):
            call()
    assert_works(world)


def between_elements(shape: tuple[int, ...]) -> torch.Tensor:
    """Return fp32 two bytes behind a multiple of 4, as DLPack may bring it."""
    raw = np.zeros(4 * math.prod(shape) + 16, np.uint8)
    offset = -raw.ctypes.data % 16 + 2
    return torch.from_dlpack(np.ndarray(shape, np.float32, raw.data, offset))


def test_what_begins_between_elements_is_refused(world):
    """A GPU cannot load it: the context would be lost."""
    group = world.groups[0]
    for call in (
        lambda: kimi(group, DOWN, between_elements(tuple(ROUTER.shape)), BIAS),
        lambda: kimi(group, DOWN, ROUTER, between_elements(tuple(BIAS.shape))),
        lambda: group.run("all_reduce", between_elements((2, 4))),
        lambda: group.run("all_reduce", torch.ones(2, 4), out=between_elements((2, 4))),
        lambda: group.run("lse_reduce_scatter", torch.ones(2, 4, 8), between_elements((2, 4))),
    ):
        with pytest.raises(InvalidArgumentError, match=r"no multiple of its itemsize=4|align them"):
            call()
    assert_works(world)


def test_what_is_negated_lazily_is_refused(world):
    """Its bytes are not its numbers; also where a tensor of the same shape was seen before."""
    group, right = world.groups[0], torch.ones(2, 4)
    world.run(lambda g: g.run("all_reduce", right))
    with pytest.raises(InvalidArgumentError, match="negated lazily"):
        group.run("all_reduce", torch._neg_view(right))
    assert_works(world)


def test_the_width_of_kimis_row_is_its_own(world):
    with pytest.raises(InvalidArgumentError, match="width=64, but the down row of Kimi"):
        world.groups[0].all_gather_pair_topk(DOWN, ROUTER, BIAS, spec=KIMI_K3, width=64)
    assert_works(world)


@pytest.mark.parametrize("twice", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_owns_slabs_is_not_copied(twice, world):
    for owner in (world, world.groups[0], world.groups[0].channel("default")):
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            twice(owner)
    assert_works(world)


def test_b20_an_output_that_overlaps_is_refused():
    """With an input, wholly or in part, and with another output."""
    with local_world(2, "cpu", config=small()) as world:
        group, buffer = world.groups[0], torch.zeros(48)
        local = buffer[16:24].view(1, 8)
        for start in (8, 16, 20, 23, 1):
            out = buffer[start : start + 16].view(1, 16), OUT[1][:1]
            with pytest.raises(InvalidArgumentError, match=r"out\[0\] overlaps input 0: bytes 0x"):
                group.all_gather_pair(local, PAIR[1][:1], out=out)
        flat = torch.empty(100)
        with pytest.raises(InvalidArgumentError, match=r"out\[1\] overlaps out\[0\]"):
            group.all_gather_pair(
                PAIR[0], PAIR[0], out=(flat[:32].view(2, 16), flat[31:63].view(2, 16))
            )
        neighbours = flat[:32].view(2, 16), flat[32:64].view(2, 16)
        world.run(
            lambda g: g.all_gather_pair(PAIR[0], PAIR[0], out=neighbours if g.rank == 0 else None)
        )
        assert torch.equal(neighbours[1], PAIR[0].repeat(1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_b20_views_at_odd_addresses_are_exact(dtype, world):
    """Contiguous, as torch says, but two elements into a buffer."""
    raw = torch.randint(0, 256, (68 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    view = raw[2:66].view(1, 64)
    assert view.is_contiguous()
    assert view.data_ptr() % 16 != 0
    for first, second in world.run(lambda g: g.all_gather_pair(view, PAIR[0][:1])):
        assert bytes_of(first).tobytes() == 2 * bytes_of(view).tobytes()
        assert torch.equal(second, PAIR[0][:1].repeat(1, 2))


def test_settings_cannot_change_behind_the_ranks_backs(world):
    group = world.groups[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.config.protocol = "pull"
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.channel("default").info.protocol = "pull"


@pytest.mark.parametrize("config", ["fast", 5, {}, [], {"timeout_s": 1}])
def test_settings_of_the_wrong_type_are_refused(config):
    with pytest.raises(InvalidArgumentError, match="is no Config"):
        local_world(1, "cpu", config=config).__enter__()


def test_every_public_call_is_in_the_table():
    """A method that is added without its wrong arguments fails here."""
    covered = {"all_gather_pair", "all_gather_heads", "all_gather_pair_kimi_topk", "run", "prepare"}
    covered |= {
        "all_gather_pair_topk",
        "channel",
        "check",
        "abort",
        "describe",
        "close",
        "from_bootstrap",
        "stats",
    }
    public = {name for name in dir(PcieDcpGroup) if not name.startswith("_")}
    assert public == covered

"""Arrays of other libraries on CPU groups: no copy on the way in, none on the way out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from worlds import small

from pcie_comm import InvalidArgumentError, UnsupportedError, kimi_topk16, local_world
from pcie_comm.host_engine import HostEngine

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Exporter:
    """An array that can be exported through DLPack, and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.fixture
def seen(monkeypatch):
    """Addresses of inputs and outputs of every call, as the engine gets them."""
    found = []
    execute = HostEngine.execute

    def watched(engine, collective, plan, inputs, outputs):
        found.append(([t.data_ptr() for t in inputs], [t.data_ptr() for t in outputs]))
        execute(engine, collective, plan, inputs, outputs)

    monkeypatch.setattr(HostEngine, "execute", watched)
    return found


@pytest.fixture
def world():
    with local_world(1, "cpu", config=small(slot_nbytes=1 << 20)) as made:
        yield made


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_numpy_goes_in_and_comes_out_without_a_copy(world, seen):
    first = np.random.default_rng(1).standard_normal((3, 5), dtype=np.float32)
    second = first[:, :2].astype(np.float16)
    results = world.groups[0].all_gather_pair(first, second)
    assert [type(result) for result in results] == [np.ndarray] * 2
    assert seen == [([address(first), address(second)], [address(r) for r in results])]
    assert np.array_equal(results[0], first)
    assert np.array_equal(results[1], second)
    results[0][0, 0] = 7.0  # theirs: may be written


def test_out_is_written_where_it_lies(world, seen):
    group = world.groups[0]
    pair = (np.ones((2, 4), np.float32), np.full((2, 4), 2.0, np.float32))
    out = (np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32))
    for _ in range(2):
        assert group.all_gather_pair(*pair, out=out) is out
    assert seen == [([address(p) for p in pair], [address(o) for o in out])] * 2
    assert np.array_equal(out[0], pair[0])
    assert np.array_equal(out[1], pair[1])
    heads = np.ones((2, 1, 4), np.float16)
    one = np.zeros((2, 1, 4), np.float16)
    assert group.all_gather_heads(heads, out=one) is one
    assert seen[-1] == ([address(heads)], [address(one)])


def test_rows_may_lie_at_any_stride(world, seen):
    wide = np.arange(24, dtype=np.float32).reshape(3, 8)
    rows = wide[:, 2:6]
    (result,) = (world.groups[0].all_gather_heads(wide.astype(np.float16).reshape(3, 2, 4)),)
    first, _ = world.groups[0].all_gather_pair(rows, rows)
    assert seen[-1][0] == [address(rows)] * 2
    assert np.array_equal(first, rows)
    assert result.shape == (3, 2, 4)


def test_every_rank_gets_numpy():
    with local_world(3, "cpu", config=small()) as world:
        results = world.run(
            lambda g: g.channel("a").all_gather_pair(*[np.full((1, 2), g.rank, np.float32)] * 2)[0]
        )
    assert [result.tolist() for result in results] == [[[0.0, 0, 1, 1, 2, 2]]] * 3


def test_mixed_inputs_give_the_kind_of_the_first_foreign_one(world, seen):
    tensor, array = torch.ones(2, 3), np.ones((2, 3), np.float32)
    for pair in ((tensor, array), (array, tensor)):
        results = world.groups[0].all_gather_pair(*pair)
        assert [type(result) for result in results] == [np.ndarray] * 2
    out = (torch.zeros(2, 3), np.zeros((2, 3), np.float32))
    assert world.groups[0].all_gather_pair(tensor, tensor, out=out) is out
    assert seen[-1][1] == [out[0].data_ptr(), address(out[1])]
    assert out[1].tolist() == array.tolist()


def test_what_only_exports_gets_tensors(world, seen):
    tensor = torch.arange(6.0).view(2, 3)
    first, _ = world.groups[0].all_gather_pair(Exporter(tensor), Exporter(tensor))
    assert isinstance(first, torch.Tensor)
    assert torch.equal(first, tensor)
    assert seen[0][0] == [tensor.data_ptr()] * 2


def test_the_router_alone_takes_arrays(seen):
    logits = np.random.default_rng(2).standard_normal((4, 896), dtype=np.float32)
    bias = np.zeros(896, np.float32)
    weights, ids = kimi_topk16(logits, bias)
    want = kimi_topk16(torch.from_numpy(logits), torch.from_numpy(bias))
    assert isinstance(weights, np.ndarray)
    assert np.array_equal(weights, want[0].numpy())
    assert np.array_equal(ids, want[1].numpy())
    assert seen[0] == ([address(logits), address(bias)], [address(weights), address(ids)])


def test_a_result_that_numpy_has_no_dtype_for(world, seen):
    """Refused before anything happens; with out= torch holds it."""
    down = torch.randn(2, 3584).bfloat16()
    logits, bias = np.ones((2, 896), np.float32), np.zeros(896, np.float32)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        world.groups[0].all_gather_pair_kimi_topk(down, logits, bias)
    assert seen == []
    out = (torch.empty_like(down), np.empty((2, 16), np.float32), np.empty((2, 16), np.int32))
    world.groups[0].all_gather_pair_kimi_topk(down, logits, bias, out=out)
    assert torch.equal(out[0], down)
    assert out[2][0].tolist() == list(range(16))


def test_what_torch_cannot_see_is_refused(world):
    group = world.groups[0]
    right = np.ones((1, 2), np.float32)
    swapped = right.astype(">f4")
    for wrong in (swapped, np.ones((1, 2), "S3")):
        with pytest.raises(InvalidArgumentError, match="input 1 is a ndarray"):
            group.all_gather_pair(right, wrong)
    with pytest.raises(InvalidArgumentError, match=r"out\[1\] is a ndarray"):
        group.all_gather_pair(right, right, out=(right.copy(), swapped))
    with pytest.raises(InvalidArgumentError, match="input 1 is a list"):
        group.all_gather_pair(right, [1.0])
    with pytest.raises(InvalidArgumentError, match="expected shape"):
        group.all_gather_pair(right, right, out=(right.copy(), np.ones((3, 2), np.float32)))
    with pytest.raises(InvalidArgumentError, match="overlaps"):
        group.all_gather_pair(right, right, out=(right, right.copy()))
    first, _ = group.all_gather_pair(right, right)
    assert np.array_equal(first, right)


def test_what_must_not_be_written_is_not_written(world):
    """DLPack says nothing of it to torch."""
    right, fixed = np.ones((1, 2), np.float32), bytes(8)
    out = np.frombuffer(fixed, np.float32).reshape(1, 2)
    with pytest.raises(InvalidArgumentError, match=r"out\[0\] is a ndarray .* read-only"):
        world.groups[0].run("all_reduce", right, out=out)
    assert fixed == bytes(8)
    assert world.groups[0].run("all_reduce", out).tolist() == [[0.0, 0.0]]  # reading is fine


def test_rows_in_reverse_are_refused(world):
    """Here: torch's own refusal ends the process."""
    backwards = np.ones((2, 4), np.float32)[::-1]
    with pytest.raises(InvalidArgumentError, match=r"input 0 is a ndarray .*negative strides"):
        world.groups[0].run("all_reduce", backwards)


def test_no_rows_come_and_go(world):
    """NumPy exports strides of 0 for them."""
    none = np.zeros((0, 4), np.float32)
    for op in ("all_gather", "all_reduce"):
        assert world.groups[0].run(op, none).shape == (0, 4)


def test_an_array_on_a_device_that_torch_lacks_is_refused(world):
    class Elsewhere(Exporter):
        def __dlpack__(self, **options):
            raise AssertionError("Torch not compiled with CUDA enabled")

    with pytest.raises(InvalidArgumentError, match="not compiled with CUDA"):
        world.groups[0].run("all_reduce", Elsewhere(torch.ones(1, 2)))

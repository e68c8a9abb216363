"""Argument checks as properties: what passes is safe, what does not is refused by type."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pcie_comm.errors import InvalidArgumentError, UnsupportedError
from pcie_comm.kernels.collective import OutputSpec, PlanInfo, TensorMeta
from pcie_comm.kernels.columns import GATHERED_DTYPES, PACKS, pack_width, row_nbytes, stride_nbytes
from pcie_comm.kernels.plan_checks import check_plan, make_plan
from pcie_comm.kernels.registry import find
from pcie_comm.layout import MAX_WORLD
from pcie_comm.rank_order import group_order
from pcie_comm.tensors import alignment_of, check_outputs, dense, meta_of

OPS = ("all_gather_pair", "all_gather_heads", "all_gather_pair_kimi_topk", "kimi_topk16")
BUFFER = torch.zeros(256, dtype=torch.uint8)

dtypes = st.sampled_from([*GATHERED_DTYPES, "float64", "int32", "bool", "complex64", "float6"])
sizes = st.integers(0, 70) | st.sampled_from([56, 64, 128, 224, 256, 448, 512, 896, 1792, 3584])
tensor_metas = st.builds(
    lambda shape, strides, dtype, itemsize, alignment: TensorMeta(
        tuple(shape), dtype, tuple(strides[: len(shape)]), itemsize, alignment
    ),
    st.lists(sizes, max_size=4),
    st.lists(st.integers(0, 4000), min_size=4, max_size=4),
    dtypes,
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8, 16]),
)
infos = st.builds(
    PlanInfo,
    rank=st.just(0),
    world_size=st.integers(1, MAX_WORLD),
    protocol=st.sampled_from(["auto", "push", "pull", "tagged"]),
    segment_nbytes=st.integers(2, 1 << 14).map(lambda lines: 128 * lines),
    max_rows=st.integers(1, 64),
    max_blocks=st.integers(2, 32),
    output_alignment=st.sampled_from([1, 2, 4, 8, 16]),
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(OPS), infos, st.data())
def test_any_metadata_is_planned_or_refused_by_type(op, info, data):
    collective = find(op)
    count = collective.num_inputs
    metas = data.draw(st.lists(tensor_metas, min_size=count, max_size=count))
    try:
        plan = make_plan(collective, info, metas)
        check_plan(collective, plan, info, plan.staged_nbytes)
    except (InvalidArgumentError, UnsupportedError) as error:
        if "plugin" in str(error):
            pytest.fail(str(error))
        return
    assert plan.staged_nbytes <= info.segment_nbytes
    assert plan.kernel in collective.variants()
    assert all(metas[index].dtype in GATHERED_DTYPES for index in plan.exchanged)


@st.composite
def good_columns(draw):
    """A tensor that a gather takes: rows at any stride, dense within."""
    itemsize = draw(st.sampled_from([1, 2, 4]))
    rows, width = draw(st.integers(0, 9)), draw(st.integers(1, 200))
    stride = width + draw(st.integers(0, 20))
    alignment = draw(st.sampled_from([a for a in (1, 2, 4, 8, 16) if a >= itemsize]))
    return TensorMeta((rows, width), "float16", (stride, 1), itemsize, alignment)


@given(st.lists(good_columns(), min_size=1, max_size=2), st.sampled_from(sorted(PACKS)), st.data())
def test_a_pack_divides_every_address_it_is_used_at(metas, protocol, data):
    output = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    info = PlanInfo(0, 2, protocol, 1 << 20, 64, 32, output_alignment=output)
    pack = pack_width(info, protocol, metas)
    assert pack in PACKS[protocol]
    addresses = [
        meta.alignment + row * stride_nbytes(meta) for meta in metas for row in range(meta.shape[0])
    ]
    addresses += [output + row * row_nbytes(meta) for meta in metas for row in range(4)]
    assert all(address % pack == 0 for address in addresses)
    wider = [p for p in PACKS[protocol] if p > pack]
    facts = [value for meta in metas for value in (row_nbytes(meta), stride_nbytes(meta))]
    facts += [output, *(meta.alignment for meta in metas)]
    assert all(any(fact % p for fact in facts) for p in wider), "a wider pack would have done"


@st.composite
def views(draw, contiguous):
    """A view of the buffer, and the bytes that it touches."""
    dtype = draw(st.sampled_from([torch.uint8, torch.float16, torch.float32]))
    rows, width = draw(st.integers(0, 4)), draw(st.integers(1, 6))
    stride = width + (0 if contiguous else draw(st.integers(0, 6)))
    start = draw(st.integers(0, 40))
    flat = BUFFER.view(dtype)
    assume(start + rows * stride <= flat.numel())
    view = flat[start : start + rows * stride].view(rows, stride)[:, :width]
    if contiguous:
        view = flat[start : start + rows * width].view(rows, width)
    places = {
        (start + row * stride + column) * dtype.itemsize + byte
        for row in range(rows)
        for column in range(width)
        for byte in range(dtype.itemsize)
    }
    return view, places


@settings(max_examples=300)
@given(views(contiguous=False), st.lists(views(contiguous=True), min_size=1, max_size=3))
def test_outputs_that_share_a_byte_with_anything_are_refused(source, outputs):
    tensors = [tensor for tensor, _ in outputs]
    specs = [OutputSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]
    everything = [source[1], *(places for _, places in outputs)]
    shared = sum(map(len, everything)) != len(set().union(*everything))
    try:
        check_outputs("op", tensors, specs, [source[0]])
    except InvalidArgumentError as error:
        assert shared or "overlaps" in str(error)  # noqa: PT017 - rows of an input span gaps
        dense_source = source[0].is_contiguous() or not source[1]
        assert shared or not dense_source, "nothing is shared, and all is dense"
    else:
        assert not shared


@given(st.integers(0, 64), st.sampled_from([torch.uint8, torch.float16, torch.float32]))
def test_an_alignment_is_the_largest_power_of_two(offset, dtype):
    view = BUFFER.view(dtype)[offset % 32 :]
    alignment = alignment_of(view)
    assert alignment in (1, 2, 4, 8, 16)
    assert view.data_ptr() % alignment == 0
    assert alignment == 16 or view.data_ptr() % (2 * alignment)
    assert meta_of(view).alignment == alignment


@given(st.lists(st.integers(-2, 20) | st.booleans() | st.floats() | st.text(), max_size=18))
def test_ranks_are_an_order_or_refused(ranks):
    integers = all(type(rank) is int for rank in ranks)
    legal = 1 <= len(ranks) <= MAX_WORLD and integers and len(set(ranks)) == len(ranks)
    if legal and min(ranks) >= 0:
        assert group_order(ranks) == tuple(ranks)
    else:
        with pytest.raises(InvalidArgumentError):
            group_order(ranks)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.permutations(range(4)))
def test_dense_has_canonical_strides_and_the_same_elements(shape, order):
    made = torch.arange(math.prod(shape)).view(shape)
    twisted = made.permute([axis for axis in order if axis < len(shape)])
    copied = dense(twisted)
    strides = [math.prod(copied.shape[axis + 1 :]) for axis in range(copied.dim())]
    assert list(copied.stride()) == strides
    assert torch.equal(copied, twisted)

"""kimi_topk16 without a group, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from router_oracle import Rule, violations
from worlds import bytes_of

from pcie_comm import KIMI_K3, InvalidArgumentError, RouterSpec, UnsupportedError, kimi_topk16
from pcie_comm.kernels.reference import router_topk

VLLM = RouterSpec(896, 16, numerics="vllm")
POISON = 7


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, 896, generator=torch.Generator().manual_seed(count))


BIAS = rows_of(1)[0] * 0.1


def outputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((rows, 16), float(POISON)), torch.full((rows, 16), POISON, dtype=torch.int32)


def same(left, right) -> bool:
    return all(
        bytes_of(one).tobytes() == bytes_of(two).tobytes()
        for one, two in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("spec", [KIMI_K3, VLLM], ids=["torch", "vllm"])
@pytest.mark.parametrize("rows", [1, 2, 64, 300])
def test_results_keep_the_contract(rows, spec):
    """More rows than a group takes are fine: nothing is staged."""
    logits = rows_of(rows)
    weights, ids = kimi_topk16(logits, BIAS, spec=spec)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert weights.shape == ids.shape == (rows, 16)
    assert same((weights, ids), router_topk(logits, BIAS, spec))
    rule = Rule(none_valid="uniform") if spec is VLLM else Rule()
    assert violations(ids.numpy(), weights.numpy(), logits.numpy(), BIAS.numpy(), rule) == []


def test_given_outputs_are_written_and_returned():
    for given in (outputs(3), list(outputs(3))):
        weights, ids = kimi_topk16(rows_of(3), BIAS, out=given)
        assert weights is given[0]
        assert ids is given[1]
        assert same((weights, ids), kimi_topk16(rows_of(3), BIAS))


def test_no_rows():
    for out in (None, outputs(0)):
        weights, ids = kimi_topk16(torch.empty(0, 896), BIAS, out=out)
        assert weights.shape == ids.shape == (0, 16)


def test_rows_at_any_stride_and_any_address():
    logits = rows_of(5)
    want = kimi_topk16(logits, BIAS)
    wide = torch.full((5, 1000), torch.nan)
    wide[:, 3:899] = logits
    odd = torch.full((5 * 896 + 1,), torch.nan)[1:].view(5, 896)
    odd.copy_(logits)
    bias = torch.full((900,), torch.nan)[3:899]
    bias.copy_(BIAS)
    for view in (wide[:, 3:899], odd):
        assert same(kimi_topk16(view, bias), want)
    twice = logits.repeat_interleave(2, 0)[::2]
    assert twice.stride(0) == 2 * 896
    assert same(kimi_topk16(twice, BIAS), want)
    same_row = kimi_topk16(logits[:1].expand(4, 896), BIAS)
    assert same(same_row, [part[:1].repeat(4, 1) for part in want])


def test_gradients_are_not_tracked():
    logits = rows_of(2).requires_grad_()
    weights, _ = kimi_topk16(logits, BIAS.clone().requires_grad_())
    assert not weights.requires_grad
    given = outputs(2)
    kimi_topk16(logits, BIAS, out=given)
    assert not given[0].requires_grad


WRONG = {
    "one dimension": lambda: (rows_of(1)[0], BIAS),
    "three dimensions": lambda: (rows_of(1)[None], BIAS),
    "no dimension": lambda: (torch.tensor(1.0), BIAS),
    "B34 895 experts": lambda: (rows_of(2)[:, :-1], BIAS[:-1]),
    "B34 897 experts": lambda: (torch.randn(2, 897), torch.randn(897)),
    "B34 384 experts": lambda: (torch.randn(2, 384), torch.randn(384)),
    "B34 1024 experts": lambda: (torch.randn(2, 1024), torch.randn(1024)),
    "fp16 logits": lambda: (rows_of(2).half(), BIAS),
    "bf16 logits": lambda: (rows_of(2).bfloat16(), BIAS),
    "fp64 logits": lambda: (rows_of(2).double(), BIAS),
    "fp16 bias": lambda: (rows_of(2), BIAS.half()),
    "short bias": lambda: (rows_of(2), BIAS[:-1]),
    "bias for each row": lambda: (rows_of(2), rows_of(2)),
    "bias expanded": lambda: (rows_of(2), torch.zeros(1).expand(896)),
    "columns apart": lambda: (torch.randn(2, 1792)[:, ::2], BIAS),
    "transposed": lambda: (torch.randn(896, 2).t(), BIAS),
    "bias apart": lambda: (rows_of(2), torch.randn(1792)[::2]),
    "bias on meta": lambda: (rows_of(2), BIAS.to("meta")),
    "logits on meta": lambda: (rows_of(2).to("meta"), BIAS),
    "both on meta": lambda: (rows_of(2).to("meta"), BIAS.to("meta")),
    "sparse": lambda: (torch.eye(896).to_sparse(), BIAS),
    "NumPy logits of float64": lambda: (np.zeros((2, 896)), BIAS),
    "NumPy bias of bytes": lambda: (rows_of(2), np.zeros(896, "S4")),
    "a list": lambda: ([[0.0] * 896], BIAS),
    "nothing": lambda: (None, None),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_wrong_inputs_are_refused_and_outputs_untouched(make):
    logits, bias = make()
    given = outputs(2)
    for out in (None, given):
        with pytest.raises(InvalidArgumentError) as caught:
            kimi_topk16(logits, bias, out=out)
        assert caught.value.op == "kimi_topk16"
    assert same(given, outputs(2))


WRONG_OUT = {
    "one": lambda: outputs(2)[0],
    "weights only": lambda: outputs(2)[:1],
    "swapped": lambda: outputs(2)[::-1],
    "ids of 64 bits": lambda: (outputs(2)[0], torch.zeros(2, 16, dtype=torch.int64)),
    "weights in bf16": lambda: (outputs(2)[0].bfloat16(), outputs(2)[1]),
    "8 of them": lambda: tuple(output[:, :8].contiguous() for output in outputs(2)),
    "rows": lambda: outputs(3),
    "transposed": lambda: (torch.empty(16, 2).t(), outputs(2)[1]),
    "on meta": lambda: tuple(output.to("meta") for output in outputs(2)),
    "no tensors": lambda: (None, None),
    "a number": lambda: 5,
}


@pytest.mark.parametrize("make", WRONG_OUT.values(), ids=WRONG_OUT)
def test_wrong_outputs_are_refused(make):
    with pytest.raises(InvalidArgumentError):
        kimi_topk16(rows_of(2), BIAS, out=make())


def test_outputs_that_overlap_are_refused():
    flat = torch.zeros(2 * 896)
    logits, weights = flat.view(2, 896), flat[5 : 5 + 32].view(2, 16)
    with pytest.raises(InvalidArgumentError, match=r"out\[0\] overlaps input 0"):
        kimi_topk16(logits, BIAS, out=(weights, outputs(2)[1]))
    memory = torch.zeros(2, 16)
    with pytest.raises(InvalidArgumentError, match=r"out\[1\] overlaps out\[0\]"):
        kimi_topk16(rows_of(2), BIAS, out=(memory, memory.view(torch.int32)))


@pytest.mark.parametrize("spec", [None, "kimi", 16, {"top_k": 16}, [KIMI_K3], (896, 16)])
def test_what_is_no_router_is_refused(spec):
    with pytest.raises(InvalidArgumentError, match="is no RouterSpec"):
        kimi_topk16(rows_of(1), BIAS, spec=spec)


@pytest.mark.parametrize(("experts", "top_k"), [(1025, 16), (2048, 16), (896, 33), (1024, 1000)])
def test_b34_unsupported_routers_do_not_come_about(experts, top_k):
    """Not for the call, and not behind the specification's back: outputs are untouched."""
    with pytest.raises(UnsupportedError):
        kimi_topk16(rows_of(1), BIAS, spec=RouterSpec(experts, top_k))


def test_equal_routers_are_one():
    """A spec is a value: an equal one gives the same bits, whichever object it is."""
    again = RouterSpec(896, 16)
    assert again is not KIMI_K3
    assert same(kimi_topk16(rows_of(2), BIAS, spec=again), kimi_topk16(rows_of(2), BIAS))

"""Inputs are random, and whatever is wrong with an output is found."""

from __future__ import annotations

import pytest
import torch
from router_oracle import violations

from pcie_comm import UnsupportedError
from pcie_comm.bench import workload
from pcie_comm.bench.options import FUSED, HEADS, OPERATIONS, PAIR, ROUTER
from pcie_comm.bench.worlds import slot_nbytes
from pcie_comm.layout import LINE_NBYTES

CPU = torch.device("cpu")
WORLDS = {FUSED: 4, PAIR: 3, HEADS: 4, ROUTER: 1}


def make(op, rows=3):
    return workload.make(op, rows, [CPU] * WORLDS[op])


def right_outputs(work):
    outputs = work.outputs()
    for tensors in outputs:
        for output, right in zip(tensors, work.expected, strict=True):
            output.view(torch.uint8).copy_(right.view(torch.uint8))
    return outputs


@pytest.mark.parametrize("op", OPERATIONS)
def test_right_outputs_are_right_and_poisoned_ones_are_not(op):
    work = make(op)
    outputs = right_outputs(work)
    assert work.faults(outputs, ours=True) == []
    assert work.faults(outputs, ours=False) == []
    workload.poison(outputs)
    assert len(work.faults(outputs, ours=True)) >= len(work.expected) * work.world_size
    assert work.faults(work.outputs(), ours=False)


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_single_wrong_bit_is_found(op):
    work = make(op)
    for place in range(len(work.expected)):
        outputs = right_outputs(work)
        outputs[-1][place].view(torch.uint8).view(-1)[-1] ^= 1  # of a weight: its exponent
        (fault, *_) = work.faults(outputs, ours=True)
        assert fault.startswith(f"rank {work.world_size - 1}: output {place}")
        outputs = right_outputs(work)
        outputs[0][place].view(torch.uint8).view(-1)[0] ^= 1  # of a weight: its last bit
        assert work.faults(outputs, ours=True)


def test_weights_of_others_may_be_rounded_otherwise_and_no_more():
    work = make(FUSED)
    outputs = right_outputs(work)
    outputs[2][1].view(torch.int32)[0, 0] += 1
    assert work.faults(outputs, ours=True)
    assert work.faults(outputs, ours=False) == []
    outputs[2][1][0, 0] *= 1 + 1e-5
    assert work.faults(outputs, ours=False) == ["rank 2: 1 weights are wrong"]


@pytest.mark.parametrize("op", [FUSED, ROUTER])
def test_the_router_s_right_answer_is_that_of_the_oracle(op):
    work = make(op, rows=8)
    logits = work.inputs[0][0]
    if op == FUSED:
        logits = torch.cat([shard[1] for shard in work.inputs], dim=1)
    weights, ids = (tensor.numpy() for tensor in work.expected[-2:])
    assert list(violations(ids, weights, logits.numpy(), work.inputs[0][-1].numpy())) == []


@pytest.mark.parametrize("op", OPERATIONS)
def test_inputs_are_random_and_never_zero(op):
    work = make(op)
    for tensors in work.inputs:
        for tensor in tensors:
            assert tensor.view(torch.uint8).unique().numel() > 100
            if tensor.dtype == torch.float32:
                assert torch.isfinite(tensor).all()
                assert tensor.count_nonzero() == tensor.numel()


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_run_draws_the_same(op):
    first, second = make(op), make(op)
    for one, other in zip(first.expected, second.expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert not torch.equal(
        make(op, 4).expected[0][:3].view(torch.uint8), first.expected[0].view(torch.uint8)
    )


def test_sizes():
    assert make(PAIR, 1).received_nbytes() == 3 * (1194 * 2 + 44 + 298 * 4 + 24)
    assert make(FUSED, 2).received_nbytes() == 2 * (7168 + 16 * 128)
    assert make(ROUTER).received_nbytes() == 0


@pytest.mark.parametrize("op", [FUSED, PAIR, HEADS])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7, 8, 14, 16])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_slot_holds_tagged_push_of_the_largest_call(op, ranks, rows):
    work = workload.make(op, rows, [CPU] * ranks)
    segment = slot_nbytes(rows, ranks) // ranks // LINE_NBYTES * LINE_NBYTES
    assert 2 * work.received_nbytes() // ranks <= segment
    assert slot_nbytes(rows, ranks) % LINE_NBYTES == 0


def test_ranks_that_an_operation_does_not_serve_are_refused():
    with pytest.raises(UnsupportedError):
        workload.make(FUSED, 1, [CPU] * 3)

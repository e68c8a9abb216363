"""Every error means one thing, carries its facts, and survives a trip to another process."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from pcie_comm import errors
from pcie_comm.errors import (
    CommError,
    CudaError,
    InvalidArgumentError,
    MismatchError,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    UnsupportedError,
)

OWN_FACTS = {
    UnsupportedError: {"reason": "no P2P"},
    PeerDiedError: {"exit_code": -9},
    MismatchError: {"values": {0: "push", 1: {"rows": 8}}},
    PeerTimeoutError: {"wanted": 7, "seen": 5, "elapsed_ns": 12_345},
    CudaError: {"name": "CUDA_ERROR_OUT_OF_MEMORY", "call": "cuMemAlloc"},
}
CLASSES = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, CommError)
]


@pytest.mark.parametrize(
    "trip", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy]
)
@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_pickling_with_all_its_facts(cls, trip):
    facts = {"rank": 1, "peer": 2, "op": "all_gather_pair", "epoch": 9, **OWN_FACTS.get(cls, {})}
    error = cls("it failed: x=1; mend it", **facts)
    error.__cause__ = ValueError("before")
    again = trip(error)
    assert type(again) is cls
    assert again.args == error.args
    assert vars(again) == vars(error) == facts
    assert str(again) == str(error)
    assert str(error).startswith("it failed: x=1; mend it [rank=1, peer=2, op=all_gather_pair")


@pytest.mark.parametrize("cls", CLASSES)
def test_facts_that_are_not_known_are_not_shown(cls):
    error = cls("it failed", **OWN_FACTS.get(cls, {}))
    assert str(error) == "it failed"
    assert (error.rank, error.peer, error.op, error.epoch) == (None,) * 4


def test_rank_0_is_known():
    assert str(CommError("x", rank=0, epoch=0)) == "x [rank=0, epoch=0]"


def test_what_callers_may_catch():
    assert issubclass(InvalidArgumentError, ValueError)
    assert issubclass(PeerTimeoutError, TimeoutError)
    assert {cls.__name__ for cls in CLASSES if issubclass(cls, PeerError)} == {
        "PeerError",
        "PeerTimeoutError",
        "PeerAbortedError",
        "PeerDiedError",
    }
    assert issubclass(errors.CommWarning, UserWarning)


def test_values_of_a_mismatch_are_a_copy():
    values = {0: "push"}
    error = MismatchError("x", values=values)
    values[0] = "pull"
    assert error.values == {0: "push"}


@pytest.mark.parametrize("cls", OWN_FACTS)
def test_own_facts_are_keywords(cls):
    with pytest.raises(TypeError):
        cls("it failed", *OWN_FACTS[cls].values())

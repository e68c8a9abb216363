"""The fake takes what the real driver takes, and the host computes what the kernels do."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
from fake_gpu import NAMES, FakeDriver

from pcie_comm.probe.kernels import PROBES
from pcie_comm.probe.pattern import chain, count, pattern

CALLS = [name for name in dir(FakeDriver) if re.fullmatch(r"cu[A-Z]\w+", name)]
VARIADIC = ("cuLibraryLoadData", "cuLaunchKernel")  # the fake takes them apart itself


@pytest.mark.parametrize("name", [name for name in CALLS if name not in VARIADIC])
def test_calls_have_the_parameters_of_the_bindings(name):
    driver = pytest.importorskip("cuda.bindings.driver")
    first = getattr(driver, name).__doc__.splitlines()[0]
    inner = first[first.index("(") + 1 : first.rindex(")")]
    real = [part.split(":")[0].split()[-1] for part in inner.split(",") if part.strip()]
    own = [one for one in inspect.signature(getattr(FakeDriver, name)).parameters if one != "self"]
    assert len(own) == len(real), (first, own)


def test_every_kernel_is_there():
    assert sorted(str(key) for one in PROBES.values() for key in one.variants()) == sorted(NAMES)


def test_patterns_differ_by_seed_and_place():
    one, other = pattern(1, 4096), pattern(2, 4096)
    assert len(np.unique(one)) > 4090
    assert (one != other).mean() > 0.99
    assert (pattern(1, 8)[:4] == pattern(1, 4)).all()


def test_counting():
    memory = pattern(7, 100).view(np.uint8).copy()
    memory.view(np.uint32)[3:5] = pattern(9, 100)[3:5]
    memory.view(np.uint32)[50] ^= 1
    found = count(memory, 7, 9)
    assert (found.words, found.wrong, found.stale) == (100, 3, 2)


def test_a_chain_visits_every_place_once():
    memory, hops = chain(1 << 16, 512, 3)
    assert hops == 128
    at, seen = 0, []
    for _ in range(hops):
        seen.append(at)
        at = int(memory[at : at + 8].view(np.uint64)[0])
    assert at == 0 and len(set(seen)) == hops

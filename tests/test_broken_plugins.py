"""Plugins that break in every way: the error names plugin, class and rank, and others go on.

What lies in plans and references is in test_plugins.py; entry points are in
kernels/test_registry.py, kernels that never signal in kernels/test_example_kernels.py.
"""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from example_plugin import load_example
from launcher import run_threads
from typer.testing import CliRunner
from worlds import LIMIT_S, Held, build_each, close_each, on_each, small

from pcie_comm import (
    BrokenError,
    CommError,
    CompileError,
    InvalidArgumentError,
    KernelKey,
    MismatchError,
    OutputSpec,
    PeerTimeoutError,
    UnsupportedError,
    cli,
    local_world,
    register,
)
from pcie_comm.cuda_engine import CudaEngine
from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels import registry
from pcie_comm.kernels.store import KernelStore

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

GOOD = load_example()
EXAMPLE = type(GOOD)
NAMED = r"plugin 'all_reduce_max' \((abc|test_broken_plugins)\.\S*Broken\)"
X = torch.ones(2, 3)


def broken(**methods: object):
    return type("Broken", (EXAMPLE,), methods)()


def planning(**fields: object):
    class Broken(EXAMPLE):
        def plan(self, info, *tensors):
            return dataclasses.replace(super().plan(info, *tensors), **fields)

    return Broken()


def failing(self, *_):
    raise ZeroDivisionError("1/0")


def assert_works(groups) -> None:
    """Check a good call, on groups or on lanes of theirs."""
    results = run_threads(lambda rank: groups[rank].run(GOOD, X + rank), len(groups))
    assert all(torch.equal(one, X + len(groups) - 1) for one in results), results


WIDE = OutputSpec((2, 3), "float32")
ALONE = {
    "plan raises": (broken(plan=failing), UnsupportedError, "failed to plan a call: ZeroDiv"),
    "no plan": (broken(plan=lambda self, *_: None), UnsupportedError, "returned NoneType"),
    "another op": (planning(op="all_gather"), UnsupportedError, "op='all_gather' and kernel="),
    "another op's kernel": (
        planning(kernel=KernelKey("all_reduce", ("push",))),
        UnsupportedError,
        "are not both of this plugin",
    ),
    "a kernel that is none": (planning(kernel="push"), UnsupportedError, "returned no usable plan"),
    "too few scalars": (planning(scalars=(1,)), UnsupportedError, "scalars=1, num_scalars"),
    "scalars that are none": (planning(scalars=(1, "2")), UnsupportedError, "TypeError"),
    "scalars too large": (planning(scalars=(1, 1 << 63)), UnsupportedError, "do not fit 64 bits"),
    "too many outputs": (planning(outputs=(WIDE,) * 2), UnsupportedError, "outputs=2"),
    "too large a grid": (planning(grid=99), UnsupportedError, "asks for grid=99"),
    "too much staged": (planning(staged_nbytes=1 << 40), InvalidArgumentError, "stages nbytes="),
    "threads for nobody": (broken(block=16), UnsupportedError, "block=16 threads"),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_fails_before_a_call_names_plugin_class_and_rank(name):
    """Nothing has happened then: the same group makes the next call."""
    plugin, kind, text = ALONE[name]
    groups = build_each([{}] * 2)
    with pytest.raises(kind, match=NAMED) as caught:
        groups[1].run(plugin, X)
    assert text in str(caught.value)
    assert (caught.value.rank, caught.value.op) == (1, "all_reduce_max")
    assert_works(groups)
    close_each(groups)


def test_an_error_of_ours_that_a_plugin_raises_gets_its_rank():
    groups = build_each([{}] * 2)
    with pytest.raises(InvalidArgumentError, match="local is no") as caught:
        groups[1].run(GOOD, X.int())
    assert (caught.value.rank, caught.value.op) == (1, "all_reduce_max")
    assert_works(groups)
    close_each(groups)


AFTER = {
    "raises": (failing, "failed to compute a result: ZeroDivisionError"),
    "another shape": (lambda self, shards: (shards[0][0][:1],), "returned=[((1, 3),"),
    "two results": (lambda self, shards: (shards[0][0],) * 2, "other results than it planned"),
    "no tensor": (lambda self, shards: (1,), "AttributeError"),
}


@pytest.mark.parametrize("name", AFTER)
def test_a_reference_that_fails_costs_its_rank_a_result_and_nothing_else(name):
    """The exchange is over by then, so the other rank has what it asked for."""
    reference, text = AFTER[name]
    groups, plugins = build_each([{}] * 2), (GOOD, broken(reference=reference))
    good, error = on_each(groups, lambda group: group.run(plugins[group.rank], X + group.rank))
    assert torch.equal(good, X + 1)
    assert isinstance(error, UnsupportedError)
    assert (error.rank, error.op) == (1, "all_reduce_max")
    assert text in str(error)
    assert "Broken)" in str(error)
    assert_works(groups)
    close_each(groups)


def test_a_reference_that_hangs_is_named_to_its_peers():
    """They have their result, and wait for that rank in the next call, no longer than the timeout.

    Another channel works, and so does a new group.
    """
    gate = Held()

    def hang(self, shards):
        gate.wait()
        return EXAMPLE.reference(self, shards)

    config = small(timeout_s=0.3)
    groups = build_each([{"config": config}] * 2)
    lanes = on_each(groups, lambda group: group.channel("other"))
    plugin = broken(reference=hang)
    hanging = threading.Thread(target=groups[1].run, args=(plugin, X))
    hanging.start()
    assert torch.equal(groups[0].run(GOOD, X), X)
    with pytest.raises(PeerTimeoutError, match="rank 1 did not arrive") as caught:
        groups[0].run(GOOD, X)
    assert (caught.value.rank, caught.value.peer, caught.value.op) == (0, 1, "all_reduce_max")
    assert_works(lanes)
    gate.open()
    hanging.join(LIMIT_S)
    close_each(groups)
    again = build_each([{}] * 2)
    assert_works(again)
    close_each(again)


def by_rank(**fields):
    """Plan otherwise on rank 1."""

    class Broken(EXAMPLE):
        def plan(self, info, *tensors):
            plan = super().plan(info, *tensors)
            return dataclasses.replace(plan, **fields) if info.rank else plan

    return Broken()


@pytest.mark.parametrize("fields", [{"facts": ("pull", 7)}, {"grid": 2}, {"staged_nbytes": 4}])
def test_plans_that_differ_between_ranks_do_not_match(fields):
    """Both ranks say so and name each other; their other channels and new groups work."""
    plugin = by_rank(**fields)
    groups = build_each([{}] * 2)
    lanes = on_each(groups, lambda group: group.channel("other"))
    errors = on_each(groups, lambda group: group.run(plugin, X))
    assert [type(error) for error in errors] == [MismatchError] * 2
    assert [(e.rank, e.peer, e.op) for e in errors] == [
        (0, 1, "all_reduce_max"),
        (1, 0, "all_reduce_max"),
    ]
    with pytest.raises(BrokenError):
        groups[0].run(GOOD, X)
    assert_works(lanes)
    close_each(groups)


def test_ranks_that_exchange_other_inputs_do_not_match():
    """Their bytes would be taken for each other's: what is exchanged goes into the signature."""

    class Broken(EXAMPLE):
        num_inputs = 2

        def plan(self, info, *tensors):
            plan = super().plan(info, tensors[0])
            return dataclasses.replace(plan, exchanged=(info.rank,))

        def reference(self, shards):
            return super().reference([shard[:1] for shard in shards])

    plugin = Broken()
    groups = build_each([{}] * 2)
    errors = on_each(groups, lambda group: group.run(plugin, X, X))
    assert [type(error) for error in errors] == [MismatchError] * 2
    close_each(groups)


def test_a_rank_that_plans_no_exchange_is_waited_for_and_named():
    plugin = by_rank(exchanged=())
    groups = build_each([{"config": small(timeout_s=0.3)}] * 2)
    error, alone = on_each(groups, lambda group: group.run(plugin, X + group.rank))
    assert type(error) is PeerTimeoutError
    assert error.peer == 1
    assert torch.equal(alone, X + 1)
    close_each(groups)


def test_a_world_size_that_cannot_be_judged():
    plugin = broken(check_world_size=failing)
    with (
        local_world(1, "cpu") as world,
        pytest.raises(UnsupportedError, match=NAMED) as caught,
    ):
        world.groups[0].prepare(plugin)
    assert caught.value.rank == 0


# --- kernels -------------------------------------------------------------------------------------


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def test_device_code_that_is_not_there(own_registry):
    """It fails where a kernel is wanted; groups, which compare the sources of all, do not."""
    plugin = register(broken(name="sourceless", device_sources=[Path("/nowhere/code.py")]))
    with pytest.raises(CompileError, match=r"Broken\) has device code that cannot be read"):
        compiler.fingerprint(plugin)
    groups = build_each([{}] * 2)
    assert_works(groups)
    close_each(groups)


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ({"kernel": failing}, "does not compile for sm_90a: ZeroDivisionError: 1/0"),
        ({"variants": failing}, "failed to list its kernels: ZeroDivisionError: 1/0"),
    ],
)
def test_the_program_names_what_does_not_compile(methods, text, own_registry, tmp_path):
    pytest.importorskip("cutlass", reason="compiles kernels")
    register(broken(name="faulty", **methods))
    words = ["compile", "--op", "faulty", "--arch", "sm_90a", "--jobs", "1"]
    done = CliRunner().invoke(cli.app, [*words, "--out", str(tmp_path)])
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert text in said
    assert "plugin 'faulty' (" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("methods", "kind"),
    [
        ({"kernel": failing}, CompileError),
        ({"variants": failing}, UnsupportedError),
        ({"variants": lambda self: ["push"]}, UnsupportedError),
        ({"num_scalars": failing}, CompileError),
    ],
)
def test_preparing_for_a_gpu_names_class_and_rank(methods, kind, tmp_path):
    """An engine as far as it goes without a GPU: what it loads must be compiled first."""
    pytest.importorskip("cutlass", reason="compiles kernels")
    engine = CudaEngine.__new__(CudaEngine)
    engine.rank, engine.world_size = 5, 8
    engine.capability, engine._kernels = (9, 0), {}
    engine.store = KernelStore(None, tmp_path)
    with pytest.raises(kind, match=NAMED) as caught:
        engine.prepare(broken(**methods), ("push",))
    assert (caught.value.rank, caught.value.op) == (5, "all_reduce_max")


def test_every_error_here_is_one_of_ours():
    assert all(issubclass(kind, CommError) for _, kind, _ in ALONE.values())

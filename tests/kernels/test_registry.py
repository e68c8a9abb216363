"""Plugins by name: built-in ones, one's own, and those of other packages."""

from __future__ import annotations

import importlib.metadata
import time
import warnings
from types import SimpleNamespace

import pytest
import torch

from pcie_comm import (
    Collective,
    CommWarning,
    InvalidArgumentError,
    UnsupportedError,
    local_world,
    register,
    torch_ops,
)
from pcie_comm.kernels import registry
from pcie_comm.kernels.all_gather_pair import AllGatherPair
from pcie_comm.kernels.registry import collectives, find

BUILT_IN = {"all_gather_pair", "all_gather_heads", "kimi_topk16", "all_gather_pair_kimi_topk"}
BUILT_IN |= {"all_gather", "barrier", "all_reduce", "reduce_scatter", "lse_reduce_scatter"}
BUILT_IN |= {"all_reduce_rms_norm", "vocab_argmax"}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Start from nothing; leave no trace."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_loaded_points", set())
    monkeypatch.setattr(registry, "_broken_points", {})
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])


def plugin_class(name: str) -> type[Collective]:
    return type("Plugin", (AllGatherPair,), {"name": name})


class Point:
    """Stands for an entry point of an installed package."""

    def __init__(self, name, loaded):
        self.name, self.value = name, f"package:{name}"
        self.loaded, self.loads = loaded, 0
        self.dist = SimpleNamespace(name=f"{name}-package")

    def load(self):
        self.loads += 1
        if isinstance(self.loaded, BaseException):
            raise self.loaded
        return self.loaded


def install(monkeypatch, *points):
    def entry_points(group):
        assert group == "pcie_comm.collectives"
        return points

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def test_built_in_plugins_are_there_from_the_start():
    assert set(collectives()) == BUILT_IN
    for name, collective in collectives().items():
        assert find(name) is collective
        assert collective.name == name
        assert collective.num_outputs() >= 1
        keys = collective.variants()
        assert len({str(key) for key in keys}) == len(keys) > 0
        assert all(key.op == name for key in keys)


def test_an_own_plugin_is_found_by_name():
    plugin = register(plugin_class("mine")())
    assert find("mine") is plugin
    assert set(collectives()) == BUILT_IN | {"mine"}
    with local_world(1, "cpu") as world:
        world.groups[0].prepare("mine", rows=4)


def test_an_unknown_name_lists_those_that_exist():
    with pytest.raises(InvalidArgumentError) as caught:
        find("all_scatter")
    assert "op='all_scatter' is unknown" in str(caught.value)
    assert all(name in str(caught.value) for name in BUILT_IN)


def test_a_name_belongs_to_one_class():
    first = plugin_class("mine")
    register(first())
    second = register(first())
    assert find("mine") is second
    with pytest.raises(InvalidArgumentError, match="name='mine' belongs to Plugin"):
        register(plugin_class("mine")())
    assert find("mine") is second


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_the_names_of_built_in_plugins_are_taken_even_before_their_first_use(name):
    with pytest.raises(InvalidArgumentError, match=f"name='{name}' belongs to"):
        register(plugin_class(name)())
    assert set(collectives()) == BUILT_IN


@pytest.mark.parametrize("thing", [None, "mine", 5, plugin_class("mine"), plugin_class("")()])
def test_what_is_no_named_plugin_is_refused(thing):
    with pytest.raises(InvalidArgumentError, match="is no named Collective"):
        register(thing)


def test_plugins_of_other_packages_are_loaded_once(monkeypatch):
    """As a class or as an instance; what an entry point is called need not be the plugin's name."""
    points = Point("theirs", plugin_class("theirs")), Point("other", plugin_class("another")())
    install(monkeypatch, *points)
    assert set(collectives()) == BUILT_IN | {"theirs", "another"}
    assert find("theirs") is find("theirs")
    collectives()
    assert [point.loads for point in points] == [1, 1]


def gather_heads() -> list[torch.Tensor]:
    heads = torch.ones(1, 1, 4).half()
    with local_world(2, "cpu") as world:
        return world.run(lambda group: group.all_gather_heads(heads))


FAULTS = [ImportError("no module named x"), SyntaxError("bad"), SystemExit(3), object()]
NAMED = r"plugin 'theirs' \(package:theirs, package theirs-package\) does not load"


@pytest.mark.parametrize("fault", FAULTS)
def test_an_entry_point_that_does_not_load_costs_only_its_callers(fault, monkeypatch):
    """Listing warns once and names the package; asking for that name raises; the rest works."""
    broken, sound = Point("theirs", fault), Point("other", plugin_class("another"))
    install(monkeypatch, broken, sound)
    with pytest.warns(CommWarning, match=NAMED) as seen:
        results = gather_heads()
    assert [tuple(result.shape) for result in results] == [(1, 2, 4)] * 2
    assert len(seen) == 1
    assert set(collectives()) == BUILT_IN | {"another"}
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=NAMED) as caught:
            find("theirs")
        assert caught.value.reason == "entry point theirs failed"
        assert caught.value.__cause__ is not None
    with pytest.raises(InvalidArgumentError, match=r"'nothing' is unknown.*; theirs did not load"):
        find("nothing")
    assert (broken.loads, sound.loads) == (1, 1)


def test_an_entry_point_cannot_take_the_name_of_a_built_in_plugin(monkeypatch):
    install(monkeypatch, Point("all_gather_pair", plugin_class("all_gather_pair")))
    with pytest.warns(CommWarning, match="belongs to AllGatherPair"):
        assert set(collectives()) == BUILT_IN
    assert type(find("all_gather_pair")) is AllGatherPair


@pytest.mark.parametrize("turned", [False, True])
def test_of_two_packages_with_one_name_the_first_by_name_has_it(turned, monkeypatch):
    """Whatever order a rank's file system lists them in: every rank gets the same."""
    first, second = plugin_class("shared"), plugin_class("shared")
    points = [Point("a", first), Point("b", second)]
    install(monkeypatch, *(points[::-1] if turned else points))
    with pytest.warns(CommWarning, match=r"package b-package\) does not load.*belongs to Plugin"):
        collectives()
    assert type(find("shared")) is first
    with pytest.raises(UnsupportedError, match="b-package"):
        find("b")


def test_a_plugin_that_torch_refuses_is_not_registered(monkeypatch):
    """Its operator cannot be made: nothing of it stays."""

    def refuse(self):
        raise ZeroDivisionError("no number")

    faulty = type("Faulty", (AllGatherPair,), {"name": "faulty", "num_outputs": refuse})
    monkeypatch.setattr(registry, "on_register", [torch_ops.define])
    install(monkeypatch, Point("faulty", faulty))
    with pytest.warns(CommWarning, match="no number"):
        assert "faulty" not in collectives()
    with pytest.raises(UnsupportedError, match="ZeroDivisionError"):
        find("faulty")


def test_ranks_that_are_threads_load_entry_points_once(monkeypatch):
    class Slow(Point):
        def load(self):
            time.sleep(0.05)
            return super().load()

    point = Slow("theirs", plugin_class("theirs"))
    install(monkeypatch, point)
    with local_world(4, "cpu"):
        assert point.loads == 1


def test_an_instance_that_its_user_registered_stays(monkeypatch):
    """The entry point of the same class, looked at later, does not replace it."""
    own = plugin_class("theirs")
    plugin = register(own())
    install(monkeypatch, Point("theirs", own))
    assert collectives()["theirs"] is plugin
    assert plugin.registered


def test_without_a_broken_entry_point_nothing_is_said(monkeypatch):
    """Negative control of the warnings above."""
    install(monkeypatch, Point("theirs", plugin_class("theirs")))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert "theirs" in collectives()
    assert seen == []

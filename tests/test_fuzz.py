"""Every public call with arguments of any kind: typed errors only, nothing left, the group works.

Both ranks make the same call, each with objects of its own, so one that happens to be right
completes. A TypeError is allowed where Python itself would refuse the arguments: their number, or
their names.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from leaks import own_files, own_mappings
from worlds import small

from pcie_comm import (
    KIMI_K3,
    CommError,
    Config,
    PcieDcpGroup,
    RouterSpec,
    kimi_topk16,
    local_world,
)
from pcie_comm.kernels.registry import collectives, find, register

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

Make = Callable[[], Any]
"""Makes a value anew, so that ranks share none."""

FUZZ = settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Odd:
    """Compares, hashes and prints, but only as itself."""


class Hostile:
    """Raises where objects are asked for the plainest things."""

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self):
        raise RuntimeError("no truth")

    def __repr__(self):
        return "<Hostile>"


THINGS: list[Make] = [
    *(
        lambda value=value: value
        for value in (None, True, False, 0, 1, 2, -1, 17, 1 << 70, 10**400)
    ),
    *(lambda value=value: value for value in (0.5, float("nan"), float("inf"), 1e300, 2j)),
    *(
        lambda value=value: value
        for value in ("", "cpu", "cuda:99", "auto", "push", "\0", "é" * 300)
    ),
    *(lambda value=value: value for value in (b"", b"\x80\x04N.", (), [], {}, set(), range(3))),
    *(
        lambda value=value: value
        for value in (object, print, KIMI_K3, Config, RouterSpec, np.int64(2))
    ),
    *(Odd, Hostile, object, Config),
    lambda: np.zeros((2, 8), np.float32),
    lambda: torch.device("cpu"),
    lambda: torch.float32,
    lambda: find("all_gather_pair"),
    lambda: [[1.0, 2.0]],
]
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float64, torch.int32, torch.int64, torch.bool, torch.cfloat, torch.uint8),
)
SHAPES = (
    (),
    (0,),
    (1,),
    (2, 8),
    (0, 8),
    (8, 0),
    (2, 2, 8),
    (1, 1792),
    (2, 448),
    (896,),
    (9, 4),
    (2,) * 5,
)
things = st.sampled_from(THINGS)


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, form: str) -> torch.Tensor:
    made = torch.ones(shape, dtype=torch.float32).to(dtype)
    if form == "transposed" and made.dim() > 1:
        return made.transpose(0, -1)
    if form == "expanded" and made.dim():
        return made[:1].expand(shape)
    if form == "odd" and made.numel():
        return torch.ones(made.numel() + 1).to(dtype)[1:].view(shape)
    if form == "sparse" and dtype == torch.float32 and made.dim():
        return made.to_sparse()
    if form == "meta":
        return made.to("meta")
    if form == "grad" and dtype == torch.float32:
        return made.requires_grad_()
    return made


FORMS = ("dense", "dense", "transposed", "expanded", "odd", "sparse", "meta", "grad")
tensors = st.builds(
    lambda shape, dtype, form: lambda: tensor_of(shape, dtype, form),
    st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
    st.sampled_from(FORMS),
)
pairs = st.lists(tensors | things, max_size=4).map(lambda makes: lambda: tuple(m() for m in makes))
values = st.one_of(tensors, things, pairs)


def names_of(function: Callable[..., Any]) -> list[str]:
    """Names that a call may give, and one that it may not."""
    found = [
        name
        for name, one in inspect.signature(function).parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and name != "self"
    ]
    return [*found, "wrong"]


def outcome(function: Callable[..., Any], args: list[Make], options: dict[str, Make]) -> str:
    """Make a call; return the class of what it raised, or nothing. Any other error passes on."""
    positional, named = [m() for m in args], {name: m() for name, m in options.items()}
    try:
        function(*positional, **named)
    except CommError as error:
        return type(error).__name__ if str(error) else pytest.fail("an error without a text")
    except TypeError:
        with pytest.raises(TypeError):
            inspect.signature(function).bind(*positional, **named)
        return "TypeError"
    return ""


def construct(*arguments: Any, **named: Any) -> None:
    PcieDcpGroup(*arguments, **named).close()


def enter(*arguments: Any, **named: Any) -> None:
    with local_world(*arguments, **named) as world:
        world.run(lambda group: group.check())


construct.__signature__ = inspect.signature(PcieDcpGroup)  # type: ignore[attr-defined]
enter.__signature__ = inspect.signature(local_world)  # type: ignore[attr-defined]

METHODS = ("all_gather_pair", "all_gather_heads", "all_gather_pair_kimi_topk", "run", "prepare")
PLAIN = ("check", "describe", "channel")


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    with local_world(2, "cpu", config=small(max_rows=8, timeout_s=5.0)) as world:
        world.run(lambda group: group.channel("second"))
        yield world


Resources = tuple[int, int, int, int]


def resources() -> Resources:
    """Count threads, descriptors, files and mappings."""
    descriptors = len(os.listdir("/proc/self/fd"))
    return threading.active_count(), descriptors, len(own_files()), len(own_mappings())


def assert_nothing_left(before: Resources) -> None:
    if resources() != before:
        gc.collect()
    assert resources() == before


def assert_works(world: Any) -> None:
    first, second = torch.rand(2, 8), torch.rand(2, 4)
    for one, two in world.run(lambda group: group.all_gather_pair(first, second)):
        assert torch.equal(one, first.repeat(1, 2))
        assert torch.equal(two, second.repeat(1, 2))


@pytest.fixture(scope="module")
def before(world) -> Resources:
    assert_works(world)
    return resources()


@FUZZ
@given(st.data())
def test_calls_of_a_group_and_of_a_lane(world, before, data):
    name = data.draw(st.sampled_from(METHODS + PLAIN))
    owner = data.draw(st.sampled_from(["group", "lane"])) if name in METHODS[:4] else "group"
    method = getattr(PcieDcpGroup, name)
    args = data.draw(st.lists(values, max_size=4))
    options = data.draw(st.dictionaries(st.sampled_from(names_of(method)), values, max_size=2))
    if name == "channel":  # a name that is right makes a lane, and memory for it
        args = [a for a in args if not isinstance(a(), str)]
        options = {key: o for key, o in options.items() if not isinstance(o(), str)}

    def call(group: Any) -> str:
        target = group if owner == "group" else group.channel("second")
        return outcome(getattr(target, name), args, options)

    results = world.run(call)
    assert len(set(results)) == 1, results
    assert_works(world)
    assert_nothing_left(before)


@FUZZ
@given(st.lists(values, max_size=3), st.dictionaries(st.sampled_from(["out", "spec", "x"]), values))
def test_the_router(args, options):
    outcome(kimi_topk16, args, options)


SETTINGS = [field.name for field in dataclasses.fields(Config)]
FIELDS = [field.name for field in dataclasses.fields(RouterSpec)]


@FUZZ
@given(st.lists(values, max_size=3), st.dictionaries(st.sampled_from([*SETTINGS, "x"]), values))
def test_settings(args, options):
    outcome(Config, args, options)


@FUZZ
@given(st.dictionaries(st.sampled_from([*FIELDS, "x"]), values), st.booleans())
def test_routers(options, named):
    outcome(RouterSpec, [] if named else [lambda: 896, lambda: 16], options)


@FUZZ
@given(
    st.lists(values, max_size=2),
    st.dictionaries(
        st.sampled_from(["ranks", "device", "process_group", "transport", "config", "x"]),
        values,
        max_size=3,
    ),
)
def test_constructors(args, options):
    """Whoever is refused leaves nothing; a group of one that happens to be right works."""

    found = resources()
    outcome(construct, args, options)
    assert_nothing_left(found)


@FUZZ
@given(
    values,
    st.dictionaries(st.sampled_from(["device", "transport", "config", "x"]), values, max_size=3),
)
def test_worlds(size, options):
    found = resources()
    outcome(enter, [size], options)
    assert_nothing_left(found)


@FUZZ
@given(st.lists(values, min_size=1, max_size=4))
def test_bootstraps_of_ones_own(args):
    found = resources()
    outcome(PcieDcpGroup.from_bootstrap, args, {})
    assert_nothing_left(found)


@FUZZ
@given(values)
def test_what_a_world_runs_and_what_is_registered(world, before, thing):
    known = set(collectives())
    for function in (world.run, register):
        made = thing()
        if not callable(made):
            outcome(function, [lambda made=made: made], {})
    assert set(collectives()) == known
    assert_works(world)
    assert_nothing_left(before)


RIGHT: dict[Callable[..., Any], dict[str, Make]] = {
    Config: {name: lambda: None for name in SETTINGS},
    RouterSpec: {name: lambda name=name: getattr(KIMI_K3, name) for name in FIELDS},
    construct: {"ranks": lambda: 1, "device": lambda: "cpu", "process_group": lambda: None}
    | {"transport": lambda: "auto", "config": small},
    enter: {"world_size": lambda: 1, "device": lambda: "cpu"}
    | {"transport": lambda: "auto", "config": small},
    kimi_topk16: {
        "router_logits": lambda: torch.ones(1, 896),
        "correction_bias": lambda: torch.ones(896),
        "out": lambda: None,
        "spec": lambda: KIMI_K3,
    },
}
"""Right arguments, of which one at a time is replaced."""


@pytest.mark.parametrize("function", RIGHT, ids=lambda f: f.__name__)
def test_every_argument_in_turn_is_each_of_the_things(function):
    found = resources()
    right = RIGHT[function] if function is not Config else {}
    assert outcome(function, [], right) == ""
    for name in RIGHT[function]:
        kinds = {outcome(function, [], right | {name: make}) for make in THINGS}
        assert kinds <= {"", "InvalidArgumentError", "UnsupportedError"}, name
        assert "InvalidArgumentError" in kinds, name
    assert_nothing_left(found)


def test_control_an_untyped_error_and_a_leak_are_noticed():
    def untyped() -> None:
        raise KeyError("x")

    def mistyped(number: int) -> None:
        raise TypeError("not by the signature")

    with pytest.raises(KeyError):
        outcome(untyped, [], {})
    with pytest.raises(pytest.fail.Exception):
        outcome(mistyped, [int], {})
    assert outcome(mistyped, [], {}) == "TypeError"
    found = resources()
    descriptor = os.open("/dev/null", os.O_RDONLY)
    assert resources() != found
    os.close(descriptor)

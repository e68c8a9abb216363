"""The collectives as operators of torch: `torch.ops.pcie_comm.NAME`, for torch.compile and export.

Every registered plugin has two, in which `group` is the handle of a group or channel:

    NAME(str group, Tensor tensor0, ..., *, OPTIONS) -> (Tensor, ...)
    NAME.out(str group, Tensor tensor0, ..., *, OPTIONS, Tensor(a!) out0, ...) -> ()

The first form returns new tensors and mutates nothing; the second writes to its outputs. Neither
has a gradient. OPTIONS are those of the methods: `widths`, `heads`, and `numerics` of Kimi's
router. Two names more serve any router, whose `spec` is a RouterSpec's token; routers without a
group, `router_topk` and `kimi_topk16`, have no such argument. And `run` serves any plugin:

    run(str group, str plugin, Tensor[] tensors) -> Tensor[]
    run.out(str group, str plugin, Tensor[] tensors, *, Tensor(a!)[] outs) -> ()

Order: ranks must make a channel's calls in the same order, and a compiler knows nothing of that. So
the first form is registered as having an effect: calls stay in the order of the program, and stay
even where nobody uses their results. torch does not allow that for the second form. A graph that
holds more than one call should use the first one; the methods of groups do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import tracing
from .calls import fused_collective, heads_of, pair_of, router_collective, router_inputs
from .channel import Channel
from .errors import InvalidArgumentError
from .kernels import registry
from .kernels.collective import Collective, TensorMeta, plugin_of
from .kernels.pieces import any_rows
from .kernels.router_spec import KIMI_K3, RouterSpec
from .standalone import lane_for
from .tensors import torch_dtype
from .tracing import resolve

NAMESPACE = "pcie_comm"

ALONE = "kimi_topk16"
FUSED = "all_gather_pair_kimi_topk"

_libraries: dict[str, tuple[str, torch.library.Library]] = {}
"""Per operator: what was defined, and what undefines it when it is dropped."""


def _kimi(numerics: str = KIMI_K3.numerics) -> RouterSpec:
    if numerics == KIMI_K3.numerics:
        return KIMI_K3
    return RouterSpec(KIMI_K3.num_experts, KIMI_K3.top_k, numerics=numerics)


def _pair(widths: Sequence[int] | None = None) -> Collective:
    return registry.find("all_gather_pair") if widths is None else pair_of(tuple(widths))


def _heads(heads: int | None = None) -> Collective:
    return registry.find("all_gather_heads") if heads is None else heads_of(heads)


def _fused(spec: str, width: int | None = None) -> Collective:
    return fused_collective(RouterSpec.of_token(spec), width)


@dataclass(frozen=True)
class _Operator:
    """What an operator does: with real tensors, and with those that have only a shape.

    Attributes:
        name: Behind the namespace.
        plugin: Returns the plugin that options name.
        inputs: Types of its tensors.
        num_outputs: How many tensors it returns.
        options: Schema of what it takes by keyword.
        grouped: A channel serves it, and not the device's own lane.
    """

    name: str
    plugin: Callable[..., Collective]
    inputs: Sequence[str]
    num_outputs: int
    options: str = ""
    grouped: bool = True

    def schema(self) -> tuple[str, str]:
        """Return what both forms take and return."""
        group = ["str group"] if self.grouped else []
        tensors = [f"{kind} tensor{i}" for i, kind in enumerate(self.inputs)]
        options = [self.options] if self.options else []
        outs = [f"Tensor({chr(97 + i)}!) out{i}" for i in range(self.num_outputs)]
        results = ", ".join(["Tensor"] * self.num_outputs)
        plain = ", ".join([*group, *tensors, *(["*", *options] if options else [])])
        given = ", ".join([*group, *tensors, "*", *options, *outs])
        returned = results if self.num_outputs == 1 else f"({results})"
        return f"{self.name}({plain}) -> {returned}", f"{self.name}.out({given}) -> ()"

    def _found(self, args: Sequence[Any], options: dict[str, Any]) -> _Call:
        """Return who serves a call, the plugin, and the inputs."""
        lane = resolve(args[0]) if self.grouped else lane_for(args[0])
        tensors = tuple(args[1:] if self.grouped else args)
        plugin = self.plugin(**options)
        if self.inputs[-1] == "Tensor?":
            tensors = router_inputs(plugin, RouterSpec.of_token(options["spec"]), *tensors)
        return lane, plugin, tensors

    def run(self, *args: Any, **options: Any) -> Any:
        """Run the first form."""
        lane, plugin, tensors = self._found(args, options)
        return lane.issue(plugin, tensors, None)

    def run_out(self, *args: Any, **options: Any) -> None:
        """Run the second form."""
        outs = tuple(options.pop(f"out{i}") for i in range(self.num_outputs))
        lane, plugin, tensors = self._found(args, options)
        lane.issue(plugin, tensors, outs)

    def fake(self, *args: Any, **options: Any) -> Any:
        """Return tensors without memory, shaped as the results. Sizes may be symbols."""
        results = _results(*self._found(args, options))
        return results[0] if self.num_outputs == 1 else tuple(results)

    def fake_out(self, *args: Any, **options: Any) -> None:
        """Do nothing, as nothing is returned."""


class _AnyPlugin(_Operator):
    """The operator `run`: of any plugin, which is named by its handle."""

    def schema(self) -> tuple[str, str]:
        """Return what both forms take and return."""
        taken = "str group, str plugin, Tensor[] tensors"
        return f"run({taken}) -> Tensor[]", f"run.out({taken}, *, Tensor(a!)[] outs) -> ()"

    def _found(self, args: Sequence[Any], options: dict[str, Any]) -> _Call:
        """Return who serves a call, the plugin, and the inputs."""
        group, handle, tensors = args
        return resolve(group), plugin_of(handle), tuple(tensors)

    def run(self, *args: Any, **options: Any) -> Any:
        """Run the first form."""
        results = super().run(*args)
        return [results] if isinstance(results, torch.Tensor) else list(results)

    def run_out(self, *args: Any, **options: Any) -> None:
        """Run the second form."""
        lane, plugin, tensors = self._found(args, options)
        lane.issue(plugin, tensors, tuple(options["outs"]))

    def fake(self, *args: Any, **options: Any) -> Any:
        """Return tensors without memory, shaped as the results. Sizes may be symbols."""
        return _results(*self._found(args, options))


_Call = tuple[Channel, Collective, tuple[Any, ...]]


def _results(lane: Channel, plugin: Collective, tensors: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return tensors without memory, shaped as a call's results.

    Raises:
        InvalidArgumentError: The plugin takes another number of tensors.
    """
    if len(tensors) != plugin.num_inputs:
        raise InvalidArgumentError(
            f"{plugin.name} takes {plugin.num_inputs} tensors, got {len(tensors)}", op=plugin.name
        )
    specs = plugin.output_specs(any_rows(plugin, lane.info), *map(_meta_of, tensors))
    return [tensors[0].new_empty(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in specs]


_OPTIONS: dict[str, tuple[str, Callable[..., Collective]]] = {
    ALONE: ("str numerics='torch'", lambda **given: router_collective(_kimi(**given))),
    FUSED: ("str numerics='torch'", lambda **given: fused_collective(_kimi(**given))),
    "all_gather_pair": ("int[]? widths=None", _pair),
    "all_gather_heads": ("int? heads=None", _heads),
}
"""By operator: what it takes by keyword, and the plugin that this names."""


def _router(spec: str) -> Collective:
    return router_collective(RouterSpec.of_token(spec))


OWN = (
    _AnyPlugin("run", plugin_of, (), 1),
    _Operator("router_topk", _router, ("Tensor", "Tensor?"), 2, "str spec", grouped=False),
    _Operator(
        "all_gather_pair_topk",
        _fused,
        ("Tensor", "Tensor", "Tensor?"),
        3,
        "str spec, int? width=None",
    ),
)
"""Operators beside those of registered plugins, by whose names no plugin can have one."""


def _meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Return what a plan may know of a tensor that has no address."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorMeta(tuple(tensor.shape), dtype, tensor.stride(), tensor.itemsize)


def define(collective: Collective) -> None:
    """Make the operators of a plugin. One whose name torch does not allow gets none."""
    name = collective.name
    if not name.isidentifier() or name in (own.name for own in OWN):
        return
    options, plugin = _OPTIONS.get(name, ("", partial(registry.find, name)))
    inputs = ["Tensor"] * collective.num_inputs
    _define(
        _Operator(name, plugin, inputs, collective.num_outputs(), options, grouped=name != ALONE)
    )


def _define(operator: _Operator) -> None:
    """Make both forms of an operator, unless they are there."""
    schema = " ".join(operator.schema())
    defined, _ = _libraries.get(operator.name, ("", None))
    if defined == schema:
        return  # they ask the registry at each call
    if operator.name in _libraries:
        old: Any = _libraries.pop(operator.name)[1]
        old._destroy()  # not when it is collected: the name is needed now
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    _libraries[operator.name] = schema, library
    parts = (
        (operator.name, operator.schema()[0], operator.run, operator.fake),
        (f"{operator.name}.out", operator.schema()[1], operator.run_out, operator.fake_out),
    )
    for name, text, run, fake in parts:
        library.define(text)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    _keep_in_order(getattr(getattr(torch.ops, NAMESPACE), operator.name).default)


def _keep_in_order(operator: Any) -> None:
    """Tell torch's compiler that an operator has an effect. There is no public name for that yet.

    Where torch calls it otherwise, calls are not traced at all: eager ones must still work.
    """
    try:
        from torch._higher_order_ops import effects

        register = effects._register_effectful_op
        kind: Any = getattr(effects, "_EffectType", None) or effects.EffectType  # type: ignore[attr-defined]
    except (ImportError, AttributeError) as error:
        tracing.unordered = f"torch {torch.__version__} does not keep their order ({error})"
        return
    register(operator, kind.ORDERED)


def define_all() -> None:
    """Make the operators of every plugin that is registered, and of those to come."""
    if define not in registry.on_register:
        registry.on_register.append(define)
    registry.load_builtins()
    for operator in OWN:
        _define(operator)
    for collective in registry.registered():
        define(collective)

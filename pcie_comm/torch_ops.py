"""The collectives as operators of torch: `torch.ops.pcie_comm.NAME`, for torch.compile and export.

Every registered plugin has two, in which `group` is the handle of a group or channel:

    NAME(str group, Tensor tensor0, ...) -> (Tensor, ...)
    NAME.out(str group, Tensor tensor0, ..., *, Tensor(a!) out0, ...) -> ()

`kimi_topk16` needs no group and has no such argument. It and the fused operator also take
`numerics`, see RouterSpec. The first form returns new tensors and mutates nothing; the second
writes to its outputs. Neither has a gradient.

Order: ranks must make a channel's calls in the same order, and a compiler knows nothing of that. So
the first form is registered as having an effect: calls stay in the order of the program, and stay
even where nobody uses their results. torch does not allow that for the second form. A graph that
holds more than one call should use the first one; the methods of groups do.
"""

from __future__ import annotations

from typing import Any

import torch

from . import tracing
from .calls import fused_collective, router_collective
from .channel import Channel
from .kernels import registry
from .kernels.collective import Collective, TensorMeta
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


def _spec(numerics: str) -> RouterSpec:
    if numerics == KIMI_K3.numerics:
        return KIMI_K3
    return RouterSpec(KIMI_K3.num_experts, KIMI_K3.top_k, numerics=numerics)


class _Operator:
    """What an operator does: with real tensors, and with those that have only a shape."""

    def __init__(self, collective: Collective) -> None:
        self.name = collective.name
        self.num_inputs = collective.num_inputs
        self.num_outputs = collective.num_outputs()

    def schema(self) -> tuple[str, str]:
        """Return what both forms take and return."""
        group = [] if self.name == ALONE else ["str group"]
        tensors = [f"Tensor tensor{i}" for i in range(self.num_inputs)]
        options = ["str numerics='torch'"] if self.name in (ALONE, FUSED) else []
        outs = [f"Tensor({chr(97 + i)}!) out{i}" for i in range(self.num_outputs)]
        results = ", ".join(["Tensor"] * self.num_outputs)
        plain = ", ".join([*group, *tensors, *(["*", *options] if options else [])])
        given = ", ".join([*group, *tensors, "*", *options, *outs])
        returned = results if self.num_outputs == 1 else f"({results})"
        return f"{self.name}({plain}) -> {returned}", f"{self.name}.out({given}) -> ()"

    def _found(self, args: tuple[Any, ...], numerics: str) -> tuple[Channel, Collective, Any]:
        """Return who serves a call, the plugin, and the inputs."""
        if self.name == ALONE:
            return lane_for(args[0]), router_collective(_spec(numerics)), args
        lane, tensors = resolve(args[0]), args[1:]
        if self.name == FUSED:
            return lane, fused_collective(_spec(numerics)), tensors
        return lane, registry.find(self.name), tensors

    def run(self, *args: Any, numerics: str = "torch") -> Any:
        """Run the first form."""
        lane, collective, tensors = self._found(args, numerics)
        return lane.issue(collective, tensors, None)

    def run_out(self, *args: Any, numerics: str = "torch", **outs: torch.Tensor) -> None:
        """Run the second form."""
        lane, collective, tensors = self._found(args, numerics)
        lane.issue(collective, tensors, tuple(outs[f"out{i}"] for i in range(self.num_outputs)))

    def fake(self, *args: Any, numerics: str = "torch") -> Any:
        """Return tensors without memory, shaped as the results. Sizes may be symbols."""
        lane, collective, tensors = self._found(args, numerics)
        specs = collective.output_specs(any_rows(collective, lane.info), *map(_meta_of, tensors))
        results = [tensors[0].new_empty(s.shape, dtype=torch_dtype(s.dtype)) for s in specs]
        return results[0] if self.num_outputs == 1 else tuple(results)

    def fake_out(self, *args: Any, numerics: str = "torch", **outs: torch.Tensor) -> None:
        """Do nothing, as nothing is returned."""
        self._found(args, numerics)


def _meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Return what a plan may know of a tensor that has no address."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorMeta(tuple(tensor.shape), dtype, tensor.stride(), tensor.itemsize)


def define(collective: Collective) -> None:
    """Make the operators of a plugin. One whose name torch does not allow gets none."""
    if not collective.name.isidentifier():
        return
    operator = _Operator(collective)
    schema = " ".join(operator.schema())
    defined, _ = _libraries.get(collective.name, ("", None))
    if defined == schema:
        return  # they ask the registry at each call
    _libraries.pop(collective.name, None)
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    _libraries[collective.name] = schema, library
    parts = (
        (collective.name, operator.schema()[0], operator.run, operator.fake),
        (f"{collective.name}.out", operator.schema()[1], operator.run_out, operator.fake_out),
    )
    for name, text, run, fake in parts:
        library.define(text)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    _keep_in_order(getattr(getattr(torch.ops, NAMESPACE), collective.name).default)


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
    for collective in registry.registered():
        define(collective)

"""What a router computes, as a value: hashable, comparable, and free of torch and CUDA.

The contract, for one row of logits and a bias that all rows share:

* An expert is *valid* when its logit and its bias are both finite.
* The score ``s`` of a valid expert is the fp32 sigmoid of its logit, of any other expert 0.
* The choice ``c`` of a valid expert is ``s + bias`` rounded to fp32, of any other expert -inf.
* The first ``top_k`` experts by (``c`` descending, expert id ascending) are selected, in that
  order. Valid experts therefore come first; once they are exhausted the lowest non-valid ids
  follow. No id is ever selected twice.
* The weight of the j-th selected expert is ``s[id_j] * scale / (sum of selected s + eps)``: the
  bias takes part in the selection and not in the weight, and a non-valid expert weighs 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pcie_comm.errors import InvalidArgumentError, UnsupportedError

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_experts": (896,),
    "top_k": (16,),
    "score": ("sigmoid",),
    "groups": (1,),
    "topk_groups": (1,),
    "bias": (True,),
    "renormalize": (True,),
    "scale": (1.0,),
    "eps": (1e-20,),
    "numerics": ("torch", "vllm"),
}
"""Per field of RouterSpec, the values that a kernel exists for."""


@dataclass(frozen=True)
class RouterSpec:
    """Describe a router. See the module for the contract that the fields parametrise.

    Args:
        num_experts: Experts per row; the length of a row of logits.
        top_k: Experts selected per row, 1 to ``num_experts``.
        score: Function from logit to score.
        groups: Equal groups that the experts form; 1 means no grouping.
        topk_groups: Groups that experts may be selected from, 1 to ``groups``.
        bias: Whether a per-expert bias is added to the score for the selection.
        renormalize: Whether the weights are divided by the sum of the selected scores.
        scale: Factor on every weight; finite and positive.
        eps: Addend that keeps the sum of the selected scores from being 0; finite, at least 0.
        numerics: ``"torch"``: the sigmoid is ``1 / (1 + exp(-x))`` and a row without a valid
            expert weighs 0 throughout. ``"vllm"``: the sigmoid is ``0.5 * tanh(0.5 * x) + 0.5``
            and such a row weighs ``1 / top_k`` throughout, as in vLLM's grouped_topk.

    Raises:
        InvalidArgumentError: A field has the wrong type, or a value that no router can have.
        UnsupportedError: The router is conceivable, but no kernel computes it.
    """

    num_experts: int
    top_k: int
    score: str = "sigmoid"
    groups: int = 1
    topk_groups: int = 1
    bias: bool = True
    renormalize: bool = True
    scale: float = 1.0
    eps: float = 1e-20
    numerics: str = "torch"

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        for field, supported in _SUPPORTED.items():
            value = getattr(self, field)
            if value not in supported:
                choices = " or ".join(repr(choice) for choice in supported)
                raise UnsupportedError(
                    f"RouterSpec: no kernel for {field}={value!r}; use {field}={choices}",
                    reason=f"{field}={value!r}, supported: {choices}",
                )

    def _check_types(self) -> None:
        expected: dict[type, tuple[str, ...]] = {
            int: ("num_experts", "top_k", "groups", "topk_groups"),
            str: ("score", "numerics"),
            bool: ("bias", "renormalize"),
            float: ("scale", "eps"),
        }
        for kind, fields in expected.items():
            accepted = (int, float) if kind is float else (kind,)
            for field in fields:
                value = getattr(self, field)
                if isinstance(value, accepted) and isinstance(value, bool) == (kind is bool):
                    continue
                raise InvalidArgumentError(
                    f"RouterSpec: {field}={value!r} has type {type(value).__name__}; "
                    f"pass {kind.__name__}"
                )

    def _check_ranges(self) -> None:
        rules = (
            ("num_experts", self.num_experts >= 1, "at least 1"),
            ("top_k", 1 <= self.top_k <= self.num_experts, "1 to num_experts"),
            ("groups", self.groups >= 1, "at least 1"),
            ("groups", self.num_experts % max(self.groups, 1) == 0, "a divisor of num_experts"),
            ("topk_groups", 1 <= self.topk_groups <= self.groups, "1 to groups"),
            ("scale", 0 < self.scale < math.inf, "finite and positive"),
            ("eps", 0 <= self.eps < math.inf, "finite and not negative"),
        )
        for field, holds, wanted in rules:
            if not holds:
                raise InvalidArgumentError(
                    f"RouterSpec: {field}={getattr(self, field)!r} with "
                    f"num_experts={self.num_experts}; {field} must be {wanted}"
                )


KIMI_K3 = RouterSpec(num_experts=896, top_k=16)
"""The router of Kimi K3: 896 experts in one group, sigmoid plus bias, 16 selected, scale 1."""

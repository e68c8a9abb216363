"""What a router computes, as a value: hashable, comparable, and free of torch and CUDA.

The contract, for one row of logits and a bias that all rows share:

* An expert is *valid* when its logit, and its bias if there is one, are finite.
* The score ``s`` of a valid expert is ``score`` of its logit in fp32, of any other expert 0.
* The choice ``c`` of a valid expert is ``s + bias`` rounded to fp32, of any other expert -inf.
* With ``groups`` > 1, experts form equal groups of neighbours. A group's score is the sum of its
  two highest choices, or without a bias its highest choice. The first ``topk_groups`` groups by
  (score descending, index ascending) stay; in the others no expert is valid any more.
* The first ``top_k`` experts by (``c`` descending, expert id ascending) are selected, in that
  order. Valid experts therefore come first; once they are exhausted the lowest non-valid ids
  follow. No id is ever selected twice.
* The weight of the j-th selected expert is ``s[id_j] * scale / (sum of selected s + eps)``, or
  ``s[id_j] * scale`` if not ``renormalize``: the bias takes part in the selection and not in the
  weight, and a non-valid expert weighs 0. If the divisor is 0, all weigh 0.

Scores: ``sigmoid``; ``softmax`` over all experts with a finite logit; ``sqrtsoftplus``, the square
root of ``log(1 + exp(x))``, or of ``x`` where that is above 20, as in torch; and ``softmax_topk``,
where the choice is the logit and the weights are the softmax of the selected logits.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pcie_comm.errors import InvalidArgumentError, UnsupportedError

MAX_EXPERTS = 1024
MAX_TOP_K = 32
MAX_GROUPS = 32
SCORES = ("sigmoid", "softmax", "softmax_topk", "sqrtsoftplus")
NUMERICS = ("torch", "vllm")

_FACTOR = r"\d+\.\d+(?:e[+m]\d+)?|\d+e[+m]\d+"
"""What repr writes of a positive float, with m for a minus sign."""

_TOKEN = re.compile(
    r"(?P<score>\w+)\.(?P<e>\d+)of(?P<g>\d+)\.(?P<k>\d+)of(?P<t>\d+)\.(?P<flags>b?r?)\."
    rf"(?P<scale>{_FACTOR})\.(?P<eps>{_FACTOR})\.(?P<numerics>\w+)"
)


@dataclass(frozen=True)
class RouterSpec:
    """Describe a router. See the module for the contract that the fields parametrise.

    Args:
        num_experts: Experts per row, the length of a row of logits; up to 1024.
        top_k: Experts selected per row, 1 to ``num_experts``; up to 32.
        score: Function from logit to score: one of ``SCORES``.
        groups: Equal groups that the experts form, up to 32; 1 means no grouping.
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
        self._check_supported()

    def _check_supported(self) -> None:
        chosen = self.score == "softmax_topk"
        rules = (
            ("num_experts", self.num_experts <= MAX_EXPERTS, f"at most {MAX_EXPERTS}"),
            ("top_k", self.top_k <= MAX_TOP_K, f"at most {MAX_TOP_K}"),
            ("score", self.score in SCORES, " or ".join(map(repr, SCORES))),
            ("groups", self.groups <= MAX_GROUPS, f"at most {MAX_GROUPS}"),
            ("numerics", self.numerics in NUMERICS, " or ".join(map(repr, NUMERICS))),
            ("bias", not (chosen and self.bias), "False with score='softmax_topk'"),
            ("renormalize", not (chosen and self.renormalize), "False with score='softmax_topk'"),
        )
        for field, holds, wanted in rules:
            if not holds:
                value = getattr(self, field)
                raise UnsupportedError(
                    f"RouterSpec: no kernel for {field}={value!r}; {field} must be {wanted}",
                    reason=f"{field}={value!r}, supported: {wanted}",
                )

    @property
    def is_local(self) -> bool:
        """Whether an expert's choice depends on its own logit and bias alone."""
        return self.score != "softmax" and self.groups == 1

    @property
    def token(self) -> str:
        """A short text, without a hyphen, that differs for different routers."""
        flags = ("b" if self.bias else "") + ("r" if self.renormalize else "")
        sizes = f"{self.num_experts}of{self.groups}.{self.top_k}of{self.topk_groups}"
        factors = f"{float(self.scale)!r}.{float(self.eps)!r}".replace("-", "m")
        return f"{self.score}.{sizes}.{flags}.{factors}.{self.numerics}"

    @classmethod
    def of_token(cls, token: str) -> RouterSpec:
        """Return the router whose `token` this is.

        Raises:
            InvalidArgumentError: It is none.
        """
        found = _TOKEN.fullmatch(token)
        if found is None:
            raise InvalidArgumentError(f"spec={token!r} is no token; give the `token` of a spec")
        experts, groups, top_k, topk_groups = (int(found[n]) for n in ("e", "g", "k", "t"))
        scale, eps = (float(found[name].replace("m", "-")) for name in ("scale", "eps"))
        return cls(
            num_experts=experts,
            top_k=top_k,
            score=found["score"],
            groups=groups,
            topk_groups=topk_groups,
            bias="b" in found["flags"],
            renormalize="r" in found["flags"],
            scale=scale,
            eps=eps,
            numerics=found["numerics"],
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
            ("top_k", self.top_k <= self._selectable(), "at most the experts of topk_groups"),
            ("groups", self.groups == 1 or self._group_size() >= 2, "of two experts or more"),
            ("scale", 0 < self.scale < math.inf, "finite and positive"),
            ("eps", 0 <= self.eps < math.inf, "finite and not negative"),
        )
        for field, holds, wanted in rules:
            if not holds:
                raise InvalidArgumentError(
                    f"RouterSpec: {field}={getattr(self, field)!r} with "
                    f"num_experts={self.num_experts}; {field} must be {wanted}"
                )

    def _group_size(self) -> int:
        return self.num_experts // max(self.groups, 1)

    def _selectable(self) -> int:
        return self._group_size() * self.topk_groups


KIMI_K3 = RouterSpec(num_experts=896, top_k=16)
"""The router of Kimi K3: 896 experts in one group, sigmoid plus bias, 16 selected, scale 1."""

import ast
import dataclasses
from pathlib import Path

import pytest

from pcie_comm.errors import InvalidArgumentError, UnsupportedError
from pcie_comm.kernels import router_spec
from pcie_comm.kernels.router_presets import PRESETS
from pcie_comm.kernels.router_spec import KIMI_K3, RouterSpec


def test_kimi_k3_spells_out_the_defaults():
    spelled_out = RouterSpec(
        num_experts=896,
        top_k=16,
        score="sigmoid",
        groups=1,
        topk_groups=1,
        bias=True,
        renormalize=True,
        scale=1.0,
        eps=1e-20,
        numerics="torch",
    )
    assert spelled_out == KIMI_K3


def test_a_spec_is_a_value():
    same, other = RouterSpec(896, 16), RouterSpec(896, 16, numerics="vllm")
    assert same == KIMI_K3
    assert other != KIMI_K3
    assert len({same, KIMI_K3, other}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        KIMI_K3.top_k = 8
    assert dataclasses.replace(KIMI_K3, numerics="vllm") == other


@pytest.mark.parametrize(
    ("field", "value", "supported"),
    [
        ("num_experts", 1025, "at most 1024"),
        ("top_k", 33, "at most 32"),
        ("score", "relu", "'sigmoid' or 'softmax'"),
        ("numerics", "fast", "'torch' or 'vllm'"),
    ],
)
def test_a_router_without_a_kernel_is_unsupported(field, value, supported):
    with pytest.raises(UnsupportedError) as caught:
        dataclasses.replace(KIMI_K3, **{field: value})
    assert f"{field}={value!r}" in str(caught.value)
    assert supported in str(caught.value)
    assert f"{field}={value!r}" in caught.value.reason
    assert supported in caught.value.reason


@pytest.mark.parametrize("field", ["bias", "renormalize"])
def test_a_softmax_of_the_selected_has_no_bias_and_no_sum(field):
    spec = RouterSpec(128, 4, score="softmax_topk", bias=False, renormalize=False)
    with pytest.raises(UnsupportedError, match=f"{field}=True"):
        dataclasses.replace(spec, **{field: True})


def test_the_first_field_without_a_kernel_is_named():
    with pytest.raises(UnsupportedError, match="num_experts=2048"):
        RouterSpec(2048, 40, groups=64, topk_groups=4)


def test_tokens_name_routers():
    specs = set(PRESETS.values())
    specs |= {dataclasses.replace(spec, scale=spec.scale + 1e-7) for spec in specs}
    specs |= {dataclasses.replace(spec, numerics="vllm") for spec in specs}
    assert len({spec.token for spec in specs}) == len(specs)
    assert not any("-" in spec.token or "/" in spec.token for spec in specs)
    specs |= {
        dataclasses.replace(spec, scale=scale, eps=eps)
        for spec in specs
        for scale in (1, 1e-5, 2.5e-7, 1e16, 1.5e300)
        for eps in (0, 1e-20, 0.5, 5e-324)
    }
    assert all(RouterSpec.of_token(spec.token) == spec for spec in specs)


@pytest.mark.parametrize(
    "token",
    ["", "sigmoid", f"{KIMI_K3.token}x.", f" {KIMI_K3.token}", "sigmoid.8of1.2of1..1.0.torch"],
)
def test_what_is_no_token_is_refused(token):
    with pytest.raises(InvalidArgumentError, match="is no token"):
        RouterSpec.of_token(token)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 0),
        ("num_experts", -896),
        ("top_k", 0),
        ("top_k", 897),
        ("groups", 0),
        ("groups", 5),
        ("topk_groups", 0),
        ("topk_groups", 2),
        ("scale", 0.0),
        ("scale", -1.0),
        ("scale", float("nan")),
        ("scale", float("inf")),
        ("eps", -1e-20),
        ("eps", float("nan")),
    ],
)
def test_a_value_that_no_router_has_is_invalid(field, value):
    with pytest.raises(InvalidArgumentError, match=field) as caught:
        dataclasses.replace(KIMI_K3, **{field: value})
    assert f"{field}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("num_experts", 896.0, "int"),
        ("num_experts", "896", "int"),
        ("top_k", True, "int"),
        ("groups", None, "int"),
        ("bias", 1, "bool"),
        ("renormalize", "yes", "bool"),
        ("score", None, "str"),
        ("numerics", 1, "str"),
        ("scale", "1.0", "float"),
        ("eps", True, "float"),
    ],
)
def test_a_wrong_type_is_invalid(field, value, wanted):
    with pytest.raises(InvalidArgumentError, match=f"{field}=.*pass {wanted}"):
        dataclasses.replace(KIMI_K3, **{field: value})


def test_many_groups_are_unsupported():
    with pytest.raises(UnsupportedError, match=r"groups=64.*at most 32"):
        RouterSpec(896, 16, groups=64, topk_groups=64)


def test_what_groups_cannot_supply_is_invalid():
    with pytest.raises(InvalidArgumentError, match="at most the experts of topk_groups"):
        RouterSpec(64, 9, groups=8, topk_groups=1)


def test_an_int_is_a_float():
    assert dataclasses.replace(KIMI_K3, scale=1) == KIMI_K3


def test_invalid_arguments_are_value_errors():
    with pytest.raises(ValueError, match="top_k"):
        RouterSpec(896, 0)


def test_the_module_needs_neither_torch_nor_cuda():
    source = Path(router_spec.__file__).read_text(encoding="utf-8")
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported == {"__future__", "dataclasses", "math", "re", "pcie_comm.errors"}

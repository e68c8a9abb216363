"""Settings: defaults, the environment, what is given; bad values are named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pcie_comm.config import (
    DEFAULTS,
    SHARED,
    Config,
    LaunchEnvironment,
    request_hardware_queues,
)
from pcie_comm.errors import InvalidArgumentError

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

FROM_ENVIRONMENT = {
    "timeout_s": ("2.5", 2.5),
    "setup_timeout_s": ("7", 7.0),
    "slot_nbytes": ("8192", 8192),
    "max_rows": ("256", 256),
    "protocol": ("pull", "pull"),
    "overlap": ("1", True),
    "max_blocks": ("16", 16),
    "kernels_dir": ("some/kernels", Path("some/kernels")),
    "cache_dir": ("some/cache", Path("some/cache")),
    "policy_file": ("some/host.json", Path("some/host.json")),
    "advice": ("some/advice.json", Path("some/advice.json")),
    "stats": ("1", True),
    "nvtx": ("1", True),
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (*LAUNCH_VARIABLES, *(variable for variable, _, _ in DEFAULTS.values())):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")


def test_defaults():
    assert Config() == Config(
        timeout_s=30.0,
        setup_timeout_s=60.0,
        slot_nbytes=4 << 20,
        max_rows=64,
        protocol="auto",
        overlap=False,
        max_blocks=None,
        kernels_dir=None,
        cache_dir=Path("xdg/pcie_comm"),
        policy_file=None,
        advice=None,
        stats=False,
        nvtx=False,
    )


def test_every_field_has_a_variable():
    fields = [field.name for field in dataclasses.fields(Config)]
    assert fields == list(DEFAULTS) == list(FROM_ENVIRONMENT)


def test_cache_below_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert Config().cache_dir == Path("/somewhere/.cache/pcie_comm")


@pytest.mark.parametrize("field", DEFAULTS)
def test_a_variable_sets_the_default_of_one_field(field, monkeypatch):
    before = Config()
    text, value = FROM_ENVIRONMENT[field]
    monkeypatch.setenv(DEFAULTS[field][0], text)
    assert Config() == dataclasses.replace(before, **{field: value})


@pytest.mark.parametrize("field", DEFAULTS)
def test_an_empty_variable_is_none(field, monkeypatch):
    before = Config()
    monkeypatch.setenv(DEFAULTS[field][0], "")
    assert Config() == before


def test_what_is_given_wins_field_by_field(monkeypatch):
    for field, (text, _) in FROM_ENVIRONMENT.items():
        monkeypatch.setenv(DEFAULTS[field][0], text)
    config = Config(max_rows=8, protocol="push")
    assert (config.max_rows, config.protocol) == (8, "push")
    assert (config.timeout_s, config.slot_nbytes) == (2.5, 8192)


def test_a_given_field_is_not_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("PCIE_COMM_MAX_ROWS", "many")
    assert Config(max_rows=8).max_rows == 8


@pytest.mark.parametrize(
    ("variable", "text", "shown"),
    [
        ("PCIE_COMM_TIMEOUT_S", "soon", "'soon'"),
        ("PCIE_COMM_TIMEOUT_S", "0", "0.0"),
        ("PCIE_COMM_TIMEOUT_S", "nan", "nan"),
        ("PCIE_COMM_TIMEOUT_S", "inf", "inf"),
        ("PCIE_COMM_SETUP_TIMEOUT_S", "-1", "-1.0"),
        ("PCIE_COMM_SLOT_NBYTES", "4M", "'4M'"),
        ("PCIE_COMM_SLOT_NBYTES", "4097", "4097"),
        ("PCIE_COMM_MAX_ROWS", "1.5", "'1.5'"),
        ("PCIE_COMM_MAX_ROWS", "0", "0"),
        ("PCIE_COMM_PROTOCOL", "gossip", "'gossip'"),
        ("PCIE_COMM_OVERLAP", "off", "'off'"),
    ],
)
def test_a_bad_variable_is_named_with_its_value(variable, text, shown, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(InvalidArgumentError) as caught:
        Config()
    assert variable in str(caught.value)
    assert f"={shown} is not" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", -1.0),
        ("timeout_s", 1801),
        ("timeout_s", float("nan")),
        ("timeout_s", "30"),
        ("timeout_s", None),
        ("timeout_s", True),
        ("setup_timeout_s", []),
        ("setup_timeout_s", 86_401),
        ("slot_nbytes", 4095),
        ("slot_nbytes", 4096 + 64),
        ("slot_nbytes", (1 << 30) + 128),
        ("slot_nbytes", 4096.0),
        ("slot_nbytes", "4096"),
        ("max_rows", 0),
        ("max_rows", 65_537),
        ("max_rows", 8.0),
        ("max_rows", True),
        ("max_rows", None),
        ("protocol", "gossip"),
        ("overlap", 0),
        ("overlap", "0"),
        ("overlap", None),
        ("max_blocks", 1),
        ("max_blocks", 65),
        ("max_blocks", 8.0),
        ("max_blocks", True),
        ("protocol", None),
        ("protocol", ["push"]),
        ("kernels_dir", 5),
        ("cache_dir", None),
        ("policy_file", 5),
        ("advice", 5),
    ],
)
def test_a_bad_value_is_named(field, value):
    with pytest.raises(InvalidArgumentError) as caught:
        Config(**{field: value})
    assert f"{field}={value!r}" in str(caught.value)
    assert DEFAULTS[field][0] in str(caught.value)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("timeout_s", (1e-3, 1, 1800)),
        ("setup_timeout_s", (1e-3, 1, 86_400)),
        ("slot_nbytes", (4096, 1 << 30)),
        ("max_rows", (1, 65_536)),
        ("protocol", ("auto", "pull", "push", "tagged")),
        ("overlap", (True, False)),
        ("max_blocks", (2, 32, None)),
    ],
)
def test_the_ends_of_the_ranges_are_usable(field, values):
    for value in values:
        assert getattr(Config(**{field: value}), field) == value


def test_folders_may_be_text():
    config = Config(kernels_dir="kernels", cache_dir="cache")
    assert (config.kernels_dir, config.cache_dir) == (Path("kernels"), Path("cache"))


def test_a_config_is_a_value_that_cannot_change():
    assert Config(max_rows=8) == Config(max_rows=8)
    assert hash(Config()) == hash(Config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().protocol = "pull"


def test_the_contract_holds_what_ranks_must_share():
    contract = Config(max_rows=8, kernels_dir="mine").contract()
    assert tuple(contract) == SHARED
    assert contract["max_rows"] == 8
    assert not {"kernels_dir", "cache_dir"} & set(contract)


# --- what a launcher says ------------------------------------------------------------------------


def test_launch_environment(monkeypatch):
    assert LaunchEnvironment.read() == LaunchEnvironment(None, None, None)
    for name, text in zip(LAUNCH_VARIABLES, ("3", "8", "localhost", "29500"), strict=True):
        monkeypatch.setenv(name, text)
    assert LaunchEnvironment.read() == LaunchEnvironment(3, 8, ("localhost", 29500))
    monkeypatch.setenv("MASTER_PORT", "")
    assert LaunchEnvironment.read().rendezvous is None


@pytest.mark.parametrize("text", ["-1", "0", "65536", "abc", "1.0"])
def test_a_bad_port_is_named(text, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", text)
    with pytest.raises(InvalidArgumentError, match=f"MASTER_PORT={text!r}"):
        LaunchEnvironment.read()


@pytest.mark.parametrize("text", ["", "-1", "one", "1.0", "²"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_bad_rank_is_named(name, text, monkeypatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(InvalidArgumentError, match=f"{name}={text!r}"):
        LaunchEnvironment.read()


def test_hardware_queues(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert request_hardware_queues(32) == 8
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert request_hardware_queues(32) == 32
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "many")
    with pytest.raises(InvalidArgumentError, match="CUDA_DEVICE_MAX_CONNECTIONS='many'"):
        request_hardware_queues(32)

"""docs/versions.md lists the public surface as it is, and docs/api.md documents all of it."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import typer

import pcie_comm
from pcie_comm import cli, testing
from pcie_comm.config import DEFAULTS
from pcie_comm.installation import RULES, packages

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
DEVICE_TEXT = (ROOT / "pcie_comm" / "device.py").read_text(encoding="utf-8")
INTERNAL = {"from_bootstrap"}  # of PcieDcpGroup, for local_world: takes what is not public


def row(first: str) -> set[str]:
    """Return the names in the row of the page's table that begins like this."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {first} |"))
    return set(re.findall(r"`([\w.-]+)`", line.split("|")[2]))


def methods(owner: type) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")} - INTERNAL


DEVICE = set(ast.literal_eval(DEVICE_TEXT.partition("__all__ = ")[2]))  # importing it needs the DSL

SURFACE = {
    "in `pcie_comm`": set(pcie_comm.__all__),
    "in `pcie_comm.device`, for kernels of plugins": DEVICE,
    "in `pcie_comm.testing`, for tests of plugins": set(testing.__all__),
    "of `PcieDcpGroup`": methods(pcie_comm.PcieDcpGroup),
    "in `pcie_comm.metrics`": {"StatsCollector", "render", "serve"},
    "of `LocalWorld`": methods(pcie_comm.LocalWorld),
    "fields of `Config`": {field.name for field in dataclasses.fields(pcie_comm.Config)},
    "variables": {variable for variable, _, _ in DEFAULTS.values()},
    "commands of `pcie-comm`": set(getattr(typer.main.get_command(cli.app), "commands")),  # noqa: B009
    "entry points": {"pcie_comm.collectives"},
}


@pytest.mark.parametrize("kind", SURFACE)
def test_the_page_lists_the_public_surface(kind):
    assert row(kind) == SURFACE[kind]


def test_the_api_page_documents_every_public_name():
    listed = re.findall(r"^::: pcie_comm\.(\w+)$", API, re.MULTILINE)
    assert sorted(listed) == sorted(pcie_comm.__all__)
    exported = set(re.findall(r"^::: pcie_comm\.metrics\.(\w+)$", API, re.MULTILINE))
    assert exported == SURFACE["in `pcie_comm.metrics`"]
    for module, names in (("device", DEVICE), ("testing", testing.__all__)):
        listed = re.findall(rf"^::: pcie_comm\.{module}\.(\w+)$", API, re.MULTILINE)
        assert sorted(listed) == sorted(names)


def test_metrics_has_what_the_page_lists():
    metrics = pytest.importorskip("pcie_comm.metrics")
    assert set(metrics.__all__) == SURFACE["in `pcie_comm.metrics`"]


def test_the_page_lists_the_rules_of_the_doctor():
    table = PAGE.partition("| rule | severity | finds |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE) == list(RULES)


def test_the_page_states_the_ranges():
    for name in packages.RANGES:
        assert f"`{packages.wanted(name)}`" in PAGE


def test_the_page_lists_the_extras():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    table = PAGE.partition("| extra | for |")[2].partition("\n\n")[0]
    firsts = [line.split("|")[1] for line in table.splitlines()[2:]]
    listed = {name for first in firsts for name in re.findall(r"`(\w+)`", first)}
    assert listed == set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))


def test_python_range_is_that_of_the_project():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lowest, above = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', text).groups()
    assert f"| Python | 3.{lowest} to 3.{int(above) - 1} |" in PAGE

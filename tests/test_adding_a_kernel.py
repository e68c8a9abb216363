"""docs/adding_a_kernel.md holds the example as it is; a peer of the example that dies is named."""

from __future__ import annotations

import ast
import os
import re
import time
from pathlib import Path

import pytest
import snippets
import torch
from example_plugin import EXAMPLE, load_example
from launcher import RanksFailedError, run_ranks
from worlds import build_each, close_each, on_each, small

from pcie_comm import PcieDcpGroup, PeerAbortedError, PeerDiedError, testing

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "adding_a_kernel.md").read_text(encoding="utf-8")


def test_the_page_holds_the_files_of_the_example():
    """No second copy: what a reader takes from the page is what is installed and tested."""
    found = {
        one.text.partition("\n")[0].removeprefix("# "): one.text.partition("\n")[2]
        for one in snippets.blocks(PAGE)
        if one.language == "python" and re.match(r"# \w+\.py\n", one.text)
    }
    assert set(found) == {path.name for path in EXAMPLE.glob("*.py")}
    for name, text in found.items():
        assert text == (EXAMPLE / name).read_text(encoding="utf-8"), name
    (toml,) = (one.text for one in snippets.blocks(PAGE) if one.language == "toml")
    assert toml == (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")


def test_the_example_is_under_100_lines():
    text = (EXAMPLE / "all_reduce_max.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100


def test_the_example_uses_nothing_that_is_not_public():
    tree = ast.parse((EXAMPLE / "all_reduce_max.py").read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name for name in modules if name.startswith("pcie_comm")} == {"pcie_comm"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "dev"
    }
    device = (ROOT / "pcie_comm" / "device.py").read_text(encoding="utf-8")
    assert used <= set(ast.literal_eval(device.partition("__all__ = ")[2]))


def test_the_page_lists_the_checks():
    table = PAGE.partition("| check | shows | needs |")[2].partition("\n\n")[0]
    names = [check.__name__ for check in testing.CHECKS]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == names


def test_a_rank_that_aborts_is_named():
    plugin = load_example()
    groups = build_each([{}] * 2)

    def on_rank(group):
        if group.rank == 1:
            time.sleep(0.1)  # the other one waits in its call by then
            return group.abort()
        return group.run(plugin, torch.ones(1, 4))

    error, _ = on_each(groups, on_rank)
    assert type(error) is PeerAbortedError
    assert (error.rank, error.peer, error.op) == (0, 1, plugin.name)
    close_each(groups)


def die_beside_a_call(rank: int, world_size: int) -> None:
    plugin = load_example()
    with PcieDcpGroup(world_size, device="cpu", config=small()) as group:
        group.run(plugin, torch.ones(1, 4))
        if rank == 1:
            time.sleep(0.5)  # the other one waits in its call by then
            os._exit(7)
        with pytest.raises(PeerDiedError, match="rank 1") as caught:
            group.run(plugin, torch.ones(1, 4))
        error = caught.value.with_traceback(None)
        assert (error.rank, error.peer, error.op) == (0, 1, plugin.name)
        assert error.exit_code == 7


@pytest.mark.slow
def test_a_rank_that_dies_is_named():
    """The plugin has nothing to do for that."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(die_beside_a_call, 2)
    assert caught.value.reports == {1: "died with exit code 7"}

"""What some snippets take for granted, by the name in their `<!-- run: with=... -->`.

A setting is code that runs before the snippet in the same process, code that runs after it, files
that lie there, and the exit codes of ranks that end in another way than by reaching their end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def _no_exits() -> Mapping[int, int]:
    return {}


@dataclass(frozen=True)
class Setting:
    """See above. `files` are python programs that make what lies there, run once before."""

    before: str = ""
    after: str = ""
    files: str = ""
    exits: Mapping[int, int] = field(default_factory=_no_exits)


GROUP = """
import torch
from pcie_comm import PcieDcpGroup

device = torch.device("cuda:0")
torch.cuda.set_device(device)
group = PcieDcpGroup(1, device=device)
first = torch.randn(2, 8, device=device)
second = torch.randn(2, 4, device=device).bfloat16()
"""

DYING_PEER = """
import os, time
import torch

def serve(group):
    rows = torch.ones(1, 4)
    for count in range(1000):
        if group.rank == 2 and count == 3:
            os._exit(7)
        group.all_gather_pair(rows, rows)
        time.sleep(0.001)
    raise AssertionError("nobody died")
"""

SURVIVORS = """
gathered, _ = group.all_gather_pair(torch.full((1, 1), float(group.rank)), torch.ones(1, 1))
assert gathered.tolist() == [[0.0, 1.0, 2.0]], gathered
group.close()
"""

TWO_REPORTS = """
import pathlib
from typer.testing import CliRunner
from pcie_comm import cli

report = CliRunner().invoke(cli.app, ["topo", "--json"]).stdout
for name in ("before.json", "after.json"):
    pathlib.Path(name).write_text(report)
"""

SETTINGS = {
    "": Setting(),
    "group": Setting(before=GROUP, after="group.check()\n"),
    "dying_peer": Setting(
        before=DYING_PEER,
        after=SURVIVORS,
        exits={2: 7},
    ),
    "two_reports": Setting(files=TWO_REPORTS),
}

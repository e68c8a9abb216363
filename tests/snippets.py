"""The code blocks of README, CONTRIBUTING and docs/, and how each of them is run.

A block is `python`, `sh`, or something that is not run (`text`). Marks are words in the block's own
comments, so that a reader sees them: `needs a GPU`, `needs 8 GPUs`, `needs the network`,
`takes minutes`. They hold for a python block as a whole, and for one line of a sh block. Of lines
that call make only the target is looked up: CI runs them, and this test itself. A comment in the
Markdown before a block says how to run it where that is not plain, for example
`<!-- run: ranks=4 with=dying_peer -->`, or that another test runs it:
`<!-- run: by=tests/test_x.py -->`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/evidence/*.md")

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})\s*(\S*)")
HOW = re.compile(r"^<!-- run: (.*) -->$")
GPUS = re.compile(r"#.*\bneeds (?:an? |(\d+) )?GPUs?\b")
NETWORK = re.compile(r"#.*\bneeds the network\b")
SLOW = re.compile(r"#.*\btakes (?:a |some )?minutes?\b")
FILE = re.compile(r"^# (.*?)([\w-]+\.py)$")
"""The first line of a python block that is a file: the command that runs it."""

RUN, NAMED, GPU, NET, LONG, ELSEWHERE = (
    "run",
    "target exists",
    "needs a GPU",
    "needs the network",
    "takes minutes",
    "another test runs it",
)
NOT_RUN = ("text", "json", "toml", "xml", "yaml", "mermaid")


class BlockError(ValueError):
    """A block that nobody knows how to run."""


@dataclass(frozen=True)
class Step:
    """One thing to run: a python block, or a line of a sh block.

    Attributes:
        page: The file, relative to the repository.
        line: Where it starts.
        kind: `python` or `sh`.
        text: What is run.
        state: RUN, NAMED, GPU, NET, LONG or ELSEWHERE.
        gpus: How many GPUs it needs.
        ranks: Processes that run a python block at once; 0: it is run by itself.
        setting: What is there before it starts, by name; see snippet_settings.py.
    """

    page: str
    line: int
    kind: str
    text: str
    state: str
    gpus: int = 0
    ranks: int = 0
    setting: str = ""

    @property
    def id(self) -> str:
        """Name of the test."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """Name under which a reader saves this block, or an empty string."""
        match = FILE.match(self.text.partition("\n")[0]) if self.kind == "python" else None
        return match[2] if match else ""

    @property
    def command(self) -> str:
        """The command that the first line of such a file gives; without one, python."""
        match = FILE.match(self.text.partition("\n")[0])
        given = match[1].rpartition(":")[2].strip() if match else ""
        return f"{given or 'python'} {self.file}"


@dataclass(frozen=True)
class Block:
    """A fenced block: its first line, language, text, and the run comment before it."""

    line: int
    language: str
    text: str
    how: str


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    fence, start, language, body, how, last = "", 0, "", [], "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        match = FENCE.match(line)
        if fence:
            if match and line.strip().strip(fence[0]) == "" and match[1].startswith(fence):
                yield Block(start, language, "\n".join(body) + "\n", how)
                fence, how = "", ""
            else:
                body.append(line)
        elif match:
            fence, language, start, body = match[1], match[2], number, []
            comment = HOW.match(last)
            how = comment[1] if comment else ""
        elif line.strip():
            last = line.strip()
        if match and not fence:
            last = ""


def state_of(text: str) -> tuple[str, int]:
    """Return what the marks in a text say, and how many GPUs it needs."""
    if match := GPUS.search(text):
        return GPU, int(match[1] or 1)
    if NETWORK.search(text):
        return NET, 0
    return (LONG if SLOW.search(text) else RUN), 0


def steps(page: str, text: str) -> list[Step]:
    """Return what there is to run on a page.

    Raises:
        BlockError: A block has no language, or one that is unknown.
    """
    found = []
    for block in blocks(text):
        where = f"{page}:{block.line}"
        options = dict(word.split("=") for word in block.how.split())
        if unknown := set(options) - {"ranks", "with", "by"}:
            raise BlockError(f"{where}: run: {sorted(unknown)} is unknown")
        setting = options.get("with", "")
        if block.language == "python":
            state, gpus = state_of(block.text.partition("\n")[0])
            if "by" in options:
                if not (ROOT / options["by"]).exists():
                    raise BlockError(f"{where}: run: there is no {options['by']}")
                state = ELSEWHERE
            ranks = int(options.get("ranks", 0))
            found.append(Step(page, block.line, "python", block.text, state, gpus, ranks, setting))
        elif block.language == "sh":
            found += list(_lines(page, block, setting))
        elif block.language not in NOT_RUN:
            raise BlockError(
                f"{where}: language={block.language!r}: python and sh are run, text is not"
            )
    return found


def _lines(page: str, block: Block, setting: str) -> Iterator[Step]:
    text = block.text.replace("\\\n", " ")
    for offset, line in enumerate(text.splitlines(), start=1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        state, gpus = state_of(line)
        if words[0] == "make" and state == RUN:
            state = NAMED
        yield Step(page, block.line + offset, "sh", line, state, gpus, 0, setting)


def pages(root: Path = ROOT) -> list[str]:
    """Return the pages, relative to the repository."""
    return [
        path.relative_to(root).as_posix()
        for pattern in PAGES
        for path in sorted(root.glob(pattern))
    ]


def read_all(root: Path = ROOT) -> tuple[list[Step], list[str]]:
    """Return what there is to run, and a line for each page that is not understood."""
    found, faults = [], []
    for page in pages(root):
        try:
            found += steps(page, (root / page).read_text("utf-8"))
        except BlockError as error:
            faults.append(str(error))
    return found, faults

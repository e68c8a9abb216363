"""Check that relative links and their anchors in the project's Markdown files resolve.

Looks at the Markdown files that git tracks, or would track. A link must lead to a file or folder
that is in the repository too, and its anchor to a heading of that file as GitHub names them.
Addresses on other hosts are not followed.

Usage: python tools/check_links.py [--root DIR]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath
from urllib.parse import unquote

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
HTML_ANCHOR = re.compile(r"""<[a-z]+\s[^>]*?\b(?:id|name)=["']([^"']+)["']""", re.IGNORECASE)
EXTERNAL = re.compile(r"^([a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)
LINKS = (
    re.compile(r"\]\(\s*(?:<([^>]*)>|([^\s()]*(?:\([^\s()]*\)[^\s()]*)*))(?:\s+[\"'(][^)]*)?\s*\)"),
    re.compile(r"^ {0,3}\[(?!\^)[^\]]+\]:\s*(?:<([^>]*)>|(\S+))"),
    re.compile(r"""<(?:a|img)\s[^>]*?\b(?:href|src)=(?:"([^"]*)"|'([^']*)')""", re.IGNORECASE),
)


def repository_files(root: Path) -> set[str]:
    """The files git tracks or would track, relative to `root`; all files where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    return {name for name in done.stdout.split("\0") if name and (root / name).is_file()}


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines outside fenced code."""
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        match = FENCE.match(line)
        if not fence and match:
            fence = match[1]
        elif fence:
            closes = match and match[1].startswith(fence) and not line.strip().strip(fence[0])
            fence = "" if closes else fence
        else:
            yield number, line


def slug(heading: str) -> str:
    """The anchor GitHub gives to a heading."""
    shown = re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Every anchor that a Markdown text offers."""
    found: set[str] = set()
    counts: dict[str, int] = {}
    for _, line in prose_lines(text):
        found.update(HTML_ANCHOR.findall(CODE_SPAN.sub("", line)))
        if match := HEADING.match(line):
            name = slug(match[1])
            found.add(f"{name}-{counts[name]}" if name in counts else name)
            counts[name] = counts.get(name, 0) + 1
    return found


def links(text: str) -> Iterator[tuple[int, str]]:
    """The line number and target of every link outside code."""
    for number, line in prose_lines(text):
        shown = CODE_SPAN.sub("", line)
        for pattern in LINKS:
            for match in pattern.finditer(shown):
                yield number, match[1] if match[1] is not None else match[2]


class Checker:
    """Resolves links against the files of one repository."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = repository_files(root)
        self.folders = {str(up) for name in self.files for up in PurePosixPath(name).parents}
        self._anchors: dict[str, set[str]] = {}

    def markdown_files(self) -> list[str]:
        """The Markdown files to check."""
        return sorted(name for name in self.files if name.endswith(".md"))

    def fault(self, source: str, target: str) -> str | None:
        """What is wrong with `target` as a link in the file `source`, if anything."""
        if EXTERNAL.match(target):
            return None
        path, _, anchor = target.partition("#")
        if path.startswith("/"):
            return "absolute path: make it relative"
        here = PurePosixPath(source)
        wanted = normpath(str(here.parent / unquote(path))) if path else source
        if wanted.startswith(".."):
            return "leaves the repository"
        if wanted not in self.files and wanted not in self.folders:
            return "no such file in the repository"
        if anchor and wanted.endswith(".md") and unquote(anchor) not in self.anchors_of(wanted):
            return f"no heading #{anchor} in {wanted}"
        return None

    def anchors_of(self, name: str) -> set[str]:
        """The anchors of one Markdown file, read once."""
        if name not in self._anchors:
            self._anchors[name] = anchors((self.root / name).read_text(encoding="utf-8"))
        return self._anchors[name]

    def faults(self) -> tuple[int, list[str]]:
        """How many links there are, and a line for each that does not resolve."""
        count, faults = 0, []
        for source in self.markdown_files():
            for number, target in links((self.root / source).read_text(encoding="utf-8")):
                count += 1
                if fault := self.fault(source, target):
                    faults.append(f"{source}:{number}: {target}: {fault}")
        return count, faults


def main(argv: list[str] | None = None) -> int:
    """Check the tree and report. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    checker = Checker(parser.parse_args(argv).root)
    count, faults = checker.faults()
    print("\n".join(faults), end="\n" if faults else "")
    pages = len(checker.markdown_files())
    print(f"check_links: {pages} files, {count} links, {len(faults)} broken")
    return 1 if faults or not pages else 0


if __name__ == "__main__":
    sys.exit(main())

"""Reads a built site: links and anchors lead somewhere, and nothing comes from another host.

Links to other hosts may be followed by a reader, but no page may load a script, style, picture or
font from one.

Usage: python tools/check_site.py build/site
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from posixpath import normpath
from urllib.parse import unquote, urlsplit

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
LOADING_RELS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch"}
CSS_URL = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])([^"')\s]+)""")
NOT_FOUND_PAGE = "404.html"
"""Its links start at the server's root, and it is shown at any address."""


@dataclass
class Page:
    """What a page offers and asks for."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        for name in ("id", "name"):
            if name in given:
                self.page.anchors.add(given[name])
        if tag == "a" and "href" in given:
            self.page.links.append(given["href"])
        if tag in LOADS and LOADS[tag] in given:
            self.page.loads.append(given[LOADS[tag]])
        if tag == "link" and LOADING_RELS & set(given.get("rel", "").split()):
            self.page.loads.append(given.get("href", ""))


def read(path: Path) -> Page:
    """Return what a page offers and asks for."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader.page


class Site:
    """A folder of pages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pages = {
            path.relative_to(root).as_posix(): read(path) for path in sorted(root.rglob("*.html"))
        }

    def fault(self, name: str, target: str) -> str:
        """Return what is wrong with a link of a page, or nothing."""
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            return ""
        path = normpath(str(Path(name).parent / unquote(parts.path))) if parts.path else name
        if path.startswith("..") or not (self.root / path).exists():
            return "leads nowhere"
        if (self.root / path).is_dir():
            return "leads to a folder"
        anchor = unquote(parts.fragment)
        if anchor and path in self.pages and anchor not in self.pages[path].anchors:
            return f"{path} has no #{anchor}"
        return ""

    def faults(self) -> Iterator[str]:
        """Yield a line for each fault."""
        for name, page in self.pages.items():
            for target in page.loads:
                if urlsplit(target).netloc:
                    yield f"{name}: loads {target} from another host"
            for target in page.links + page.loads:
                problem = "" if name == NOT_FOUND_PAGE else self.fault(name, target)
                if problem:
                    yield f"{name}: {target}: {problem}"
        for path in sorted(self.root.rglob("*.css")):
            for target in CSS_URL.findall(path.read_text(encoding="utf-8")):
                if urlsplit(target).netloc:
                    yield f"{path.relative_to(self.root)}: loads {target} from another host"


def main(argv: Sequence[str] | None = None) -> int:
    """Check and report. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    site = Site(parser.parse_args(argv).root)
    faults = list(site.faults())
    print("\n".join(faults), end="\n" if faults else "")
    links = sum(len(page.links) for page in site.pages.values())
    print(f"check_site: {len(site.pages)} pages, {links} links, {len(faults)} faults")
    return 1 if faults or not site.pages else 0


if __name__ == "__main__":
    sys.exit(main())

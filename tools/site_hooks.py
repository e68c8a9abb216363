"""Hooks of mkdocs: what the site shows that does not lie in docs/.

README, CONTRIBUTING and CHANGELOG become pages. Links keep working as they do in the repository:
those that lead to a page are bent to its place on the site, those that lead to a source file to a
copy of it as plain text. The README of docs/ is the repository's list of pages; the site has its
navigation instead.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
COPIES = "files"

OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages from the root of the repository, and their names on the site."""

LISTED = "docs/README.md"

LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
EXTERNAL = re.compile(r"^([a-z][a-z0-9+.-]*:|//|#)", re.IGNORECASE)


def source_of(uri: str) -> str:
    """Return the file in the repository that a page of the site is made from."""
    names = {page: name for name, page in OUTSIDE.items()}
    return names.get(uri, f"{DOCS}/{uri}")


def place_of(path: str) -> str:
    """Return where a file of the repository is on the site, relative to its top."""
    if path == LISTED:
        return OUTSIDE["README.md"]
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith(f"{DOCS}/"):
        return path[len(DOCS) + 1 :]
    return f"{COPIES}/{path}.txt"


def bend(target: str, source: str, place: str) -> tuple[str, str]:
    """Return a link of a page as the site needs it, and the file of the repository it leads to."""
    path, mark, anchor = target.partition("#")
    wanted = normpath(str(PurePosixPath(source).parent / path))
    if wanted == LISTED:
        mark = anchor = ""
    link = relpath(place_of(wanted), str(PurePosixPath(place).parent))
    return f"{link}{mark}{anchor}", wanted


def rewrite(markdown: str, source: str, place: str) -> tuple[str, set[str]]:
    """Return a page with its links bent, and the files that they lead to."""
    lines, wanted, fence = [], set(), ""

    def replaced(match: re.Match[str]) -> str:
        if EXTERNAL.match(match[2]):
            return match[0]
        link, file = bend(match[2], source, place)
        wanted.add(file)
        return f"{match[1]}{link}{match[3]}"

    for line in markdown.split("\n"):
        found = FENCE.match(line)
        if fence:
            fence = "" if found and line.strip().strip(fence[0]) == "" else fence
        elif found:
            fence = found[1]
        lines.append(line if fence or found else LINK.sub(replaced, line))
    return "\n".join(lines), wanted


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from the root, and copies of the source files that pages lead to."""
    listed = files.get_file_from_path("README.md")
    if listed is not None:
        files.remove(listed)
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text("utf-8")))
    wanted: set[str] = set()
    for page in files.documentation_pages():
        text = page.content_string
        wanted |= rewrite(text, source_of(page.src_uri), page.src_uri)[1]
    for path in sorted(wanted):
        place = place_of(path)
        if place.startswith(f"{COPIES}/") and (ROOT / path).exists():
            files.append(File.generated(config, place, content=copy_of(ROOT / path)))
    return files


def copy_of(path: Path) -> str:
    """Return the text of a file, or of a folder what it holds."""
    if path.is_file():
        return path.read_text("utf-8")
    names = (entry.name for entry in path.iterdir() if not entry.name.startswith("__pycache__"))
    return "\n".join(sorted(names)) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Bend the links of a page."""
    uri = page.file.src_uri
    return rewrite(markdown, source_of(uri), uri)[0]

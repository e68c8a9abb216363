"""What makes the documentation site: links are bent rightly, and faults of a built site are found.

`make docs` builds the site itself; where mkdocs is installed, so does a test here.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools")]

import check_site  # noqa: E402 - a script: it is found through the path

HAS_MKDOCS = importlib.util.find_spec("mkdocs") is not None


def plant(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [str(root)]


GOOD = {
    "index.html": '<h1 id="top">x</h1><a href="a/b.html#mark">b</a><a href="#top">t</a>'
    '<a href="https://a.example/">web</a><img src="p.svg"><script src="s.js"></script>'
    '<link rel="stylesheet" href="s.css"><link rel="canonical" href="https://a.example/">',
    "a/b.html": '<h2 id="mark">x</h2><a href="../index.html">up</a>',
    "404.html": '<a href="/anywhere.html">x</a>',
    "p.svg": "",
    "s.js": "",
    "s.css": "a { background: url(p.svg) }",
}


def test_a_good_site_has_no_fault(tmp_path, capsys):
    assert check_site.main(plant(tmp_path, GOOD)) == 0
    assert "3 pages, 5 links, 0 faults" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("x.html", '<a href="gone.html">x</a>', "gone.html: leads nowhere"),
        ("x.html", '<a href="../out.html">x</a>', "leads nowhere"),
        ("x.html", '<a href="a">x</a>', "leads to a folder"),
        ("x.html", '<a href="a/b.html#none">x</a>', "a/b.html has no #none"),
        ("x.html", '<a href="#none">x</a>', "x.html has no #none"),
        ("x.html", '<img src="gone.png">', "gone.png: leads nowhere"),
        ("x.html", '<script src="https://cdn.example/a.js"></script>', "from another host"),
        ("x.html", '<script src="//cdn.example/a.js"></script>', "from another host"),
        ("x.html", '<link rel="stylesheet" href="https://f.example/c">', "from another host"),
        ("x.html", '<link rel="preconnect" href="https://f.example">', "from another host"),
        ("x.css", '@import "https://f.example/c.css"', "from another host"),
        ("x.css", "a { src: url('https://f.example/f.woff') }", "from another host"),
    ],
)
def test_a_fault_is_found(tmp_path, capsys, name, text, fault):
    assert check_site.main(plant(tmp_path, GOOD | {name: text})) == 1
    printed = capsys.readouterr().out
    assert fault in printed
    assert "1 faults" in printed


def test_an_empty_site_is_a_fault(tmp_path):
    assert check_site.main([str(tmp_path)]) == 1


def test_the_configuration_asks_for_no_fonts_of_another_host():
    assert "\n  font: false" in (ROOT / "mkdocs.yml").read_text()


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nplugins:")[0]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    listed = {line.rpartition(": ")[2] for line in text.splitlines() if line.endswith(".md")}
    assert listed == (pages - {"README.md"}) | {"index.md", "contributing.md", "changelog.md"}


@pytest.mark.skipif(not HAS_MKDOCS, reason="needs mkdocs, the extra docs")
class TestHooks:
    @pytest.mark.parametrize(
        ("source", "page", "link", "bent"),
        [
            ("README.md", "index.md", "[x](docs/errors.md#errors)", "[x](errors.md#errors)"),
            ("README.md", "index.md", "[x](docs/README.md)", "[x](index.md)"),
            ("README.md", "index.md", "[x](LICENSE)", "[x](files/LICENSE.txt)"),
            ("docs/errors.md", "errors.md", "[x](../README.md#try-it)", "[x](index.md#try-it)"),
            ("docs/errors.md", "errors.md", "[x](graphs.md)", "[x](graphs.md)"),
            ("docs/errors.md", "errors.md", "[x](../pcie_comm/layout.py)", None),
            ("docs/errors.md", "errors.md", "[x](https://a.example)", "[x](https://a.example)"),
            ("docs/errors.md", "errors.md", "[x](#here)", "[x](#here)"),
            ("docs/evidence/README.md", "evidence/README.md", "[x](../failure.md)", None),
        ],
    )
    def test_links_are_bent(self, source, page, link, bent):
        import site_hooks

        fixed = {
            "[x](../pcie_comm/layout.py)": "[x](files/pcie_comm/layout.py.txt)",
            "[x](../failure.md)": "[x](../failure.md)",
        }
        text = f"{link}\n```text\n{link}\n```\n{link}"
        got, _ = site_hooks.rewrite(text, source, page)
        wanted = bent or fixed[link]
        assert got == f"{wanted}\n```text\n{link}\n```\n{wanted}"

    def test_the_site_builds_in_strict_mode(self, tmp_path):
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        assert check_site.main([str(tmp_path)]) == 0

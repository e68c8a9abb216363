"""The repository's own checks catch what they are there for, and leave good trees alone.

The same for the choice of tests in conftest.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
TOOLS = TESTS.parent / "tools"


def load(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_sizes = load("check_sizes")
check_links = load("check_links")


def plant(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ["--root", str(root)]


def function(lines, parameters="", decorator=""):
    """A function of exactly that many lines."""
    body = "    x = 1\n" * (lines - 1)
    return f"{decorator}def work({parameters}):\n{body}"


def names(count):
    return ", ".join(f"p{i}" for i in range(count))


def method(parameters):
    return f"class Thing:\n    def work({parameters}):\n        pass\n"


class TestSizes:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("pcie_comm/a.py", function(55)),
            ("tests/test_a.py", function(80)),
            ("pcie_comm/a.py", "x = 1\n" * 450),
            ("pcie_comm/a.py", function(2, names(7))),
            ("pcie_comm/a.py", method("self, " + names(7))),
            ("pcie_comm/a.py", function(120, names(12), "@cute.kernel\n")),
            ("pcie_comm/a.py", function(120, names(12), "@cute.jit\n")),
            ("pcie_comm/a.py", function(2, names(9), "@app.command()\n")),
        ],
    )
    def test_accepts_what_is_within_the_limits(self, tmp_path, capsys, name, text):
        assert check_sizes.main(plant(tmp_path, {name: text})) == 0
        assert "ABOVE LIMIT" not in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("name", "text", "offence"),
        [
            ("pcie_comm/a.py", function(56), "pcie_comm/a.py::work lines: 56"),
            ("tools/a.py", function(56), "tools/a.py::work lines: 56"),
            ("tests/test_a.py", function(81), "tests/test_a.py::work lines: 81"),
            ("pcie_comm/deep/a.py", "x = 1\n" * 451, "pcie_comm/deep/a.py lines: 451"),
            ("pcie_comm/a.py", function(2, names(8)), "work parameters: 8"),
            ("pcie_comm/a.py", function(2, "a, *, " + names(7)), "work parameters: 8"),
            ("pcie_comm/a.py", method("self, " + names(8)), "Thing.work parameters: 8"),
            ("pcie_comm/a.py", method(names(8)), None),
            ("pcie_comm/a.py", function(121, "", "@cute.kernel\n"), "work lines: 121"),
            ("pcie_comm/a.py", function(2, names(13), "@cute.jit\n"), "work parameters: 13"),
            ("pcie_comm/a.py", function(56, "", "@app.command()\n"), "work lines: 56"),
            ("pcie_comm/a.py", "async " + function(56), "work lines: 56"),
        ],
    )
    def test_catches_what_is_beyond(self, tmp_path, capsys, name, text, offence):
        code = check_sizes.main(plant(tmp_path, {name: text}))
        printed = capsys.readouterr().out
        if offence is None:  # the first parameter of a method is bound, whatever its name
            assert code == 0
        else:
            assert code == 1
            assert f"{offence} (line" in printed

    def test_says_what_missed_its_target_without_failing(self, tmp_path, capsys):
        assert check_sizes.main(plant(tmp_path, {"pcie_comm/a.py": function(41)})) == 0
        assert "above target: pcie_comm/a.py::work lines: 41" in capsys.readouterr().out

    def test_broken_python_and_an_empty_tree_fail(self, tmp_path):
        assert check_sizes.main(["--root", str(tmp_path)]) == 1
        assert check_sizes.main(plant(tmp_path, {"tools/a.py": "def (:\n"})) == 1

    def test_an_allowance_raises_one_limit_and_no_further(self, tmp_path):
        plant(tmp_path, {"pcie_comm/a.py": function(60)})
        sizes = check_sizes.measure_tree(tmp_path)
        key = "pcie_comm/a.py::work lines"
        allow = check_sizes.Allowance
        assert check_sizes.judge(sizes, {key: allow(60, "one long table")})[0] == []
        assert len(check_sizes.judge(sizes, {key: allow(59, "one long table")})[0]) == 1
        assert len(check_sizes.judge(sizes, {key: allow(60, "")})[0]) == 1

    @pytest.mark.parametrize("key", ["pcie_comm/a.py::work lines", "pcie_comm/gone.py lines"])
    def test_a_stale_allowance_fails(self, tmp_path, key):
        plant(tmp_path, {"pcie_comm/a.py": function(55)})
        allowed = {key: check_sizes.Allowance(60, "was long once")}
        offences, _ = check_sizes.judge(check_sizes.measure_tree(tmp_path), allowed)
        assert offences == [f"{key}: allowance no longer needed, remove it"]


GOOD_PAGE = """# Title

See [other](docs/other.md#two-words-and-code), [self](#title), [folder](docs), [web](https://a.example/x),
![picture](docs/picture.png "caption"), [`code`](tool.py), [again](docs/other.md#twice-1), [ref].
A footnote.[^1] In code `[not](a link)` is text, and <a href="tool.py">here</a> is a link.

```
[nor](this.md)
```

[ref]: docs/other.md
[^1]: See nothing.
"""
OTHER_PAGE = """## Two words, and `code`
# Twice
# Twice
<a id="mark"></a>
[up](../README.md#title)
[mark](#mark)
"""
GOOD_TREE = {
    "README.md": GOOD_PAGE,
    "docs/other.md": OTHER_PAGE,
    "docs/picture.png": "",
    "tool.py": "",
}


class TestLinks:
    @pytest.mark.parametrize("with_git", [True, False])
    def test_accepts_links_that_resolve(self, tmp_path, capsys, with_git):
        if with_git:
            subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        assert check_links.main(plant(tmp_path, GOOD_TREE)) == 0
        assert "2 files, 11 links, 0 broken" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("link", "fault"),
        [
            ("[x](docs/gone.md)", "docs/gone.md: no such file in the repository"),
            ("![x](gone.png)", "gone.png: no such file in the repository"),
            ("[x](docs/other.md#three)", "docs/other.md#three: no heading #three in docs/other.md"),
            ("[x](#nowhere)", "#nowhere: no heading #nowhere in README.md"),
            ("[x](docs/other.md#twice-2)", "no heading #twice-2"),
            ("[x](../outside.md)", "../outside.md: leaves the repository"),
            ("[x](/docs/other.md)", "/docs/other.md: absolute path"),
            ("[x]: gone.md", "gone.md: no such file"),
            ('<img src="gone.png">', "gone.png: no such file"),
        ],
    )
    def test_catches_links_that_do_not(self, tmp_path, capsys, link, fault):
        tree = GOOD_TREE | {"README.md": f"{GOOD_PAGE}\n{link}\n"}
        assert check_links.main(plant(tmp_path, tree)) == 1
        printed = capsys.readouterr().out
        assert printed.startswith("README.md:")
        assert fault in printed
        assert "1 broken" in printed

    def test_a_link_to_an_ignored_file_is_broken(self, tmp_path, capsys):
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        tree = {".gitignore": "build/\n", "build/x.md": "", "README.md": "[x](build/x.md)\n"}
        assert check_links.main(plant(tmp_path, tree)) == 1
        assert "no such file in the repository" in capsys.readouterr().out


MARKED_TESTS = """
import pytest

def test_anywhere(): pass

@pytest.mark.gpu
def test_one(): pass

@pytest.mark.gpu2
def test_two(): pass

@pytest.mark.gpu4
def test_four(): pass

@pytest.mark.gpu
@pytest.mark.slow
def test_slow(): pass
"""
FAKE_TORCH = """
class cuda:
    device_count = staticmethod(lambda: {devices})
"""
INI = "[pytest]\nmarkers =\n  gpu\n  gpu2\n  gpu4\n  slow\n"


class TestDeselection:
    def run(self, folder, devices, *options):
        """Run the marked tests on a machine that has so many devices; return what pytest says."""
        shutil.copy(TESTS / "conftest.py", folder)
        fake = FAKE_TORCH.format(devices=devices)
        plant(folder, {"test_marked.py": MARKED_TESTS, "pytest.ini": INI, "fake/torch.py": fake})
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options]
        env = os.environ | {"PYTHONPATH": str(folder / "fake"), "PYTEST_ADDOPTS": ""}
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    @pytest.mark.parametrize(
        ("devices", "options", "chosen"),
        [
            (0, [], ["anywhere"]),
            (1, [], ["anywhere", "one"]),
            (2, [], ["anywhere", "one", "two"]),
            (4, ["--run-slow"], ["anywhere", "one", "two", "four", "slow"]),
            (4, ["--run-slow", "--no-gpu"], ["anywhere"]),
        ],
    )
    def test_runs_what_the_machine_can_serve(self, tmp_path, devices, options, chosen):
        printed = self.run(tmp_path, devices, *options)
        passed = [line for line in printed.splitlines() if "PASSED" in line]
        assert [line.split("::test_")[1].split()[0] for line in passed] == chosen
        if len(chosen) < 5:
            assert f"{len(chosen)} passed, {5 - len(chosen)} deselected" in printed

    def test_says_how_many_were_left_out_and_why(self, tmp_path):
        printed = self.run(tmp_path, 1)
        assert "1 deselected: CUDA devices needed=2, found=1" in printed
        assert "1 deselected: CUDA devices needed=4, found=1" in printed
        assert "1 deselected: slow: run with --run-slow" in printed


GPU_TESTS = """
import time

import pytest

pytestmark = pytest.mark.gpu


def test_right(): pass

def test_wrong(): assert 0

def test_hangs(): time.sleep(60)
"""


class TestGpuRun:
    @pytest.fixture
    def run(self, tmp_path):
        gpu_test = load("gpu_test")
        run = gpu_test.Run(tmp_path / "report.json", tmp_path, 20.0)
        return run, lambda chosen: gpu_test.Part((str(tmp_path / "test_some.py"),), chosen)

    def test_parts_run_at_once_and_each_is_noted(self, run, tmp_path):
        run, part = run
        plant(tmp_path, {"test_some.py": GPU_TESTS, "pytest.ini": INI})
        run.test_together([part("right"), part("wrong")])
        run.limit_s = 4.0
        run.test(part("hangs"))
        missing = run.conclude()
        report = json.loads((tmp_path / "report.json").read_text())
        codes = {name.split(" -k ")[1]: one["exit_code"] for name, one in report["parts"].items()}
        assert codes == {"'right'": 0, "'wrong'": 1, "'hangs'": 124}
        assert report["counts"]["passed"] == 1
        assert report["counts"]["failure"] >= 1
        assert report["exit_code"] != 0
        assert report["complete"] is False
        assert any("-k 'hangs'" in one for one in missing)
        assert "the benchmark" in missing

    def test_every_file_is_in_a_part(self, monkeypatch):
        gpu_test = load("gpu_test")
        gpu_test.check_parts()
        monkeypatch.setattr(gpu_test, "ALONE", gpu_test.ALONE[1:])
        with pytest.raises(SystemExit, match="test_full_device"):
            gpu_test.check_parts()

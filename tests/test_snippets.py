"""Every code block of README, CONTRIBUTING and docs/ runs, or says visibly why it does not here."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import snippets
from snippet_settings import SETTINGS
from snippets import ELSEWHERE, GPU, LONG, NAMED, NET, ROOT, RUN, Step

RANKS_PROGRAM = Path(__file__).with_name("snippet_ranks.py")
LIMIT_S = 100.0
STEPS, FAULTS = snippets.read_all()


def case(step: Step):
    marks = {
        GPU: [pytest.mark.gpu],
        NET: [pytest.mark.skip(reason="needs the network")],
        LONG: [pytest.mark.slow, pytest.mark.timeout(900)],
    }
    return pytest.param(step, id=step.id, marks=marks.get(step.state, []))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder of programs for PATH: what an install of this tree would put there."""
    folder = tmp_path_factory.mktemp("programs")
    modules = {"pcie-comm": "-m pcie_comm", "torchrun": "-m torch.distributed.run", "python": ""}
    for name, options in modules.items():
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {options} "$@"\n')
        path.chmod(0o755)
    (folder / "python3").symlink_to("python")
    return folder


def environment(programs: Path, folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(programs), os.environ.get("PATH", "")])
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"PCIE_COMM_CACHE": str(folder / "cache")}


class Runner:
    """Runs steps; those of a page share a folder, as a reader who follows the page would."""

    def __init__(self, root: Path, programs: Path, steps=STEPS) -> None:
        self.root = root
        self.programs = programs
        self.steps = steps

    def folder(self, page: str) -> Path:
        """Make the folder of a page, with the files that any page has a reader save."""
        folder = self.root / page.replace("/", "_")
        if not folder.exists():
            folder.mkdir(parents=True)
            for step in self.steps:
                if step.file:
                    (folder / step.file).write_text(step.text)
            for name in {step.setting for step in self.steps if step.page == page}:
                if SETTINGS[name].files:
                    self.command([sys.executable, "-c", SETTINGS[name].files], folder)
            for name in ("tools", "tests"):  # commands that start in the repository
                (folder / name).symlink_to(ROOT / name)
        return folder

    def run(self, step: Step) -> str:
        """Run one step; return what it printed."""
        if step.state == NAMED:
            targets = {
                line.split()[1] for line in self.command(["make", "help"], ROOT).splitlines()
            }
            missing = set(shlex.split(step.text, comments=True)[1:]) - targets
            assert not missing, f"exit code: make has no {missing}"
            return ""
        folder = self.folder(step.page)
        if step.kind == "sh" or step.file:
            line = step.text if step.kind == "sh" else step.command
            good = (0, 1) if line.startswith("pcie-comm doctor") else (0,)  # 1: it found something
            return self.command(["bash", "-euc", self.fitting(line, step)], folder, good)
        path = folder / f"line_{step.line}.py"
        path.write_text(step.text)
        if step.ranks or step.setting:
            words = [str(path), str(step.ranks or 1), step.setting]
            return self.command([sys.executable, str(RANKS_PROGRAM), *words], folder)
        return self.command([sys.executable, str(path)], folder)

    @staticmethod
    def fitting(line: str, step: Step) -> str:
        """Let a program for many GPUs run on the one that there is."""
        return line.replace("--nproc-per-node 4", "--nproc-per-node 1") if step.gpus else line

    def command(self, words: list[str], folder: Path, good=(0,)) -> str:
        done = subprocess.run(
            words,
            cwd=folder,
            env=environment(self.programs, folder),
            capture_output=True,
            text=True,
            timeout=LIMIT_S * 8,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode in good, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def runner(tmp_path_factory, programs):
    return Runner(tmp_path_factory.mktemp("pages"), programs)


@pytest.mark.parametrize("step", [case(step) for step in STEPS if step.state != ELSEWHERE])
def test_snippet(step, runner):
    if step.state == GPU:
        import torch

        if torch.cuda.device_count() < step.gpus:
            pytest.skip(f"needs {step.gpus} GPUs")
    runner.run(step)


def test_every_block_says_what_it_is():
    assert FAULTS == []


def test_python_that_is_not_run_here_is_python_at_least():
    for step in STEPS:
        if step.kind == "python":
            compile(step.text, step.id, "exec")


def test_settings_are_those_that_pages_name():
    assert {step.setting for step in STEPS} == set(SETTINGS)


def test_tally(capsys):
    """Say how many ran; few enough are left out that the sentence on top of this file holds."""
    tally = Counter(step.state for step in STEPS)
    kinds = Counter(step.kind for step in STEPS)
    with capsys.disabled():
        print(
            f"\nsnippets: {len(STEPS)} in {len({step.page for step in STEPS})} pages "
            f"({kinds['python']} python blocks, {kinds['sh']} commands): {tally[RUN]} run, "
            f"{tally[NAMED]} name a target of make, {tally[LONG]} run with --run-slow, "
            f"{tally[GPU]} need a GPU, {tally[NET]} the network, {tally[ELSEWHERE]} other tests run"
        )
    assert tally[RUN] + tally[NAMED] > len(STEPS) / 2


# --- the parser, and that wrong snippets are caught -----------------------------------------------


@pytest.mark.parametrize("language", ["", "bash", "console", "pycon"])
def test_a_block_that_nobody_runs_is_refused(language):
    with pytest.raises(snippets.BlockError, match="python and sh are run"):
        snippets.steps("x.md", f"```{language}\nls\n```\n")


def test_marks_and_lines():
    text = """
<!-- run: ranks=3 with=group -->

```python
# needs a GPU
x = 1
```

```python
x = 2
y = 1  # needs a GPU, but only the first line counts
```

```sh
make test     # everything
# a comment
ls \\
  -l          # takes some minutes
pip install x # needs the network
run           # needs 8 GPUs
```

```text
not run
```
"""
    found = snippets.steps("x.md", text)
    seen = [(step.kind, step.state, step.gpus, step.ranks, step.setting) for step in found]
    assert seen[0] == ("python", GPU, 1, 3, "group")
    assert [entry[1] for entry in seen[1:]] == [RUN, NAMED, LONG, NET, GPU]
    assert found[5].gpus == 8


def test_what_another_test_runs_is_left_to_it():
    block = "<!-- run: by={} -->\n```python\n# say.py\n```\n"
    (step,) = snippets.steps("x.md", block.format("tests/test_snippets.py"))
    assert (step.state, step.file) == (ELSEWHERE, "say.py")
    with pytest.raises(snippets.BlockError, match="no tests/nothing"):
        snippets.steps("x.md", block.format("tests/nothing.py"))


def test_files_and_their_commands():
    (step,) = snippets.steps("x.md", "```python\n# needs GPUs: torchrun -n 2 a.py\nx\n```\n")
    assert (step.file, step.command) == ("a.py", "torchrun -n 2 a.py")
    (step,) = snippets.steps("x.md", "```python\n# say.py\nx\n```\n")
    assert (step.file, step.command) == ("say.py", "python say.py")


WRONG = {
    "python": "```python\nraise SystemExit(3)\n```\n",
    "file": "```python\n# say.py\nraise SystemExit(3)\n```\n",
    "command": "```sh\npcie-comm no-such-command\n```\n",
    "make": "```sh\nmake no-such-target\n```\n",
    "one rank": "<!-- run: ranks=2 -->\n```python\nimport os\n[1][int(os.environ['RANK'])]\n```\n",
    "nobody dies": "<!-- run: ranks=3 with=dying_peer -->\n```python\ngroup = None\n```\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_snippet_fails(name, tmp_path, programs):
    """Negative control."""
    found = snippets.steps("x.md", WRONG[name])
    with pytest.raises(AssertionError, match="exit code"):
        Runner(tmp_path, programs, found).run(found[0])


def test_a_right_snippet_sees_the_files_of_its_page(tmp_path, programs):
    text = "```python\n# say.py\nprint('said')\n```\n\n```sh\npython say.py\n```\n"
    runner = Runner(tmp_path, programs, snippets.steps("x.md", text))
    assert [runner.run(step) for step in runner.steps] == ["said\n", "said\n"]

"""The check of an installed wheel fails where the sdist, the wheel or the environment is wrong.

`make package` runs the whole of it; this has the parts, with small archives.
"""

from __future__ import annotations

import io
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools")]

import check_install  # noqa: E402 - a script: it is found through the path

METADATA = """Metadata-Version: 2.4
Name: pcie_comm
Version: 0.1.0
Requires-Dist: torch<3,>=2.6
Requires-Dist: nvidia-cutlass-dsl[cu13]<5,>=4.8; sys_platform == 'linux'
Requires-Dist: cupy-cuda13x>=13.6; extra == 'cupy'

"""


def sdist(folder: Path, names) -> Path:
    path = folder / "pcie_comm-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            data = b"x"
            entry = tarfile.TarInfo(f"pcie_comm-0.1.0/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def wheel(folder: Path, names=("pcie_comm/py.typed",)) -> Path:
    path = folder / "pcie_comm-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pcie_comm-0.1.0.dist-info/METADATA", METADATA)
        for name in names:
            archive.writestr(name, "")
    return path


def test_a_whole_sdist_is_accepted(tmp_path):
    top = check_install.unpack(sdist(tmp_path, check_install.SDIST_HAS), tmp_path / "out")
    assert (top / "pyproject.toml").exists()


@pytest.mark.parametrize("name", check_install.SDIST_HAS)
def test_a_file_that_the_sdist_lacks_is_named(tmp_path, name):
    names = [one for one in check_install.SDIST_HAS if one != name]
    with pytest.raises(check_install.Failure, match=f"lacking=.*{name}"):
        check_install.unpack(sdist(tmp_path, names), tmp_path / "out")


def test_kernels_do_not_belong_into_the_sdist(tmp_path):
    names = [*check_install.SDIST_HAS, "pcie_comm/kernels/prebuilt/a.sm_90a.1.cubin"]
    with pytest.raises(check_install.Failure, match="unwanted="):
        check_install.unpack(sdist(tmp_path, names), tmp_path / "out")


def test_the_environment_gets_everything_but_the_compiler_and_extras(tmp_path):
    assert check_install.needed(wheel(tmp_path)) == ["torch<3,>=2.6"]


def test_a_wheel_without_types_is_refused(tmp_path):
    with pytest.raises(check_install.Failure, match=r"py\.typed"):
        check_install.needed(wheel(tmp_path, ()))


def test_a_command_that_fails_says_what_it_printed(tmp_path):
    code = "import sys; print('why'); sys.exit(3)"
    with pytest.raises(check_install.Failure, match=r"exit code 3\nwhy"):
        check_install.run(sys.executable, "-c", code, cwd=tmp_path)


class Trial:
    """An interpreter whose trial reports what it is told; everything else is right."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder = folder
        self.report = {"package": str(folder / "p.py"), "kernels": {"sm_90a": 34}, "faults": []}
        self.doctor = "CuTe DSL none"
        monkeypatch.setattr(check_install, "run", self.answer)

    def answer(self, *command, cwd):
        words = [str(word) for word in command]
        if check_install.TRIAL.name in words[1]:
            return check_install.json.dumps(self.report)
        return self.doctor if "doctor" in words else "right: all"

    def try_it(self):
        python = self.folder / "bin" / "python"
        return check_install.try_it(python, self.folder, ["sm_90a"])


@pytest.fixture
def trial(tmp_path, monkeypatch):
    return Trial(tmp_path, monkeypatch)


def test_a_right_installation_passes(trial):
    assert trial.try_it()["kernels"] == {"sm_90a": 34}


@pytest.mark.parametrize(
    "wrong",
    [
        {"package": str(ROOT / "pcie_comm" / "__init__.py")},
        {"faults": ["all_gather: the CuTe DSL is missing"]},
        {"kernels": {}},
    ],
)
def test_a_wrong_installation_does_not(trial, wrong):
    trial.report |= wrong
    with pytest.raises(check_install.Failure):
        trial.try_it()


def test_an_environment_with_a_compiler_shows_nothing(trial):
    trial.doctor = "CuTe DSL 4.8.1"
    with pytest.raises(check_install.Failure, match="compiler is missing"):
        trial.try_it()


def test_the_trial_finds_the_compiler_of_this_environment(tmp_path):
    """The negative control of the trial itself: here the DSL can be imported."""
    pytest.importorskip("cutlass", reason="the control needs the compiler")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(check_install.run(python, "-c", where, cwd=tmp_path).strip())
    paths = [
        path for path in sys.path if Path(path).name.endswith("packages")
    ]  # the DSL has its own
    (site / "needed.pth").write_text("\n".join([str(ROOT), *paths]))
    said = check_install.run(python, ROOT / "tools" / "installed_trial.py", cwd=tmp_path)
    assert "the CuTe DSL is here" in check_install.json.loads(said)["faults"][0]

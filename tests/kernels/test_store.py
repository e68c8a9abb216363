"""Where a kernel comes from: the order of the places, which prebuilt kernels count. No compiler.

Kernels are planted: their "code" says which place they lie in.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pcie_comm.errors import CompileError
from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels import store as stores
from pcie_comm.kernels.compile import CompiledKernel
from pcie_comm.kernels.registry import find
from pcie_comm.kernels.store import KernelStore

ROUTER = find("kimi_topk16")
KEY = ROUTER.variants()[0]
WHEEL_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
HOPPER = (9, 0)


def kernel(place: str, arch: str) -> CompiledKernel:
    here = compiler.fingerprint(ROUTER)
    return CompiledKernel(str(KEY), arch, "entry", 512, here, "1.0", f"{place} {arch}".encode())


class Places:
    """Every place a kernel may come from, below one folder."""

    def __init__(self, root: Path) -> None:
        self.user, self.wheel, self.cache = root / "user", root / "wheel", root / "cache"
        self.user.mkdir()

    @property
    def store(self) -> KernelStore:
        return KernelStore(self.user, self.cache)

    def fill_cache(self, arch: str) -> None:
        version = compiler.dsl_version() or "none"
        folder = self.cache / f"{version}-{compiler.fingerprint(ROUTER)[:20]}"
        compiler.write(kernel("cache", arch), folder)

    def fill_wheel(self, *archs: str, **changes: str) -> None:
        for arch in archs:
            compiler.write(replace(kernel("wheel", arch), **changes), self.wheel)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Empty places, and a compiler that only says what it was asked for."""
    found = Places(tmp_path)
    monkeypatch.setattr(stores, "PREBUILT_DIR", found.wheel)
    monkeypatch.setattr(compiler, "build", lambda one, key, arch: kernel("compiler", arch))
    return found


def told(places: Places, capability: tuple[int, int] = HOPPER) -> tuple[str, str]:
    """The code that a store hands out, and what it says of it."""
    store = places.store
    code = store.get(ROUTER, KEY, capability).cubin.decode()
    return code, store.sources[str(KEY)]


def test_user_folder_then_wheel_then_cache_then_compiler(places):
    assert told(places) == ("compiler sm_90a", "compiled by this process")
    (folder,) = places.cache.iterdir()
    assert told(places) == ("compiler sm_90a", f"cache, {folder}")
    places.fill_wheel("sm_90a")
    assert told(places) == ("wheel sm_90a", "prebuilt for sm_90a")
    compiler.write(kernel("user", "sm_90a"), places.user)
    assert told(places) == ("user sm_90a", f"ahead of time, {places.user}")


def test_prebuilt_kernel_writes_no_cache(places):
    places.fill_wheel("sm_90a")
    told(places)
    assert not places.cache.exists()


def test_user_folder_without_the_kernel_leaves_it_to_the_wheel(places):
    compiler.write(kernel("user", "sm_80"), places.user)
    places.fill_wheel("sm_90a")
    assert told(places) == ("wheel sm_90a", "prebuilt for sm_90a")


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_each_gpu_gets_the_nearest_prebuilt_kernel_that_runs_there(places, capability, arch):
    places.fill_wheel(*WHEEL_ARCHS)
    assert told(places, capability) == (f"wheel {arch}", f"prebuilt for {arch}")


@pytest.mark.parametrize(
    ("capability", "arch"), [((11, 0), "sm_110a"), ((12, 1), "sm_121a"), ((7, 5), "sm_75")]
)
def test_gpu_without_prebuilt_kernels_compiles(places, capability, arch):
    places.fill_wheel(*WHEEL_ARCHS)
    assert told(places, capability) == (f"compiler {arch}", "compiled by this process")


def test_prebuilt_kernel_of_a_newer_gpu_does_not_serve_an_older_one(places):
    places.fill_wheel("sm_86", "sm_89")
    assert told(places, (8, 0)) == ("compiler sm_80", "compiled by this process")


# --- stale and damaged ones --------------------------------------------------------------------

STALE = "prebuilt for sm_90a passed over: built from other sources (built=ffffffffffff, here="


def test_stale_prebuilt_kernel_is_passed_over_and_named(places):
    places.fill_wheel("sm_90a", fingerprint="f" * 64)
    code, source = told(places)
    assert code == "compiler sm_90a"
    assert source.startswith(f"compiled by this process; {STALE}")
    assert compiler.fingerprint(ROUTER)[:12] in source
    code, source = told(places)
    assert code == "compiler sm_90a"
    assert source.startswith("cache, ")
    assert STALE in source


def test_control_a_kernel_of_these_sources_is_not_passed_over(places):
    places.fill_wheel("sm_90a", fingerprint=compiler.fingerprint(ROUTER))
    assert told(places) == ("wheel sm_90a", "prebuilt for sm_90a")


def test_edited_kernel_makes_the_prebuilt_one_stale(places, monkeypatch):
    places.fill_wheel("sm_90a")
    monkeypatch.setattr(compiler, "_package_sources", lambda: b"edited")
    assert "passed over: built from other sources" in told(places)[1]


def cut(code: Path, description: Path) -> None:
    code.write_bytes(code.read_bytes()[:-1])


def lose(code: Path, description: Path) -> None:
    code.unlink()


def garble(code: Path, description: Path) -> None:
    description.write_bytes(b"\xff{")


def relabel(code: Path, description: Path) -> None:
    """Pretend to be for another GPU, as a file that was renamed by hand does."""
    description.write_text(json.dumps(json.loads(description.read_bytes()) | {"arch": "sm_80"}))


@pytest.mark.parametrize("harm", [cut, lose, garble, relabel])
def test_damaged_prebuilt_kernel_is_passed_over_and_named(places, harm):
    places.fill_wheel("sm_86")
    harm(*(places.wheel / name for name in compiler.file_names(kernel("wheel", "sm_86"))))
    code, source = told(places, (8, 6))
    assert code == "compiler sm_86"
    start = "compiled by this process; prebuilt for sm_86 passed over: damaged ("
    assert source.startswith(start), source
    assert len(source) > len(start) + 10, "it says what is wrong"


def test_next_best_prebuilt_kernel_stands_in_for_a_damaged_one(places):
    places.fill_wheel(*WHEEL_ARCHS)
    cut(*(places.wheel / name for name in compiler.file_names(kernel("wheel", "sm_89"))))
    assert told(places, (8, 9)) == (
        "wheel sm_86",
        "prebuilt for sm_86; prebuilt for sm_89 passed over: damaged (checksum differs)",
    )


def test_error_of_the_compiler_says_which_prebuilt_kernel_was_passed_over(places, monkeypatch):
    def no_compiler(*arguments: object) -> CompiledKernel:
        raise CompileError("the DSL is missing", op=KEY.op)

    monkeypatch.setattr(compiler, "build", no_compiler)
    with pytest.raises(CompileError) as caught:
        told(places)
    assert str(caught.value) == f"the DSL is missing [op={KEY.op}]"
    places.fill_wheel("sm_90a", fingerprint="f" * 64)
    with pytest.raises(CompileError) as caught:
        told(places)
    assert str(caught.value).startswith(f"the DSL is missing; {STALE}")
    assert places.store.sources == {}

"""Kernel files: what a reader sees while they are replaced, and who may read them. No compiler."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from pcie_comm.errors import CompileError
from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels.collective import KernelKey
from pcie_comm.kernels.compile import CompiledKernel

KEY, ARCH = KernelKey("gather", ("push", 16)), "sm_90a"
REBUILDS = 200
DAMAGED = "damaged"


def kernel(name: str, size: int) -> CompiledKernel:
    return CompiledKernel(str(KEY), ARCH, name, size, name * 16, "1.0", name.encode() * size)


OLD, NEW = kernel("old", 4096), kernel("new", 8192)


def seen(folder: Path) -> CompiledKernel | str | None:
    try:
        return compiler.read(folder, KEY, ARCH)
    except CompileError:
        return DAMAGED


def steps(kernel: CompiledKernel, folder: Path) -> list[tuple[Path, bytes]]:
    """The files that a build replaces, in its order, without replacing them."""
    found: list[tuple[Path, bytes]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_replace", lambda path, data: found.append((path, data)))
        compiler.write(kernel, folder)
    return found


def seen_after_each(todo: Iterable[tuple[Path, bytes]], folder: Path) -> list[object]:
    found = []
    for path, data in todo:
        compiler._replace(path, data)
        found.append(seen(folder))
    return found


def test_reader_at_any_step_of_a_build_sees_a_whole_kernel(tmp_path):
    assert seen_after_each(steps(OLD, tmp_path), tmp_path) == [None, OLD]
    assert seen_after_each(steps(NEW, tmp_path), tmp_path) == [OLD, NEW]


def test_control_description_before_code_is_seen_as_damage(tmp_path):
    compiler.write(OLD, tmp_path)
    assert seen_after_each(reversed(steps(NEW, tmp_path)), tmp_path) == [DAMAGED, NEW]


def test_control_code_under_one_name_is_seen_as_damage(tmp_path):
    """What a name without the checksum would do: the old description with the new code."""
    compiler.write(OLD, tmp_path)
    (old_code,) = tmp_path.glob("*.cubin")
    compiler._replace(old_code, NEW.cubin)
    assert seen(tmp_path) == DAMAGED


def read_while_rebuilt(folder: Path, *, tidy: bool) -> CompiledKernel | str | None:
    """Read a kernel that is rebuilt after its description was read, before its code is."""
    compiler.write(OLD, folder)
    (old_code,) = folder.glob("*.cubin")
    loads = json.loads

    def rebuild(text: bytes) -> object:
        compiler.write(NEW, folder)
        if tidy:
            old_code.unlink()
        return loads(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler.json, "loads", rebuild)
        return seen(folder)


def test_reader_that_is_overtaken_gets_the_old_kernel(tmp_path):
    assert read_while_rebuilt(tmp_path, tidy=False) == OLD
    assert seen(tmp_path) == NEW


def test_control_a_build_must_not_remove_the_code_before_it(tmp_path):
    assert read_while_rebuilt(tmp_path, tidy=True) == DAMAGED


def test_reader_beside_a_busy_builder_sees_whole_kernels(tmp_path):
    compiler.write(OLD, tmp_path)
    kernels = (NEW, OLD)

    def rebuild() -> None:
        for index in range(REBUILDS):
            compiler.write(kernels[index % 2], tmp_path)

    builder = threading.Thread(target=rebuild)
    builder.start()
    found = []
    while builder.is_alive():
        found.append(seen(tmp_path))
    builder.join()
    assert found
    assert all(one in kernels for one in found)
    assert seen(tmp_path) == OLD


def test_build_that_fails_leaves_the_old_kernel_and_no_scraps(tmp_path, monkeypatch):
    compiler.write(OLD, tmp_path)
    before = set(tmp_path.iterdir())

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            compiler.write(NEW, tmp_path)
    assert set(tmp_path.iterdir()) == before
    assert seen(tmp_path) == OLD


def modes(folder: Path) -> dict[str, int]:
    """Write a kernel as a user who keeps files to themselves; return each file's mode."""
    before = os.umask(0o077)
    try:
        compiler.write(OLD, folder)
    finally:
        os.umask(before)
    return {path.suffix: path.stat().st_mode & 0o7777 for path in folder.iterdir()}


def test_files_may_be_read_by_others(tmp_path):
    assert modes(tmp_path) == {".cubin": 0o644, ".json": 0o644}


def test_control_without_its_chmod_they_may_not(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "chmod", lambda path, mode: None)
    assert modes(tmp_path) == {".cubin": 0o600, ".json": 0o600}


@pytest.mark.parametrize(
    "text", ["", "null", "0", "[1]", '"x"', "{}", '{"sha256": 1}', "[" * 100_000, "block"]
)
def test_a_damaged_description_is_that_and_nothing_else(text, tmp_path):
    compiler.write(OLD, tmp_path)
    (description,) = tmp_path.glob("*.json")
    if text == "block":  # right but for one type
        text = json.dumps(json.loads(description.read_bytes()) | {"block": "many"})
    description.write_text(text)
    assert seen(tmp_path) == DAMAGED


def test_a_folder_that_cannot_be_looked_into_is_damage(tmp_path):
    assert seen(tmp_path / ("long" * 100)) == DAMAGED
    assert seen(Path("no\0path")) in (DAMAGED, None)  # Python 3.13 has no such path

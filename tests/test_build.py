"""`pcie-comm compile` and the folders it writes: round trip, damage, staleness, the cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pcie_comm import Config, build, cli
from pcie_comm.calls import fused_collective, router_collective
from pcie_comm.errors import CompileError, InvalidArgumentError, UnsupportedError
from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels import cubin
from pcie_comm.kernels import store as stores
from pcie_comm.kernels.collective import KernelKey
from pcie_comm.kernels.registry import collectives, find
from pcie_comm.kernels.router_presets import PRESETS
from pcie_comm.kernels.store import KernelStore

pytest.importorskip("cutlass", reason="compiles kernels")

ROOT = Path(__file__).resolve().parent.parent
ARCH, CAPABILITY = "sm_90a", (9, 0)
ROUTER = find("kimi_topk16")
KEY = ROUTER.variants()[0]
NAME = f"{KEY}.{ARCH}"


def code_file(folder: Path, name: str) -> Path:
    """The machine code of `NAME.ARCH`; its own name also holds a part of its checksum."""
    (file,) = folder.glob(f"{name}.*.cubin")
    return file


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["compile", *arguments])


def one_line_error(result: Result, kind: str) -> str:
    assert result.exit_code == 2, result.output
    lines = result.output.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"pcie-comm: {kind}: ")
    return lines[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with every kernel, and what the program said while it made it."""
    folder = tmp_path_factory.mktemp("kernels") / "made" / "here"
    command = [sys.executable, "-m", "pcie_comm", "compile", "--arch", ARCH, "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=110)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture
def folder(built: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of one kernel's files, to be damaged."""
    for file in built[0].glob(f"{NAME}.*"):
        shutil.copy(file, tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_prebuilt_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide those that `make wheel` left in this tree."""
    monkeypatch.setattr(stores, "PREBUILT_DIR", tmp_path / "no prebuilt kernels")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("compiled, though the kernel is on disk")

    monkeypatch.setattr(compiler, "build", refuse)


def from_folder(folder: Path, tmp_path: Path) -> compiler.CompiledKernel:
    return KernelStore(folder, tmp_path / "cache").get(ROUTER, KEY, CAPABILITY)


# --- the folder --------------------------------------------------------------------------------


def test_folder_holds_every_variant_of_every_collective(built):
    names = {f"{key}.{ARCH}" for one in collectives().values() for key in one.variants()}
    assert {path.stem for path in built[0].glob("*.json")} == names
    files = {code_file(built[0], name).name for name in names} | {f"{name}.json" for name in names}
    assert {path.name for path in built[0].iterdir()} == files
    assert {path.stat().st_mode & 0o777 for path in built[0].iterdir()} == {0o644}


def test_output_has_a_line_per_kernel_and_a_summary(built):
    folder, text = built
    count = len(list(folder.glob("*.cubin")))
    assert f"[{count}/{count}] " in text
    for name, collective in collectives().items():
        row = next(line for line in text.splitlines() if line.startswith(f"│ {name} "))
        assert f" {len(collective.variants())} │" in row
    codes = [path.read_bytes() for path in folder.glob("*.cubin")]
    for code in codes:
        assert f" {len(code)} bytes, {cubin.sass_nbytes(code)} of SASS, " in text
    size = sum(map(len, codes))
    last = text.strip().splitlines()[-1]
    assert last.startswith(f"{count} kernels, {size} bytes in ")
    assert last.endswith(f"set PCIE_COMM_KERNELS={folder}")


@pytest.mark.usefixtures("no_compiler")
def test_store_serves_every_variant_from_the_folder(built, tmp_path):
    store = KernelStore(built[0], tmp_path)
    for collective in collectives().values():
        for key in collective.variants():
            kernel = store.get(collective, key, CAPABILITY)
            cubin = code_file(built[0], f"{key}.{ARCH}").read_bytes()
            assert (kernel.key, kernel.arch, kernel.cubin) == (str(key), ARCH, cubin)
            assert kernel.block == collective.block
            assert kernel.entry.encode() in cubin
            assert store.sources[str(key)] == f"ahead of time, {built[0]}"
    assert list(tmp_path.iterdir()) == []


def test_environment_variable_names_the_folder(built, monkeypatch):
    monkeypatch.setenv("PCIE_COMM_KERNELS", str(built[0]))
    assert Config().kernels_dir == built[0]


def test_kernels_for_another_gpu_are_left_alone(built, tmp_path):
    store = KernelStore(built[0], tmp_path)
    kernel = store.get(ROUTER, KEY, (8, 9))
    assert kernel.arch == "sm_89"
    assert store.sources[str(KEY)] == "compiled by this process"


def test_checksum_is_that_of_the_machine_code(built):
    for meta in built[0].glob("*.json"):
        checksum = json.loads(meta.read_bytes())["sha256"]
        file = meta.with_name(f"{meta.stem}.{checksum[:12]}.cubin")
        assert checksum == hashlib.sha256(file.read_bytes()).hexdigest()


def edit_meta(**changes: Any) -> Callable[[Path], None]:
    def edit(stem: Path) -> None:
        file = Path(f"{stem}.json")
        file.write_text(json.dumps(json.loads(file.read_bytes()) | changes))

    return edit


def flip_a_bit(stem: Path) -> None:
    file = code_file(stem.parent, stem.name)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "bit": flip_a_bit,
    "truncated": lambda stem: os.truncate(code_file(stem.parent, stem.name), 100),
    "no cubin": lambda stem: code_file(stem.parent, stem.name).unlink(),
    "no JSON": lambda stem: Path(f"{stem}.json").write_bytes(b"\xff{"),
    "no object": lambda stem: Path(f"{stem}.json").write_text("[1, 2]"),
    "no checksum": lambda stem: Path(f"{stem}.json").write_text("{}"),
    "other checksum": edit_meta(sha256="0" * 64),
    "number for a checksum": edit_meta(sha256=0),
    "other field": edit_meta(colour="blue"),
    "other arch": edit_meta(arch="sm_80"),
    "other kernel": edit_meta(key="kimi_topk16-other"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.usefixtures("no_compiler")
def test_damaged_kernel_of_a_folder_is_an_error(folder, damage):
    damage(folder / NAME)
    with pytest.raises(CompileError, match=r"is damaged .* build it again"):
        from_folder(folder, folder)


@pytest.mark.usefixtures("no_compiler")
def test_kernel_from_other_sources_is_an_error_with_the_remedy(folder):
    edit_meta(fingerprint="f" * 64)(folder / NAME)
    remedy = f"pcie-comm compile --arch {ARCH} --out {folder}"
    with pytest.raises(CompileError, match="built from other sources") as caught:
        from_folder(folder, folder)
    assert remedy in str(caught.value)


def test_remedy_for_a_stale_folder_works(folder):
    edit_meta(fingerprint="f" * 64)(folder / NAME)
    options = ("--arch", ARCH, "--out", str(folder), "--op", "kimi_topk16", "--jobs", "1")
    assert invoke(*options).exit_code == 0
    assert from_folder(folder, folder).fingerprint == compiler.fingerprint(ROUTER)


# --- the cache ---------------------------------------------------------------------------------


def cached(cache: Path) -> compiler.CompiledKernel:
    return KernelStore(None, cache).get(ROUTER, KEY, CAPABILITY)


def cache_folder(cache: Path) -> Path:
    (folder,) = cache.iterdir()
    return folder


def test_second_process_finds_the_first_ones_kernel(tmp_path, monkeypatch):
    first = cached(tmp_path)
    monkeypatch.setattr(compiler, "build", None)
    second = cached(tmp_path)
    assert (second.cubin, second.entry) == (first.cubin, first.entry)
    assert cache_folder(tmp_path).name.endswith(compiler.fingerprint(ROUTER)[:20])


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_cache_entry_is_rebuilt(tmp_path, damage):
    first = cached(tmp_path)
    damage(cache_folder(tmp_path) / NAME)
    assert cached(tmp_path).cubin == first.cubin
    healed = compiler.read(cache_folder(tmp_path), KEY, ARCH)
    assert healed is not None
    assert healed.cubin == first.cubin


def test_cache_that_cannot_be_written_costs_only_time(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    store = KernelStore(None, file / "cache")
    assert store.get(ROUTER, KEY, CAPABILITY).cubin
    assert store.sources[str(KEY)].startswith("compiled by this process; not cached (")


def test_read_only_cache_serves_what_it_has(tmp_path):
    first = cached(tmp_path)
    for path in (cache_folder(tmp_path), tmp_path):
        path.chmod(0o555)
    try:
        store = KernelStore(None, tmp_path)
        assert store.get(ROUTER, KEY, CAPABILITY).cubin == first.cubin
        assert store.sources[str(KEY)].startswith("cache, ")
        assert store.get(ROUTER, ROUTER.variants()[1], CAPABILITY).cubin
    finally:
        for path in (tmp_path, cache_folder(tmp_path)):
            path.chmod(0o755)


def test_processes_may_fill_one_cache_at_once(tmp_path):
    code = """
        import hashlib, sys, time
        from pathlib import Path
        from pcie_comm.kernels import dsl, store as stores
        from pcie_comm.kernels.registry import find
        here, router = Path(sys.argv[1]), find("kimi_topk16")
        stores.PREBUILT_DIR = here / "none"
        (here / f"ready.{sys.argv[2]}").touch()
        while len(list(here.glob("ready.*"))) < 3:
            time.sleep(0.001)
        store = stores.KernelStore(None, here / "cache")
        kernel = store.get(router, router.variants()[0], (9, 0))
        print(hashlib.sha256(kernel.cubin).hexdigest(), store.sources)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for i in range(3)
    ]
    try:
        said = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({line.split()[0] for line in said}) == 1
    files = {path.name for path in cache_folder(tmp_path / "cache").iterdir()}
    assert files == {f"{NAME}.json", code_file(cache_folder(tmp_path / "cache"), NAME).name}
    assert cached(tmp_path / "cache").cubin


# --- what `compile` refuses --------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_70", "sm_9000", "hopper", "", "compute_90", "sm_90a "])
def test_unknown_arch_is_refused_with_those_that_exist(arch, tmp_path):
    line = one_line_error(invoke("--arch", arch, "--out", str(tmp_path)), "InvalidArgumentError")
    assert f"arch={arch!r} is unknown" in line
    assert "native, sm_80, " in line
    assert list(tmp_path.iterdir()) == []


def test_no_arch_is_refused(tmp_path):
    line = one_line_error(invoke("--out", str(tmp_path)), "InvalidArgumentError")
    assert line.endswith("arch=() names none; give --arch sm_90a, for example, or --all")
    assert list(tmp_path.iterdir()) == []


def test_all_means_what_the_wheel_has_and_archs_add_to_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "build_all", lambda todo, *rest: asked.extend(todo) or [])
    result = invoke("--all", "--arch", "sm_121a", "--arch", "sm_80", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    archs = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"]
    assert asked == build.jobs(archs)


def test_unknown_op_is_refused_with_those_that_exist(tmp_path):
    result = invoke("--arch", ARCH, "--out", str(tmp_path), "--op", "all_scatter")
    line = one_line_error(result, "InvalidArgumentError")
    assert "op='all_scatter' is unknown" in line
    assert "all_gather_pair_kimi_topk" in line


def test_folder_that_cannot_be_made_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    for out in (file, file / "below"):
        result = invoke("--arch", ARCH, "--out", str(out))
        assert f"out={out}" in one_line_error(result, "InvalidArgumentError")


def test_kernel_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    def full(kernel: object, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler, "write", full)
    options = ("--arch", ARCH, "--out", str(tmp_path), "--op", "kimi_topk16", "--jobs", "1")
    result = invoke(*options)
    assert "No space left on device" in one_line_error(result, "CompileError")


def test_missing_dsl_is_one_line_with_the_remedy(tmp_path):
    code = f"""
        import sys
        sys.modules["cutlass"] = None
        sys.argv = ["pcie-comm", "compile", "--arch", "{ARCH}", "--out", {str(tmp_path)!r}]
        from pcie_comm.cli import main
        main()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("pcie-comm: CompileError: the CuTe DSL")
    assert "pip install 'nvidia-cutlass-dsl[cu13]'" in line
    assert list(tmp_path.iterdir()) == []


def test_native_means_this_gpu(monkeypatch):
    answers = {"major": 9, "minor": 0, 0: "the device"}
    monkeypatch.setattr(build, "_capability_attributes", lambda: ("major", "minor"))
    monkeypatch.setattr(build.driver, "device_count", lambda: 1)
    monkeypatch.setattr(build.driver, "call", lambda name, what, *rest: answers[what])
    assert build.resolve_archs(["native", "sm_80", "sm_90a", "sm_80"]) == ["sm_90a", "sm_80"]


def test_native_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(build.driver, "device_count", lambda: 0)
    with pytest.raises(UnsupportedError, match="this process sees no CUDA device"):
        build.native_arch()


# --- the workers -------------------------------------------------------------------------------


def test_failure_in_a_worker_stops_the_build(tmp_path):
    todo = [build.Job(KEY, "sm_1")] * 20
    with pytest.raises(CompileError, match="kimi_topk16-torch does not compile for sm_1"):
        build.build_all(todo, tmp_path, 2, lambda built: None)
    assert list(tmp_path.iterdir()) == []


def test_worker_that_dies_is_reported(tmp_path, monkeypatch):
    code = "import os, sys\nif '--multiprocessing-fork' in sys.orig_argv: os._exit(3)"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CompileError, match="a worker process died after 0 of 2 kernels"):
        build.build_all([build.Job(KEY, ARCH)] * 2, tmp_path / "out", 2, lambda built: None)


def test_jobs_are_every_variant_once_per_arch():
    every = build.jobs(["sm_80", "sm_90a"])
    assert len(every) == len(set(every))
    assert len(every) == 2 * sum(len(one.variants()) for one in collectives().values())
    assert build.jobs(["sm_80"], ["kimi_topk16", "kimi_topk16"]) == [
        build.Job(key, "sm_80") for key in ROUTER.variants()
    ]
    with pytest.raises(InvalidArgumentError):
        build.jobs(["sm_80"], ["nothing"])


def test_jobs_of_a_sum_are_also_those_of_what_large_ones_are_made_of():
    found = {job.key.op for job in build.jobs(["sm_80"], ["all_reduce"])}
    assert found == {"all_reduce", "reduce_scatter", "all_gather"}


def test_jobs_of_gathers_of_several_tensors_are_there_if_asked_for():
    one, three = (build.jobs(["sm_80"], ["all_gather"], tensors=count) for count in (1, 3))
    assert len(three) == 3 * len(one)
    assert {job.plugin().num_inputs for job in three} == {1, 2, 3}


def test_jobs_of_routers_are_those_that_their_plugins_ask_for():
    specs = build.resolve_routers(["deepseek-v3", "kimi-k2", "kimi-k2.5", "all"])
    assert specs[:2] == [PRESETS["deepseek-v3"], PRESETS["kimi-k2"]]
    assert len(specs) == len(set(PRESETS.values()))
    found = build.jobs(["sm_80"], ["barrier"], routers=specs[:2])
    assert len(found) == 5 + sum(
        len(make(spec).variants())
        for spec in specs[:2]
        for make in (router_collective, fused_collective)
    )
    assert all(job.plugin().kernel(job.key) for job in found)
    with pytest.raises(InvalidArgumentError, match="router='gpt-5' is unknown"):
        build.resolve_routers(["gpt-5"])


# --- registers ---------------------------------------------------------------------------------


def cuobjdump() -> str:
    packaged = sorted(Path(sysconfig.get_paths()["purelib"], "nvidia").glob("**/bin/cuobjdump"))
    found = str(packaged[0]) if packaged else shutil.which("cuobjdump")
    return found or pytest.skip("cuobjdump is not installed")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_registers_are_those_that_cuobjdump_prints(arch, tmp_path):
    collective = find("all_gather_heads")
    kernel = compiler.build(collective, KernelKey("all_gather_heads", ("push", 16)), arch)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(kernel.cubin)
    command = [cuobjdump(), "-res-usage", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"REG:{cubin.max_registers(kernel.cubin)} " in text

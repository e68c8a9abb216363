"""What docs/security.md promises of the rendezvous; of files, tests/transport/test_host_shm.py."""

from __future__ import annotations

import ast
import json
import pickle
import secrets
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from launcher import run_threads, succeeded
from worlds import build_each, close_each, on_each, small

import pcie_comm
from pcie_comm import InvalidArgumentError, MismatchError, PcieDcpGroup, PeerAbortedError, meeting
from pcie_comm.agreement import agree, compare, read_fields, read_record
from pcie_comm.bootstrap import ThreadBootstrap
from pcie_comm.bootstrap_store import StoreBootstrap
from pcie_comm.errors import CommError
from pcie_comm.layout import SLAB_MAGIC
from pcie_comm.rank_facts import RankFacts
from pcie_comm.transport import identity
from pcie_comm.transport.base import SlabRecord
from pcie_comm.watch.process import Process

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

PACKAGE = Path(pcie_comm.__file__).parent
OWN_CHILDREN_ONLY = {
    "build.py",
    "demo/processes.py",
    "probe/child.py",
    "probe/runner.py",
    "probe/visit.py",
}
"""Programs that talk to children which they started themselves, over pipes that nobody else has."""

CODE_FROM_DATA = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing", "yaml"}
CALLS = {"eval", "exec", "load_object", "all_gather_object", "broadcast_object_list", "loads"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
SLAB = {"transport": "host_shm", "nbytes": 20_000, "nonce": "00" * 16, "facts": {"rank": 1}}


def damaged(whole: dict[str, object]) -> st.SearchStrategy[bytes]:
    """Records with a field that is missing or something else, and bytes that are no record."""
    names = st.sampled_from(sorted(whole))
    return st.one_of(
        st.binary(max_size=60),
        st.just(b"[" * 100_000),
        json_values.map(lambda value: json.dumps(value).encode()),
        names.map(lambda n: json.dumps({k: v for k, v in whole.items() if k != n}).encode()),
        st.tuples(names, json_values).map(
            lambda change: json.dumps({**whole, change[0]: change[1]}).encode()
        ),
    )


# --- nothing that arrives is code ----------------------------------------------------------------


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def calls_of(path: Path) -> set[str]:
    """Names that are called; `json.loads` is the one reader."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            function = node.func
            text = ast.unparse(function)
            if text not in ("json.loads",):
                found.add(getattr(function, "attr", getattr(function, "id", "")))
    return found


def test_no_module_turns_bytes_into_code():
    own = {PACKAGE / name for name in OWN_CHILDREN_ONLY}
    assert all(path.is_file() for path in own)
    paths = [path for path in PACKAGE.rglob("*.py") if path not in own]
    assert len(paths) > 60
    for path in paths:
        assert not imports_of(path) & CODE_FROM_DATA, path
        assert not calls_of(path) & CALLS, path


def test_the_check_sees_what_it_looks_for(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(
        "import os, pickle as p\nfrom yaml import x\ndist.all_gather_object(p.loads(b))"
    )
    assert imports_of(path) == {"os", "pickle", "yaml"}
    assert calls_of(path) & CALLS == {"loads", "all_gather_object"}


def test_groups_over_a_store_unpickle_nothing(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    store = dist.HashStore()

    def on_rank(rank: int) -> list[int]:
        end = StoreBootstrap(store, (0, 1), rank, 10.0)
        with PcieDcpGroup.from_bootstrap(end, "cpu", config=small()) as group:
            return group.world_size

    assert succeeded(run_threads(on_rank, 2)) == [2, 2]


# --- records that are not what they must be ------------------------------------------------------


def read_or_refused(read):
    """Return what is read, or None if it was refused as it must be."""
    try:
        return read()
    except InvalidArgumentError as error:
        return None if error.peer == 1 else pytest.fail(f"peer={error.peer}")


@given(damaged(SLAB))
def test_a_slab_record_is_read_or_refused(data):
    record = read_or_refused(lambda: SlabRecord.decode(data, transport="host_shm", peer=1))
    assert record is None or record.transport == "host_shm"


@given(damaged({"device": "cpu", "multiprocessors": 0, "reachable": [], "contract": {}}))
def test_an_introduction_is_read_or_refused(data):
    facts = read_or_refused(lambda: RankFacts.decode(data, 1))
    assert facts is None or isinstance(facts.contract, dict)


PROCESS = {"boot": "b", "token": "t", "pid": 7, "started": 1, "namespaces": "n"}


@given(damaged(PROCESS))
def test_a_line_of_the_roll_call_is_read_or_refused(data):
    process = read_or_refused(
        lambda: read_fields(Process, read_record(data, 1, "roll call"), 1, "roll call")
    )
    assert process is None or type(process.pid) is int


def test_a_good_line_is_read():
    assert read_fields(Process, PROCESS, 1, "roll call") == Process("b", "t", 7, 1, "n")
    for change in ({"pid": True}, {"pid": "7"}, {"more": 1}):
        with pytest.raises(InvalidArgumentError, match="roll call record of rank 1"):
            read_fields(Process, PROCESS | change, 1, "roll call")


@pytest.mark.parametrize("outcome", [b"", b"\x00", b"\x00[1]", b"\x00{}", b"\x02x", b"\x00[[]"])
def test_a_damaged_outcome_is_a_failure_of_that_rank(outcome):
    class Peers:
        rank = 0

        def all_gather(self, payload, timeout_s):
            return [payload, outcome]

    with pytest.raises(PeerAbortedError, match="step failed on rank 1: malformed record") as caught:
        agree(Peers(), "step", lambda: b"", 1.0)
    assert caught.value.peer == 1


@pytest.mark.parametrize("word", ["", "x", "[1]", '["0", "why"]', "[1, 2]"])
def test_a_damaged_abort_in_the_store_still_aborts(word):
    store = dist.HashStore()

    def on_rank(rank: int) -> None:
        end = StoreBootstrap(store, (0, 1), rank, 10.0)
        if rank == 1:
            end.shared_store().set("abort", word)
        else:
            end.all_gather(b"", 10.0)

    first, _ = run_threads(on_rank, 2)
    assert isinstance(first, PeerAbortedError)
    assert "a rank aborted" in str(first)


# --- versions and groups -------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["version", "protocol_version", "kernels"])
def test_another_version_is_refused_by_all(what, monkeypatch):
    versions, turn = meeting._versions, iter(range(2))

    def differing():
        return versions() | {what: f"other {next(turn)}"}

    monkeypatch.setattr(meeting, "_versions", differing)
    errors = build_each([{}, {}])
    assert [type(error) for error in errors] == [MismatchError] * 2
    assert all(f"{what}: rank 0=" in str(error) for error in errors)


def test_a_record_of_another_group_is_refused(monkeypatch):
    """Of a group that lives, of the same ranks, lane and size: only its name tells them apart."""
    exchange, recorded = ThreadBootstrap._exchange, []

    def record(end, payload, timeout_s):
        if end.rank == 1 and b'"channel"' in payload:
            recorded.append(payload)
        return exchange(end, payload, timeout_s)

    monkeypatch.setattr(ThreadBootstrap, "_exchange", record)
    groups = build_each([{}, {}])

    def replay(end, payload, timeout_s):
        foreign = end.rank == 1 and b'"channel"' in payload
        return exchange(end, recorded[0] if foreign else payload, timeout_s)

    monkeypatch.setattr(ThreadBootstrap, "_exchange", replay)
    errors = build_each([{}, {}])
    assert all(isinstance(error, CommError) for error in errors)
    assert isinstance(errors[0], MismatchError)
    assert "the ranks disagree on the channel: group: rank 0=" in str(errors[0])
    assert on_each(groups, lambda group: group.check()) == [None, None]
    close_each(groups)


def test_the_names_of_groups_are_random_and_alike_on_all_ranks():
    names = []
    for _ in range(3):
        groups = build_each([{}, {}])
        names.append({group._watch.group for group in groups})
        close_each(groups)
    assert [len(one) for one in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3
    assert all(len(name) >= 32 for one in names for name in one)


def test_random_names_come_from_the_system(monkeypatch):
    asked = []
    for name in ("token_hex", "token_bytes"):
        made = getattr(secrets, name)
        monkeypatch.setattr(
            secrets, name, lambda nbytes, made=made: asked.append(nbytes) or made(nbytes)
        )
    magic = SLAB_MAGIC.to_bytes(8, "little")
    headers = {identity.new_header() for _ in range(50)}
    assert len(headers) == 50
    assert all(header.startswith(magic) and len(header) == 24 for header in headers)
    assert asked == [16] * 50


def test_contracts_of_any_shape_are_compared_or_refused():
    with pytest.raises(InvalidArgumentError, match="contract record of rank 1"):
        compare([b"{}", b"[" * 100_000], "settings")

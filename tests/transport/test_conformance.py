"""What every transport does. One suite, for each of them, on a real and on a fake driver.

Threads and processes run the same checks; where threads stand for processes (cuda_ipc on the fake
driver) the fake tells them apart.
"""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
from fake_cuda import FakeHost, FakeProcess
from launcher import run_ranks, run_threads, succeeded
from leaks import own_files, own_mappings
from sides import NBYTES, Check, Side, edited, in_process

from pcie_comm import driver
from pcie_comm.bootstrap import ThreadBootstrap
from pcie_comm.errors import CommError, InvalidArgumentError
from pcie_comm.layout import SLAB_MAGIC, SlabLayout
from pcie_comm.transport import TRANSPORTS, cuda_ipc, cuda_local, identity, load
from pcie_comm.transport.base import SlabRecord

NONCE_END = SlabLayout.NONCE_OFFSET + SlabLayout.NONCE_NBYTES


def check_life_of_a_slab(side: Side) -> None:
    """Zeroed and headed at the start; what a peer writes, the owner reads."""
    transport, records, peers = side.mapped()
    everyone = range(side.world_size)
    for peer in everyone:
        slab = side.read(peers, peer, 0, NBYTES)
        nonce = SlabRecord.decode(records[peer], transport=side.name, peer=peer).nonce
        assert slab[:8] == SLAB_MAGIC.to_bytes(8, "little")
        assert slab[8:NONCE_END].hex() == nonce
        assert slab[NONCE_END : SlabLayout.MARKS_OFFSET] == bytes(
            SlabLayout.MARKS_OFFSET - NONCE_END
        )
        assert slab[SlabLayout.HEADER_NBYTES :] == bytes(NBYTES - SlabLayout.HEADER_NBYTES)
    side.exchange()
    for target in everyone:
        side.write(peers, target, 1024 * (1 + side.rank), bytes([side.rank + 1, target + 1]) * 8)
    side.write(peers, (side.rank + 1) % side.world_size, NBYTES - 1, b"\x7f")
    side.exchange()
    for writer in everyone:
        found = side.read(peers, side.rank, 1024 * (1 + writer), 16)
        assert found == bytes([writer + 1, side.rank + 1]) * 8
    assert side.read(peers, side.rank, NBYTES - 1, 1) == b"\x7f"
    assert transport.describe()["slab_nbytes"] == NBYTES
    side.release(transport)


def check_shape_of_the_map(side: Side) -> None:
    transport, _, peers = side.mapped()
    assert len(peers.addresses) == side.world_size
    if side.name == "host_shm":
        assert peers.addresses == (0,) * side.world_size
    else:
        assert 0 not in peers.addresses
        assert len(set(peers.addresses)) == side.world_size
        assert all(address % 256 == 0 for address in peers.addresses)
    if peers.views:
        assert [len(view) for view in peers.views] == [NBYTES] * side.world_size
        assert not any(view.readonly for view in peers.views)
    del peers
    side.release(transport)


def check_record_is_json_and_survives_a_round_trip(side: Side) -> None:
    transport = side.make()
    data = transport.allocate(NBYTES)
    record = SlabRecord.decode(data, transport=side.name, peer=side.rank)
    assert json.loads(data)["transport"] == side.name
    assert record.encode() == data
    assert all(isinstance(value, str | int) for value in record.facts.values())
    transport.free()


def check_bad_records_are_refused(side: Side) -> None:
    """Nothing stays mapped after a refusal, and the right records still map."""
    transport = side.make()
    records = side.exchange(transport.allocate(NBYTES))
    victim = side.world_size - 1 if side.rank != side.world_size - 1 else 0
    bad = {
        "garbage": b"\x80\x04garbage",
        "empty": b"",
        "truncated": records[victim][:-9],
        "list": b"[1, 2]",
        "other transport": edited(records[victim], transport="carrier_pigeon"),
        "other size": edited(records[victim], nbytes=NBYTES * 2),
        "short nonce": edited(records[victim], nonce="00"),
        "wrong nonce": edited(records[victim], nonce="00" * 16),
        "no facts": edited(records[victim], facts={}),
    }
    for kind, record in bad.items():
        replaced = [*records[:victim], record, *records[victim + 1 :]]
        with pytest.raises(InvalidArgumentError):
            pytest.fail(f"{kind}: {transport.map(replaced)}")
    for wrong in (records[:-1], [*records, records[0]], records[::-1]):
        if wrong != records:
            with pytest.raises(InvalidArgumentError):
                transport.map(wrong)
    transport.map(records)
    side.exchange()
    side.release(transport)


def check_idempotent_ends_and_second_life(side: Side) -> None:
    transport = side.make()
    transport.unmap()
    transport.free()
    with pytest.raises(InvalidArgumentError, match="allocate first"):
        transport.map([b""] * side.world_size)
    for _ in range(2):
        records = side.exchange(transport.allocate(NBYTES))
        with pytest.raises(InvalidArgumentError, match="free it first"):
            transport.allocate(NBYTES)
        transport.map(records)
        with pytest.raises(InvalidArgumentError, match="unmap first"):
            transport.map(records)
        side.exchange()
        transport.seal()
        transport.seal()
        transport.unmap()
        transport.unmap()
        side.exchange()
        transport.free()
        transport.free()


def check_stale_records_are_refused(side: Side) -> None:
    """A record whose slab was freed maps to nothing, also when memory is used again."""
    transport, old, peers = side.mapped()
    del peers
    side.release(transport)
    new = side.exchange(transport.allocate(NBYTES))
    if side.world_size > 1:
        other = (side.rank + 1) % side.world_size
        mixed = [*new[:other], old[other], *new[other + 1 :]]
        with pytest.raises(CommError):
            transport.map(mixed)
    side.exchange()
    transport.map(new)
    side.exchange()
    side.release(transport)


def check_small_slabs_are_refused(side: Side) -> None:
    for nbytes in (0, -1, 127, 1.5, True):
        with pytest.raises(InvalidArgumentError, match="too small"):
            side.make().allocate(nbytes)  # type: ignore[arg-type]


CHECKS: tuple[Check, ...] = (
    check_life_of_a_slab,
    check_shape_of_the_map,
    check_record_is_json_and_survives_a_round_trip,
    check_bad_records_are_refused,
    check_idempotent_ends_and_second_life,
    check_stale_records_are_refused,
    check_small_slabs_are_refused,
)


@pytest.fixture
def fake_host(monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    host = FakeHost(gpus=2)
    monkeypatch.setattr(driver, "_bindings", host)
    for module in (identity, cuda_local, cuda_ipc):
        monkeypatch.setattr(module, "process_token", lambda: host.current.token)
    return host


def run_in_threads(name: str, world_size: int, check: Check, places: list[FakeProcess]) -> None:
    """Run a check on every rank; with fake processes, rank N on device N % 2 of its process."""
    bootstraps = ThreadBootstrap.create(world_size)

    def on_rank(rank: int) -> None:
        index = None if name == "host_shm" else rank % 2 if places else 0
        with ExitStack() as stack:
            if places:
                stack.enter_context(places[rank % len(places)].entered())
            try:
                check(Side(name, bootstraps[rank], index))
            except BaseException as error:
                bootstraps[rank].abort(repr(error))
                raise
            assert not places or places[rank % len(places)].contexts == []

    results = run_threads(on_rank, world_size)
    errors = [r for r in results if isinstance(r, BaseException)]
    succeeded(sorted(errors, key=lambda e: type(e).__name__.startswith("Peer")))
    assert own_files() == []
    assert own_mappings() == []
    assert all(place.is_clean() for place in places)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_host_shm_threads(check: Check, world_size: int) -> None:
    run_in_threads("host_shm", world_size, check, [])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["cuda_local", "host_pinned", "cuda_ipc"])
def test_fake_driver(name: str, check: Check, world_size: int, fake_host: FakeHost) -> None:
    processes = world_size if name == "cuda_ipc" else 1
    run_in_threads(name, world_size, check, [fake_host.process() for _ in range(processes)])


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["cuda_local", "host_pinned"])
def test_gpu_threads(name: str, check: Check, world_size: int) -> None:
    run_in_threads(name, world_size, check, [])


def test_host_shm_processes() -> None:
    run_ranks(in_process, 3, args=("host_shm", CHECKS))


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["cuda_ipc", "host_pinned"])
def test_gpu_processes(name: str, world_size: int) -> None:
    run_ranks(in_process, world_size, args=(name, CHECKS), timeout_s=110)


def test_transports_are_found_by_name() -> None:
    assert list(TRANSPORTS) == ["host_shm", "cuda_local", "cuda_ipc", "host_pinned"]
    for name, kind in TRANSPORTS.items():
        assert (kind.name, load(name)) == (name, kind)
    assert "rdma" not in TRANSPORTS
    with pytest.raises(InvalidArgumentError, match=r"'rdma'.*host_shm, cuda_local"):
        load("rdma")


@pytest.mark.parametrize("name", ["cuda_local", "cuda_ipc", "host_pinned"])
def test_cuda_transports_need_a_device(name: str) -> None:
    side = Side(name, ThreadBootstrap.create(1)[0], None)
    with pytest.raises(InvalidArgumentError, match="needs a CUDA device"):
        side.make().allocate(NBYTES)

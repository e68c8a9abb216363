"""cuda_ipc and cuda_local on a host that has the driver's traps and no GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from fake_cuda import POISON, FakeHost, FakeProcess, Status
from sides import NBYTES, edited

from pcie_comm import driver
from pcie_comm.errors import CudaError, InvalidArgumentError, UnsupportedError
from pcie_comm.layout import SLAB_MAGIC, SlabLayout
from pcie_comm.transport import cuda_ipc, cuda_local, identity, load
from pcie_comm.transport.base import PeerMap, Transport, TransportInfo
from pcie_comm.transport.cuda_memory import dashed


class Rank:
    """A rank's transport; every call runs in the rank's process."""

    def __init__(self, name: str, rank: int, world_size: int, place: tuple[FakeProcess, int]):
        self.process, index = place
        self.transport: Transport = load(name)(TransportInfo(rank, world_size, index))

    def allocate(self) -> bytes:
        with self.process.entered():
            return self.transport.allocate(NBYTES)

    def map(self, records: Sequence[bytes]) -> PeerMap:
        with self.process.entered():
            return self.transport.map(records)

    def seal(self) -> None:
        with self.process.entered():
            self.transport.seal()

    def unmap(self) -> None:
        with self.process.entered():
            self.transport.unmap()

    def free(self) -> None:
        with self.process.entered():
            self.transport.free()

    def read(self, address: int, nbytes: int) -> bytes:
        found = self.process.find(address)
        assert found is not None
        block, offset = found
        return bytes(block.data[offset : offset + nbytes])


def ranks_of(name: str, *places: tuple[FakeProcess, int]) -> list[Rank]:
    return [Rank(name, rank, len(places), place) for rank, place in enumerate(places)]


def finish(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.unmap()
    for rank in ranks:
        rank.free()
    assert all(rank.process.is_clean() for rank in ranks)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    host = FakeHost(gpus=2)
    monkeypatch.setattr(driver, "_bindings", host)
    for module in (identity, cuda_local, cuda_ipc):
        monkeypatch.setattr(module, "process_token", lambda: host.current.token)
    return host


def test_slabs_that_share_a_block_keep_their_offsets(host: FakeHost) -> None:
    """B12: the handle alone leads to the start of the block, which belongs to someone else."""
    one, two = host.process(), host.process()
    with one.entered():
        one.contexts.append(one.visible[0])
        neighbour = driver.call("cuMemAlloc", 4096)
        one.contexts.pop()
    first = ranks_of("cuda_ipc", (one, 0), (two, 0))
    second = ranks_of("cuda_ipc", (one, 0), (two, 0))
    groups = [(ranks, [rank.allocate() for rank in ranks]) for ranks in (first, second)]
    seen = []
    for ranks, records in groups:
        assert json.loads(records[0])["facts"]["offset"] > 0
        address = ranks[1].map(records).addresses[0]
        nonce = bytes.fromhex(json.loads(records[0])["nonce"])
        assert ranks[1].read(address, 24) == SLAB_MAGIC.to_bytes(8, "little") + nonce
        behind = SlabLayout.HEADER_NBYTES
        assert ranks[1].read(address, NBYTES)[behind:] == bytes(NBYTES - behind)
        seen.append(nonce)
    assert seen[0] != seen[1]
    assert len(two.opened) == 1, "both slabs lie in one block: one mapping, opened twice"
    with one.entered():
        driver.call("cuMemFree", neighbour)
    second[1].unmap()
    assert +two.opened, "the first slab still uses the block"
    first[1].unmap()
    finish([*first, *second])


def test_a_record_without_its_offset_is_refused(host: FakeHost) -> None:
    """B12, the trap itself: the base is another slab, and the nonce tells."""
    one, two = host.process(), host.process()
    early = ranks_of("cuda_ipc", (one, 0), (two, 0))
    late = ranks_of("cuda_ipc", (one, 0), (two, 0))
    early_records = [rank.allocate() for rank in early]
    records = [rank.allocate() for rank in late]
    assert json.loads(early_records[0])["facts"]["offset"] == 0
    with pytest.raises(InvalidArgumentError, match="points to another slab"):
        late[1].map([edited(records[0], offset=0), records[1]])
    with pytest.raises(InvalidArgumentError, match="leaves its allocation"):
        late[1].map([edited(records[0], offset=1 << 40), records[1]])
    for handle in ("zz", "00"):
        with pytest.raises(InvalidArgumentError, match="malformed"):
            late[1].map([edited(records[0], handle=handle), records[1]])
    assert not +two.opened
    finish([*early, *late])


@pytest.mark.parametrize("orders", [([0, 1], [1, 0]), ([0, 1], [1, 0, 0])])
def test_devices_are_matched_by_uuid(host: FakeHost, orders: tuple[list[int], list[int]]) -> None:
    """B21: ordinal 0 is another GPU in each process."""
    one, two = (host.process(order) for order in orders)
    ranks = ranks_of("cuda_ipc", (one, 0), (two, 0))
    records = [rank.allocate() for rank in ranks]
    uuids = [json.loads(record)["facts"]["uuid"] for record in records]
    assert uuids == host.gpus
    maps = [rank.map(records) for rank in ranks]
    for rank, peers in zip(ranks, maps, strict=True):
        for peer in range(2):
            nonce = bytes.fromhex(json.loads(records[peer])["nonce"])
            assert rank.read(peers.addresses[peer], 24)[8:] == nonce
    finish(ranks)


def test_invisible_device_is_named_with_both_uuids(host: FakeHost) -> None:
    """B21: each rank sees only its own GPU."""
    ranks = ranks_of("cuda_ipc", (host.process([0]), 0), (host.process([1]), 0))
    records = [rank.allocate() for rank in ranks]
    for rank, text in ((0, "of rank 1"), (1, "of rank 0")):
        with pytest.raises(UnsupportedError, match=text) as caught:
            ranks[rank].map(records)
        assert caught.value.reason == "peer device is not visible"
        assert all(dashed(gpu) in str(caught.value) for gpu in host.gpus)
    finish(ranks)


@pytest.mark.parametrize("name", ["cuda_ipc", "cuda_local"])
def test_devices_without_access_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeHost(gpus=2, isolated=[(0, 1)])
    monkeypatch.setattr(driver, "_bindings", host)
    for module in (identity, cuda_local, cuda_ipc):
        monkeypatch.setattr(module, "process_token", lambda: host.current.token)
    one = host.process()
    two = host.process() if name == "cuda_ipc" else one
    ranks = ranks_of(name, (one, 0), (two, 1))
    records = [rank.allocate() for rank in ranks]
    with pytest.raises(UnsupportedError, match="cannot address each other") as caught:
        ranks[0].map(records)
    assert all(dashed(gpu) in str(caught.value) for gpu in host.gpus)
    finish(ranks)


def test_shared_device_needs_no_peer_access(host: FakeHost) -> None:
    """B37: two ranks on one GPU, as processes and as threads."""
    for name, others in (("cuda_ipc", 2), ("cuda_local", 1)):
        processes = [host.process([1]) for _ in range(others)]
        ranks = ranks_of(name, (processes[0], 0), (processes[-1], 0))
        records = [rank.allocate() for rank in ranks]
        for rank in ranks:
            rank.map(records)
            assert rank.process.peer_access == set()
        finish(ranks)


def test_each_transport_refuses_the_others_processes(host: FakeHost) -> None:
    """B37: the error says which transport to use instead."""
    one, two = host.process(), host.process()
    apart = ranks_of("cuda_local", (one, 0), (two, 0))
    together = ranks_of("cuda_ipc", (one, 0), (one, 1))
    for ranks, remedy in ((apart, "transport='cuda_ipc'"), (together, "transport='cuda_local'")):
        records = [rank.allocate() for rank in ranks]
        with pytest.raises(UnsupportedError, match=remedy):
            ranks[0].map(records)
        finish(ranks)


def test_another_host_is_refused(host: FakeHost) -> None:
    ranks = ranks_of("cuda_ipc", (host.process(), 0), (host.process(), 0))
    records = [rank.allocate() for rank in ranks]
    with pytest.raises(UnsupportedError, match="runs on another host"):
        ranks[0].map([records[0], edited(records[1], boot="elsewhere")])
    finish(ranks)


@pytest.mark.parametrize("name", ["cuda_ipc", "cuda_local", "host_pinned"])
def test_current_device_is_the_callers(name: str, host: FakeHost) -> None:
    """B37: the group is on device 1, the caller on device 0, before and after, also on errors."""
    process = host.process()
    ranks = ranks_of(name, (process, 1))
    process.contexts.append(process.visible[0])

    def unchanged() -> bool:
        return process.contexts == [process.visible[0]]

    with pytest.MonkeyPatch.context() as patch:
        broken = "cuMemsetD8Async" if name != "host_pinned" else "cuDevicePrimaryCtxRetain"
        patch.setitem(process.failures, broken, Status.CUDA_ERROR_OUT_OF_MEMORY)
        with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
            ranks[0].allocate()
    assert unchanged()
    assert process.is_clean()
    records = [ranks[0].allocate()]
    assert unchanged()
    ranks[0].map(records)
    assert unchanged()
    for block, _ in process.allocations.values():
        assert block.gpu == process.visible[1]
    finish(ranks)
    assert unchanged()


@pytest.mark.parametrize(
    "status", [Status.CUDA_ERROR_INVALID_DEVICE, Status.CUDA_ERROR_INVALID_CONTEXT]
)
def test_failing_open_leaves_nothing_mapped(host: FakeHost, status: Status) -> None:
    """B31: peer access is said to be possible, but the driver opens nothing."""
    processes = [host.process() for _ in range(3)]
    ranks = ranks_of("cuda_ipc", *((process, 0) for process in processes))
    records = [rank.allocate() for rank in ranks]
    broken = [*records[:2], edited(records[2], handle="00" * 64)]
    with pytest.raises(CudaError, match="cannot open the slab of rank 2"):
        ranks[0].map(broken)  # rank 1's slab was mapped by then
    assert not +processes[0].opened
    processes[0].failures["cuIpcOpenMemHandle"] = status
    with pytest.raises(CudaError, match="ACS") as caught:
        ranks[0].map(records)
    assert caught.value.name == status.name
    assert (caught.value.rank, caught.value.peer) == (0, 1)
    assert processes[0].contexts == []
    del processes[0].failures["cuIpcOpenMemHandle"]
    ranks[0].map(records)
    finish(ranks)


def two_gpus(name: str, host: FakeHost) -> list[Rank]:
    """Return two ranks on GPUs of their own, as processes or in one."""
    one = host.process()
    return ranks_of(name, (one, 0), (host.process() if name == "cuda_ipc" else one, 1))


@pytest.mark.parametrize("name", ["cuda_ipc", "cuda_local"])
def test_b31_reads_that_do_not_arrive_are_noticed(name: str, host: FakeHost) -> None:
    """One direction reads zeros, and writes right; the other is sound."""
    ranks = two_gpus(name, host)
    records = [rank.allocate() for rank in ranks]
    host.lost = {(host.gpus[0], host.gpus[1], "read")}
    with pytest.raises(InvalidArgumentError, match=r"of rank 1 .*ACS and IOMMU.*host_pinned"):
        ranks[0].map(records)
    assert not +ranks[0].process.opened
    ranks[1].map(records)
    finish(ranks)


@pytest.mark.parametrize("name", ["cuda_ipc", "cuda_local"])
def test_b31_writes_that_do_not_arrive_are_noticed_by_their_target(
    name: str, host: FakeHost
) -> None:
    """One direction reads right, and its writes are lost: the owner of the memory looks."""
    ranks = two_gpus(name, host)
    records = [rank.allocate() for rank in ranks]
    host.lost = {(host.gpus[0], host.gpus[1], "write")}
    for rank in ranks:
        rank.map(records)
    ranks[0].seal()
    with pytest.raises(UnsupportedError, match=r"rank 0 wrote .*ACS and IOMMU") as caught:
        ranks[1].seal()
    assert (caught.value.rank, caught.value.peer) == (1, 0)
    assert caught.value.reason == "writes of a peer do not arrive"
    finish(ranks)


def test_b31_control_writes_that_arrive_pass(host: FakeHost) -> None:
    for name in ("cuda_ipc", "cuda_local"):
        ranks = two_gpus(name, host)
        records = [rank.allocate() for rank in ranks]
        ranks[0].map(records)
        with pytest.raises(UnsupportedError, match="did not arrive"):
            ranks[0].seal()  # rank 1 has not mapped
        ranks[1].map(records)
        for rank in ranks:
            rank.seal()
        finish(ranks)


def test_failing_close_can_be_repeated(host: FakeHost) -> None:
    """What the driver did not close stays noted; the memory is not forgotten."""
    one, two = host.process(), host.process()
    ranks = ranks_of("cuda_ipc", (one, 0), (two, 0))
    records = [rank.allocate() for rank in ranks]
    ranks[0].map(records)
    one.failures["cuIpcCloseMemHandle"] = Status.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(CudaError):
        ranks[0].unmap()
    assert +one.opened
    with pytest.raises(CudaError):
        ranks[0].free()
    assert one.allocations, "a slab is not freed while its rank cannot unmap"
    one.failures.clear()
    finish(ranks)


def test_half_registered_memory_is_unregistered(host: FakeHost) -> None:
    process = host.process()
    ranks = ranks_of("host_pinned", (process, 0), (process, 0))
    records = [rank.allocate() for rank in ranks]
    process.failures["cuMemHostGetDevicePointer"] = Status.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(CudaError):
        ranks[0].map(records)
    assert process.registered == {}
    process.failures.clear()
    assert len(set(ranks[0].map(records).addresses + ranks[1].map(records).addresses)) == 4
    finish(ranks)


def test_a_failed_export_frees_the_slab(host: FakeHost) -> None:
    """B13: the export is refused as an exception, and nothing is lost."""
    process = host.process()
    (rank,) = ranks_of("cuda_ipc", (process, 0))
    process.failures["cuIpcGetMemHandle"] = Status.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(CudaError, match="cuIpcGetMemHandle"):
        rank.allocate()
    assert process.is_clean()


def test_a_slab_is_zeroed_before_its_record_exists(host: FakeHost) -> None:
    """B29: nothing of a fresh slab is written after it was published."""
    process = host.process()
    (rank,) = ranks_of("cuda_local", (process, 0))
    record = rank.allocate()
    address = json.loads(record)["facts"]["address"]
    before = rank.read(address, NBYTES + 16)
    assert before[24:NBYTES] == bytes(NBYTES - 24)
    assert before[NBYTES:] == bytes([POISON]) * 16, "the fake does not zero by itself"
    rank.map([record])
    assert rank.read(address, NBYTES + 16) == before
    finish([rank])


def test_peer_access_that_is_already_enabled_is_fine(host: FakeHost) -> None:
    process = host.process()
    for _ in range(2):
        ranks = ranks_of("cuda_local", (process, 0), (process, 1))
        records = [rank.allocate() for rank in ranks]
        for rank in ranks:
            rank.map(records)
        finish(ranks)
    assert len(process.peer_access) == 2


def test_a_device_that_does_not_exist(host: FakeHost) -> None:
    (rank,) = ranks_of("cuda_local", (host.process(), 5))
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_DEVICE"):
        rank.allocate()

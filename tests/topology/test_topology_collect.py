"""The running host: sysfs, NVML and environment on hosts that were built."""

from __future__ import annotations

import pytest
from fake_host import (
    ACS_REDIRECT,
    FakeHost,
    FakeNvml,
    Gpu,
    Root,
    Switch,
    config_space,
    flat_machine,
    nested,
    pairs_of_switches,
    sixteen,
)

from pcie_comm.errors import UnsupportedError
from pcie_comm.topology.collect import collect, from_path, from_sysfs
from pcie_comm.topology.config_space import ConfigSpace
from pcie_comm.topology.labels import derived_matrix, islands, mismatches
from pcie_comm.topology.model import Host
from pcie_comm.topology.nvml import open_nvml
from pcie_comm.topology.sysfs import Sysfs


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def built(fake: FakeHost, tmp_path, **options) -> Host:
    return collect(fake.write(tmp_path / "host"), FakeNvml(fake, **options))


HOSTS = {
    "two sockets": pairs_of_switches,
    "nested switches": nested,
    "sixteen": sixteen,
    "one GPU": lambda: FakeHost([Root([Gpu()])]),
    "no GPU": lambda: FakeHost([Root([])]),
    "flat": flat_machine,
    "one root, two ports": lambda: FakeHost([Root([Gpu(), Gpu()])]),
}


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("privileged", [True, False])
def test_labels_follow_the_legend(name, privileged, tmp_path):
    fake = HOSTS[name]()
    fake.privileged = privileged
    host = built(fake, tmp_path)
    assert derived_matrix(host).cells == fake.matrix()
    assert not mismatches(host)


def test_a_label_of_the_driver_that_the_tree_denies_is_flagged(tmp_path):
    host = built(nested(), tmp_path, levels={(0, 1): "SYS", (1, 0): "SYS"})
    assert [(one, other) for one, other, _ in mismatches(host)] == [("GPU0", "GPU1")]


def test_islands_share_a_switch(tmp_path):
    assert islands(built(nested(), tmp_path)) == [("GPU0", "GPU1", "GPU2", "GPU3"), ("GPU4",)]


def test_without_numa_nodes_pairs_of_two_roots_are_unknown(tmp_path):
    fake = pairs_of_switches()
    fake.numa_known = False
    host = built(fake, tmp_path)
    labels = derived_matrix(host)
    assert labels.get("GPU0", "GPU1") == "PIX"
    assert labels.get("GPU0", "GPU2") is None  # two NUMA nodes exist, so it may be either


def test_roles_are_the_same_with_and_without_root(tmp_path):
    roles = []
    for privileged in (True, False):
        fake = nested()
        fake.privileged = privileged
        nodes = Sysfs(fake.write(tmp_path / str(privileged)) / "sys").nodes()
        roles.append([(node.address, node.role) for node in nodes])
    assert roles[0] == roles[1]


def test_acs_is_unknown_without_root_and_never_off(tmp_path):
    fake = FakeHost([Root([Switch([Gpu(), Gpu()], acs=ACS_REDIRECT)])], privileged=False)
    node = next(n for n in built(fake, tmp_path).nodes if n.role == "switch downstream")
    assert node.acs is None
    assert "64 bytes" in node.why("acs")


def test_acs_bits_are_read(tmp_path):
    fake = FakeHost([Root([Switch([Gpu(), Gpu()], acs=ACS_REDIRECT)])])
    node = next(n for n in built(fake, tmp_path).nodes if n.role == "switch downstream")
    assert node.acs.enabled == ("SrcValid", "ReqRedir", "CmpltRedir")


def test_facts_of_a_gpu(tmp_path):
    host = built(FakeHost([Root([Gpu(width=8, correctable=3)])]), tmp_path)
    (gpu,) = host.gpus
    assert (gpu.address, gpu.nvml_index, gpu.ordinal) == ("0000:01:00.0", 0, 0)
    assert (gpu.memory_nbytes, gpu.bar1_nbytes) == (96 << 30, 128 << 30)
    node = host.node(gpu.address)
    assert (node.link.speed_gts, node.link.max_speed_gts) == (2.5, 32.0)
    assert (node.link.width, node.link.max_width) == (8, 16)
    assert node.aer.correctable == {"RxErr": 3}
    assert node.bars[1].nbytes == 128 << 30
    assert host.system.driver == "595.58.03"


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("identity", "passthrough"), ("DMA", "translated"), ("DMA-FQ", "translated"), ("", "off")],
)
def test_iommu_mode(kind, mode, tmp_path):
    assert built(FakeHost([Root([Gpu()])], iommu=kind), tmp_path).system.iommu == mode


def test_virtual_machine(tmp_path):
    assert built(flat_machine(), tmp_path / "a").system.virtual_machine.startswith("a hypervisor")
    assert built(nested(), tmp_path / "b").system.virtual_machine == "none"


def test_without_nvml_the_rest_is_there(tmp_path):
    class Missing:
        NVMLError = OSError

        def nvmlInit(self):
            raise OSError("no library")

    fake = pairs_of_switches()
    host = collect(fake.write(tmp_path), Missing())
    assert derived_matrix(host).cells == fake.matrix()
    assert host.driver_labels is None
    assert "no library" in host.why("driver_labels")
    assert host.gpus[0].uuid is None


def test_nvml_is_closed_after_an_error(tmp_path):
    fake = nested()
    fake.write(tmp_path)
    module = FakeNvml(fake)
    with pytest.raises(KeyError), open_nvml(module):
        raise KeyError
    assert module.open == 0


def test_a_missing_binding_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(UnsupportedError, match="pip install"), open_nvml():
        pass


def test_nvml_answers_that_are_missing_are_unknown(tmp_path):
    fake = FakeHost([Root([Gpu()])])
    fake.write(tmp_path)
    module = FakeNvml(fake)
    module.nvmlDeviceGetSerial = None
    with open_nvml(module) as nvml:
        (gpu,) = nvml.gpus()
    assert gpu.serial is None
    assert gpu.why("serial")


def test_missing_sysfs_is_unknown(tmp_path):
    host = from_sysfs(tmp_path)
    assert host.nodes is None
    assert host.gpus is None
    assert host.why("nodes")


def test_a_copy_of_sysfs_is_a_source(tmp_path):
    fake = nested()
    top = fake.write(tmp_path / "copy")
    assert derived_matrix(from_path(top)).cells == fake.matrix()
    assert derived_matrix(from_path(top / "sys")).cells == fake.matrix()


def test_config_space_of_any_length_is_read_without_a_crash():
    whole = config_space(0x6, acs=ACS_REDIRECT, errors=1)
    assert ConfigSpace(whole).role() == "switch downstream"
    assert ConfigSpace(whole).aer_status() == ("RxErr",)
    for length in range(0, len(whole), 7):
        space = ConfigSpace(whole[:length])
        assert space.role() in (None, "switch downstream")
        space.acs(), space.link(), space.aer_status()


def test_a_capability_list_that_turns_in_circles_ends():
    data = bytearray(config_space(0x1))
    data[0x41] = 0x40
    data[0x40] = 0x01
    data[0x100:0x104] = (0x100 << 20 | 1 << 16 | 0x0002).to_bytes(4, "little")
    assert ConfigSpace(bytes(data)).role() is None
    assert not ConfigSpace(bytes(data)).acs().present

"""Links under load, and counters before and after."""

from __future__ import annotations

import pytest
from fake_host import FakeHost, FakeNvml, Gpu, Root, Switch

from pcie_comm.topology import under_load
from pcie_comm.topology.collect import collect
from pcie_comm.topology.under_load import links_now, read_counters, with_growth


@pytest.fixture
def fake(tmp_path):
    one = FakeHost([Root([Switch([Gpu(correctable=4), Gpu()])])])
    one.write(tmp_path)
    return one


def ends(host):
    return {gpu.name: (gpu.address, gpu.uuid) for gpu in host.gpus}


def test_links_of_driver_and_sysfs(fake, tmp_path):
    nvml = FakeNvml(fake)
    host = collect(tmp_path, nvml)
    fake.gpus[1].speed = 32.0  # under load
    place = tmp_path / "sys/bus/pci/devices" / fake.gpus[1].address / "current_link_speed"
    place.write_text("16.0 GT/s PCIe\n")
    idle, busy = links_now(ends(host), tmp_path, nvml).values()
    assert (idle.driver.speed_gts, busy.driver.speed_gts, busy.sysfs.speed_gts) == (2.5, 32.0, 16.0)
    assert nvml.open == 0


def test_without_sysfs_or_nvml_there_are_reasons(fake, tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    host = collect(tmp_path, FakeNvml(fake))
    nowhere = tmp_path / "nowhere"
    monkeypatch.setattr("importlib.import_module", missing)
    load = links_now(ends(host), nowhere)["GPU0"]
    assert load.driver is None and "nvidia-ml-py" in load.why("driver")
    assert load.sysfs is None and load.why("sysfs") == under_load.NO_SYSFS
    before = read_counters(host, nowhere)
    grown = with_growth(load, host, before, before)
    assert "nvidia-ml-py" in grown.why("replays")
    assert "no device" in grown.why("errors")


def test_what_grew_is_counted(fake, tmp_path):
    nvml = FakeNvml(fake)
    host = collect(tmp_path, nvml)
    load = links_now(ends(host), tmp_path, nvml)
    before = read_counters(host, tmp_path, nvml)
    same = with_growth(load["GPU0"], host, before, read_counters(host, tmp_path, nvml))
    assert (same.replays, same.errors) == (0, {})
    fake.gpus[0].replays = 5
    place = tmp_path / "sys/bus/pci/devices" / fake.gpus[0].address / "aer_dev_correctable"
    place.write_text("RxErr 7\nBadTLP 1\nTOTAL_ERR_COR 8\n")
    after = read_counters(host, tmp_path, nvml)
    grown = with_growth(load["GPU0"], host, before, after)
    address = fake.gpus[0].address
    assert grown.replays == 5
    assert grown.errors == {
        f"{address} correctable RxErr": 3,
        f"{address} correctable BadTLP": 1,
    }
    other = with_growth(load["GPU1"], host, before, after)
    assert (other.replays, other.errors) == (0, {})

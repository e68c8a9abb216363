"""The four names of a GPU under every form of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import pytest

from pcie_comm.topology.identity import visible, with_ordinals
from pcie_comm.topology.model import Gpu

BY_PCI = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpu(index: int, address: str, uuid: str, mig: tuple[str, ...] | None = None) -> Gpu:
    return Gpu(
        f"GPU{index}",
        nvml_index=index,
        address=address,
        uuid=uuid,
        mig_uuids=mig,
        unknown={"*": "of no interest"},
    )


GPUS = (
    gpu(0, "0000:81:00.0", "GPU-aaaa1111-0"),
    gpu(1, "0000:01:00.0", "GPU-aaaa2222-1", ("MIG-11", "MIG-12")),
    gpu(2, "0000:41:00.0", "GPU-bbbb3333-2"),
)


def shown(text: str | None, **order: str) -> list[str] | None:
    environment = dict(order) if text is None else {"CUDA_VISIBLE_DEVICES": text, **order}
    devices = visible(GPUS, environment).devices
    return None if devices is None else [device.gpu for device in devices]


def test_pci_order():
    assert shown(None, **BY_PCI) == ["GPU1", "GPU2", "GPU0"]


def test_without_pci_order_numbers_say_nothing():
    assert shown(None) is None
    assert shown("0,1") is None


def test_what_cuda_said_counts():
    order = [GPUS[2].uuid, GPUS[0].uuid, GPUS[1].uuid]
    devices = visible(GPUS, {"CUDA_VISIBLE_DEVICES": "1"}, order).devices
    assert [device.gpu for device in devices] == ["GPU0"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("2,0", ["GPU0", "GPU1"]),
        (" 1 , 2", ["GPU2", "GPU0"]),
        ("1,7,0", ["GPU2"]),  # an entry that is no GPU hides what follows
        ("1,-1,0", ["GPU2"]),
        ("", []),
        ("NoDevFiles", []),
        ("0,0", None),
    ],
)
def test_numbers(text, names):
    assert shown(text, **BY_PCI) == names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("GPU-b,GPU-aaaa1", ["GPU2", "GPU0"]),
        ("GPU-b,GPU-aaaa,GPU-aaaa1", ["GPU2"]),  # fits two
        ("GPU-cccc", []),
        ("MIG-12,MIG-11", ["GPU1"]),  # a process can use one instance
        ("GPU-bbbb3333-2,1", None),  # the number needs an order
    ],
)
def test_uuids_need_no_order(text, names):
    assert shown(text) == names


def test_ordinals_and_reasons():
    gpus = with_ordinals(GPUS, {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-aaaa1"})
    assert [gpu.ordinal for gpu in gpus] == [1, None, 0]
    assert gpus[1].why("ordinal") == "CUDA does not show it"
    assert "fastest first" in with_ordinals(GPUS, {})[0].why("ordinal")
    assert with_ordinals(GPUS[:1], {})[0].ordinal == 0

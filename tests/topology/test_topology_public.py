"""Public texts of real hosts, where PCIE_COMM_TOPOLOGIES names a folder of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pcie_comm.topology import codec
from pcie_comm.topology.doctor import Case, examine
from pcie_comm.topology.labels import derived_matrix
from pcie_comm.topology.model import LABELS
from pcie_comm.topology.readers import read_file
from pcie_comm.topology.render import to_html, to_mermaid, to_text

FOLDER = Path(os.environ.get("PCIE_COMM_TOPOLOGIES") or "/nowhere")
FILES = sorted(FOLDER.glob("*.txt"))

GPUS = {
    "bw_bidir_wrx90_3switch_8x": 8,
    "bw_unidir_asus_esc8000a_8x": 8,
    "lat_wrx90_3switch_8x": 8,
    "lspci_acsctl_nccl629": None,
    "lspci_t_tinybox_6x7900xtx": 6,
    "lspci_vvv_asus_esc8000a_8x_rtxpro6000": 8,
    "nccl_xml_aws_g5_48xl": None,
    "nccl_xml_aws_p4d_24xl": 8,
    "nccl_xml_azure_ncv4": 4,
    "nccl_xml_azure_ndv4": 8,
    "nccl_xml_rccl_16p1h": 16,
    "nccl_xml_rccl_8p_pcie": 8,
    "numactl_H_asus_esc8000a": None,
    "nvbandwidth_text_8gpu": 8,
    "p2pbw_nccl814_6gpu_p2p_slower_than_shm": 6,
    "proc_cmdline_asus_esc8000a": None,
    "smi_topo_m_and_p2p_aikitoria13_5gpu": 5,
    "smi_topo_m_asus_esc8000a_8x_rtxpro6000": 8,
    "smi_topo_m_b12x_16x_rtxpro6000_adjacent": 16,
    "smi_topo_m_b12x_16x_rtxpro6000_interleaved": 16,
    "smi_topo_m_gpuallocator17_8x4090_all_sys": 8,
    "smi_topo_m_k8s53497_8gpu_pix_phb_sys": 8,
    "smi_topo_m_nccl667_4x_pxb_pix_sys": 4,
    "smi_topo_m_vm_8gpu_phb_sys_nic": 8,
    "smi_topo_m_wrx90_3switch_root_leaf_8x": 8,
}

pytestmark = pytest.mark.skipif(not FILES, reason="PCIE_COMM_TOPOLOGIES names no folder of texts")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_read_judged_and_shown(path):
    host = read_file(path)
    assert (None if host.gpus is None else len(host.gpus)) == GPUS[path.stem]
    assert codec.from_json(codec.to_json(host), "x") == host
    examine(Case(host))
    assert to_text(host) and to_html(host) and to_mermaid(host)
    if host.driver_labels:
        cells = {cell for row in host.driver_labels.cells for cell in row}
        assert cells <= {*LABELS, None}
    for gpu in host.gpus or ():
        assert gpu.uuid is None and gpu.ordinal is None


def test_lspci_gives_the_labels_of_the_driver():
    derived = derived_matrix(read_file(FOLDER / "lspci_vvv_asus_esc8000a_8x_rtxpro6000.txt"))
    driver = read_file(FOLDER / "smi_topo_m_asus_esc8000a_8x_rtxpro6000.txt").driver_labels
    assert derived.cells == driver.cells
    assert {cell for row in derived.cells for cell in row} == {"X", "PIX", "NODE", "SYS"}

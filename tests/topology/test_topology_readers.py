"""What other tools print, in texts of our own in the same shapes."""

from __future__ import annotations

import contextlib

import pytest
from topology_texts import (
    ACS_LINES,
    CMDLINE,
    LSPCI,
    LSPCI_TREE,
    NCCL_XML,
    NUMACTL,
    NVBANDWIDTH,
    P2P_TEST,
    TOPO_M,
    TOPO_M_CUT,
    TOPO_P2P,
    UNTITLED,
)

from pcie_comm.errors import InvalidArgumentError
from pcie_comm.topology.collect import from_path
from pcie_comm.topology.labels import derived_matrix
from pcie_comm.topology.model import expand_ranges
from pcie_comm.topology.nccl_export import to_nccl_xml
from pcie_comm.topology.readers import read_file, read_text, recognise

TEXTS = {
    "nvidia-smi topo": TOPO_M,
    "lspci -vvv": LSPCI,
    "lspci -t": LSPCI_TREE,
    "NCCL topology XML": NCCL_XML,
    "numactl -H": NUMACTL,
    "kernel command line": CMDLINE,
    "lines of ACSCtl": ACS_LINES,
    "nvbandwidth text": NVBANDWIDTH,
    "p2pBandwidthLatencyTest text": P2P_TEST,
    "matrix of figures": UNTITLED,
}


@pytest.mark.parametrize("kind", TEXTS)
def test_every_kind_is_recognised(kind):
    assert recognise(TEXTS[kind]) == kind
    assert read_text(TEXTS[kind], "a file").sources == (f"{kind}: a file",)


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_that_is_cut_off_anywhere_is_read_or_refused(kind):
    text = TEXTS[kind]
    for length in range(0, len(text), 11):
        with contextlib.suppress(InvalidArgumentError):
            read_text(text[:length], "cut")


def test_topo_m():
    host = read_text(TOPO_M, "a file")
    assert [gpu.name for gpu in host.gpus] == ["GPU0", "GPU1", "GPU2"]
    assert host.driver_labels.get("GPU0", "GPU1") == "PIX"
    assert host.driver_labels.get("NIC0", "GPU2") == "PHB"
    assert [gpu.numa_node for gpu in host.gpus] == [0, 0, 1]
    assert host.gpus[0].cpus == "0-7,16-23"
    assert host.nodes is None
    assert host.gpus[0].uuid is None


def test_rows_that_are_missing_are_unknown():
    host = read_text(TOPO_M_CUT, "a file")
    assert len(host.gpus) == 3
    assert host.driver_labels.get("GPU2", "GPU0") is None
    assert host.driver_labels.get("GPU0", "GPU2") == "SYS"  # SOC, as it was called
    assert host.gpus[0].numa_node is None
    assert "GPU2" in host.remarks[0]


def test_two_matrices_in_one_paste():
    host = read_text(TOPO_M + "\n" + TOPO_P2P, "a file")
    assert host.driver_labels is not None
    status = {(pair.source, pair.target): pair.p2p["?"] for pair in host.pairs}
    assert status["GPU0", "GPU1"] == "OK"
    assert status["GPU2", "GPU0"] == "CNS"


def test_p2p_alone():
    host = read_text(TOPO_P2P, "a file")
    assert host.driver_labels is None
    assert len(host.pairs) == 6


def test_lspci():
    host = read_text(LSPCI, "a file")
    assert [gpu.address for gpu in host.gpus] == ["0000:03:00.0", "0000:04:00.0"]
    assert derived_matrix(host).cells == (("X", "PIX"), ("PIX", "X"))
    port = host.node("0000:02:01.0")
    assert (port.role, port.parent) == ("switch downstream", "0000:01:00.0")
    assert port.acs.enabled == ("SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd")
    gpu = host.node("0000:03:00.0")
    assert (gpu.link.speed_gts, gpu.link.max_speed_gts, gpu.link.width) == (2.5, 32.0, 16)
    assert [(bar.region, bar.nbytes) for bar in gpu.bars] == [(0, 64 << 20), (2, 128 << 30)]
    assert (gpu.vendor, gpu.device, gpu.numa_node) == ("10de", "2bb5", 1)
    assert gpu.aer.status == ("BadTLP",)
    assert host.node("0000:04:00.0").acs is None  # nothing of it is shown


def test_lspci_tree():
    host = read_text(LSPCI_TREE, "a file")
    assert [gpu.address for gpu in host.gpus] == ["0000:03:00.0", "0000:04:00.0", "0000:82:00.0"]
    assert host.node("0000:02:01.0").role == "switch downstream"
    assert host.node("0000:02:01.0").parent == "0000:01:00.0"
    labels = derived_matrix(host)
    assert labels.get("GPU0", "GPU1") == "PIX"
    assert labels.get("GPU0", "GPU2") is None  # no NUMA nodes in it


def test_a_damaged_tree_with_a_loop_ends():
    """Found by changing texts at random: a device that is below itself."""
    text = "-+-[0000:00]-+-01.0-[01]----00.0-[02]----00.0-[01]----00.0-[02]----00.0\n"
    host = read_text(text, "a file")
    assert all(host.path(node.address) for node in host.nodes)


def test_masks_and_ranges_have_a_limit():
    with pytest.raises(ValueError, match="is no range"):
        expand_ranges("0-9999999999")
    host = read_text(NCCL_XML.replace("00ff00ff", "f" * 100_000), "a file")
    assert host.system.numa[0].cpus is None
    host = read_text(NUMACTL.replace("0 1 4 5", "9999999999"), "a file")
    assert to_nccl_xml(host)


def test_nccl_xml():
    host = read_text(NCCL_XML, "a file")
    labels = derived_matrix(host)
    assert labels.get("GPU0", "GPU1") == "PIX"
    assert labels.get("GPU0", "GPU2") == "PXB"
    assert labels.get("GPU0", "GPU3") is None  # PHB or NODE
    assert labels.get("GPU0", "GPU4") == "SYS"
    assert host.node("0000:0a:00.0").link.max_speed_gts == 16.0
    assert host.node("0000:0a:00.0").link.speed_gts is None
    assert host.system.numa[0].cpus == "0-7,16-23"


def test_nccl_xml_without_gpus_names_none():
    host = read_text(
        '<system version="1"><cpu numaid="0"><pci busid="0:1:0.0"/></cpu></system>', "x"
    )
    assert host.gpus is None
    assert "which device is a GPU" in host.why("gpus")


@pytest.mark.parametrize(
    "text",
    [
        "<system><cpu numaid='0'><pci></cpu></system>",
        "<system version='1'/>",
        "<!DOCTYPE a [<!ENTITY b 'c'>]><system><cpu/></system>",
    ],
)
def test_nccl_xml_that_is_wrong(text):
    with pytest.raises(InvalidArgumentError, match="file=x"):
        read_text(text, "x")


def test_numactl():
    numa = read_text(NUMACTL, "a file").system.numa
    assert [(node.index, node.cpus, node.memory_nbytes) for node in numa] == [
        (0, "0-1,4-5", 100 << 20),
        (1, "2-3,6-7", 200 << 20),
    ]
    assert numa[0].distances == {"0": 10, "1": 32}


@pytest.mark.parametrize(
    ("options", "mode"),
    [("iommu=pt", "passthrough"), ("amd_iommu=off", "off"), ("intel_iommu=on", None), ("", None)],
)
def test_cmdline(options, mode):
    assert read_text(f"BOOT_IMAGE=/vmlinuz ro {options}", "x").system.iommu == mode


def test_acs_lines():
    host = read_text(ACS_LINES, "a file")
    assert [acs.enabled for acs in host.loose_acs] == [(), ("SrcValid", "ReqRedir")]
    assert host.nodes is None


def test_nvbandwidth():
    first, second = read_text(NVBANDWIDTH, "a file").measurements
    assert (first.unit, first.direction, first.p2p) == ("GB/s", "unidirectional", None)
    assert first.cells[0] == (0.0, 276.07)
    assert (second.rows, second.direction) == (("CPU",), "bidirectional")


def test_p2p_test():
    off, on, latency = read_text(P2P_TEST, "a file").measurements
    assert (off.p2p, off.access, off.unit) == (False, None, "GB/s")
    assert (on.p2p, on.access, on.direction) == (True, "write", "unidirectional")
    assert (latency.unit, latency.cells[1]) == ("us", (0.53, 1.32))


def test_figures_without_a_title_have_no_unit():
    (matrix,) = read_text(UNTITLED, "a file").measurements
    assert matrix.unit is None
    assert matrix.cells == ((None, 53.9), (53.8, None))


def test_escapes_and_comments_are_left_out():
    first, rest = TOPO_M.split("\n", 1)
    host = read_text(f"# a comment\n\x1b[4m{first}\x1b[0m\n{rest}", "a file")
    assert len(host.gpus) == 3


def test_views_of_one_host_are_put_together(tmp_path):
    for name, text in {"a": LSPCI, "b": NUMACTL, "c": CMDLINE, "d": UNTITLED}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "e").write_text("nothing that is known")
    host = from_path(tmp_path)
    assert len(host.sources) == 4
    assert host.system.iommu == "passthrough"
    assert host.nodes is not None
    assert host.measurements[0].rows == ("GPU0", "GPU1")
    assert any("matched by their order" in remark for remark in host.remarks)
    assert any("left out" in remark for remark in host.remarks)


def test_views_with_other_numbers_of_gpus_are_not_mixed(tmp_path):
    (tmp_path / "a").write_text(LSPCI)
    (tmp_path / "b").write_text(TOPO_M)
    host = from_path(tmp_path)
    assert len(host.gpus) == 2
    assert host.driver_labels is None
    assert any("has 3 GPUs and the rest 2" in remark for remark in host.remarks)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"\x7fELF\x00\x01\xff", "is binary"),
        (b"abc\x00def", "is binary"),
        (b"total 0\ndrwxr-xr-x 2 root root\n", "nothing that can be read"),
        (b"{", "is no JSON"),
        (b'{"format": "another tool 3"}', "format='another tool 3'"),
        (b"x" * (50 << 20), "is larger than"),
        (b"[" * 100_000, "nothing that can be read"),
        (b'{"a":' * 100_000, "no JSON"),
    ],
)
def test_wrong_files_are_refused_in_one_line(data, words, tmp_path):
    path = tmp_path / "wrong"
    path.write_bytes(data)
    with pytest.raises(InvalidArgumentError, match=words):
        read_file(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InvalidArgumentError, match="No such file"):
        read_file(tmp_path / "absent")

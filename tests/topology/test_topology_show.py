"""Text, page, chart, redaction and comparison."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import pytest
from fake_host import FakeHost, FakeNvml, Gpu, Root, Switch, nested, pairs_of_switches
from topology_texts import LSPCI, P2P_TEST, TOPO_M

from pcie_comm.errors import InvalidArgumentError
from pcie_comm.topology import codec
from pcie_comm.topology.collect import collect
from pcie_comm.topology.compare import differences
from pcie_comm.topology.labels import derived_matrix
from pcie_comm.topology.model import Gpu as GpuRecord
from pcie_comm.topology.model import expand_ranges, to_ranges
from pcie_comm.topology.nccl_export import to_nccl_xml
from pcie_comm.topology.readers import read_text
from pcie_comm.topology.redact import redact
from pcie_comm.topology.render import to_html, to_mermaid, to_text


@pytest.fixture
def host(tmp_path, monkeypatch):
    fake = FakeHost([Root([Switch([Gpu(mig=("MIG-abcd1234-1111",)), Gpu()]), Gpu()])])
    fake.write(tmp_path / "host")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{fake.gpus[1].uuid[:12]},{fake.gpus[0].uuid}")
    return collect(tmp_path / "host", FakeNvml(fake))


class Page(HTMLParser):
    """Tags of a page, and whether they close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_text_is_plain_and_has_tree_and_matrix(host):
    text = to_text(host)
    assert text.isascii()
    assert "`- 0000:01:00.0 switch upstream: 32 GT/s x16 now, at most 32 GT/s x16" in text
    assert "GPU0    X  PIX  PHB" in text
    assert "islands: GPU0 GPU1 | GPU2" in text
    assert "unknown: hostname" in to_text(read_text(LSPCI, "x"))


def test_text_flags_a_mismatch(tmp_path):
    fake = nested()
    fake.write(tmp_path)
    lied = FakeNvml(fake, levels={(0, 1): "SYS", (1, 0): "SYS"})
    assert "PIX!SYS" in to_text(collect(tmp_path, lied))


def test_page_is_well_formed_and_needs_nothing_from_outside(host):
    host = replace(host, measurements=read_text(P2P_TEST, "x").measurements)
    page = Page()
    text = to_html(host)
    page.feed(text)
    assert page.open == []
    names = [tag for tag, _ in page.tags]
    assert names.count("svg") == 2 + len(host.measurements)
    assert not {"script", "link", "img", "iframe"} & set(names)
    assert not any(key in ("href", "src") for _, facts in page.tags for key in facts)
    assert "http" not in text and "@import" not in text and "url(" not in text


def test_page_escapes_what_others_wrote(host):
    evil = "<script>alert(1)</script>"
    evil_host = replace(
        host,
        sources=(evil,),
        system=replace(host.system, hostname=evil, cpu=evil),
        gpus=tuple(replace(gpu, product=evil) for gpu in host.gpus),
    )
    assert "<script" not in to_html(evil_host)
    assert "<script" not in to_mermaid(evil_host)


def test_chart(host):
    chart = to_mermaid(host)
    assert chart.startswith("graph TD\n")
    assert "n0000_01_00_0 --> n0000_02_00_0" in chart


@pytest.mark.parametrize("text", [TOPO_M, P2P_TEST, LSPCI])
def test_hosts_that_are_partly_known_are_shown(text):
    host = read_text(text, "x")
    assert to_text(host)
    assert to_html(host)
    assert to_mermaid(host)
    assert to_nccl_xml(host)


def test_json_is_exact(host):
    assert codec.from_json(codec.to_json(host), "x") == host


def test_shipped_schema_is_that_of_the_code():
    shipped = resources.files("pcie_comm.topology") / "host.schema.json"
    assert json.loads(shipped.read_text()) == codec.schema()


def test_json_fits_the_schema(host):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(codec.to_json(host)), codec.schema())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("system"), "no 'system'"),
        (lambda d: d.update(surplus=1), "unknown field 'surplus'"),
        (lambda d: d["gpus"][0].update(nvml_index="0"), r"gpus\[0\].nvml_index is '0', wanted int"),
        (lambda d: d["gpus"][0].update(uuid=None), "None without a reason"),
        (lambda d: d.update(format="pcie_comm topology 9"), "wanted 'pcie_comm topology 1'"),
    ],
)
def test_json_that_is_wrong_is_refused(change, words, host):
    data = json.loads(codec.to_json(host))
    change(data)
    with pytest.raises(InvalidArgumentError, match=words):
        codec.from_json(json.dumps(data), "x")


def test_none_needs_a_reason():
    with pytest.raises(ValueError, match="None without a reason"):
        GpuRecord("GPU0")


def test_redaction(host, tmp_path):
    before = codec.to_json(host)
    after = codec.to_json(redact(host))
    for secret in ("fakehost-7", "98765", "GPU-0000", "MIG-abcd", "12345678-1234", str(tmp_path)):
        assert secret not in after
    assert "fakehost-7" in before and "GPU-0000" in before
    assert derived_matrix(redact(host)) == derived_matrix(host)
    assert redact(host).gpus[0].why("uuid") == "redacted"
    assert redact(redact(host)) == redact(host)


def test_redaction_of_other_views(tmp_path):
    (tmp_path / "secret-name").write_text(TOPO_M)
    host = read_text(TOPO_M, str(tmp_path / "secret-name"))
    assert "secret" not in to_text(redact(host))


def test_no_difference(host):
    assert differences(host, host) == []


def test_differences_name_the_fact(host):
    nodes = tuple(
        replace(node, link=replace(node.link, width=8)) if node.address == "0000:03:00.0" else node
        for node in host.nodes
    )
    after = replace(host, nodes=nodes, system=replace(host.system, iommu="off"))
    assert differences(host, after) == [
        "fingerprint differs in: iommu",
        "system.iommu: passthrough -> off",
        "nodes[0000:03:00.0].link.width: 16 -> 8",
    ]


def test_nccl_xml_keeps_switches(tmp_path):
    fake = pairs_of_switches()
    fake.write(tmp_path)
    host = collect(tmp_path, FakeNvml(fake))
    text = to_nccl_xml(host)
    again = derived_matrix(read_text(text, "x")).cells
    for row, wanted in zip(again, fake.matrix(), strict=True):
        for cell, label in zip(row, wanted, strict=True):
            assert cell == (None if label in ("PHB", "NODE") else label)
    first = next(ElementTree.fromstring(text).iter("pci"))
    assert first.get("link_speed") == "32.0 GT/s PCIe"
    assert re.search(r'affinity="0000[0-9a-f]{4}"', text)


def test_ranges():
    assert expand_ranges("0-2,8") == (0, 1, 2, 8)
    assert to_ranges((8, 0, 1, 2)) == "0-2,8"
    assert to_ranges(()) == ""

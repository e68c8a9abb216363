"""The commands: what they print, and how they end."""

from __future__ import annotations

import json

import pytest
from fake_host import FakeHost, FakeNvml, Gpu, Root, Switch, pairs_of_switches
from probed_hosts import probed
from topology_texts import LSPCI, P2P_TEST, TOPO_M
from typer.testing import CliRunner, Result

from pcie_comm import cli
from pcie_comm.topology import codec, commands
from pcie_comm.topology.collect import collect, from_sysfs
from pcie_comm.topology.readers import read_text


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def texts(tmp_path):
    for name, text in {"topo.txt": TOPO_M, "lspci.txt": LSPCI, "p2p.txt": P2P_TEST}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_topo(texts):
    result = invoke("topo", "--from", texts / "lspci.txt")
    assert result.exit_code == 0, result.output
    assert "GPU0    X  PIX" in result.output


def test_topo_of_this_host():
    assert invoke("topo").exit_code == 0


def test_json_goes_round(texts):
    result = invoke("topo", "--from", texts / "lspci.txt", "--json")
    path = texts / "report.json"
    path.write_text(result.stdout)
    assert codec.from_json(result.stdout, "x") == read_text(LSPCI, str(texts / "lspci.txt"))
    assert invoke("topo", "--from", path, "--json").stdout == result.stdout


def test_page_chart_and_xml(texts):
    page, xml = texts / "page.html", texts / "topo.xml"
    result = invoke("topo", "--from", texts / "lspci.txt", "--html", page, "--nccl-xml", xml)
    assert result.exit_code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert invoke("topo", "--from", xml).exit_code == 0
    assert invoke("topo", "--from", texts / "lspci.txt", "--mermaid").stdout.startswith("graph TD")


def test_redacted_json_has_no_path(texts):
    result = invoke("topo", "--from", texts / "lspci.txt", "--json", "--redact")
    assert str(texts) not in result.stdout


def test_diff(texts):
    same = invoke("topo", "diff", texts / "topo.txt", texts / "topo.txt")
    assert (same.exit_code, same.output.strip()) == (0, "no difference")
    other = texts / "other.txt"
    other.write_text(TOPO_M.replace("PIX", "NODE"))
    result = invoke("topo", "diff", texts / "topo.txt", other)
    assert result.exit_code == 1
    assert "driver_labels" in result.output


def test_doctor_exit_codes(texts, tmp_path):
    assert invoke("doctor", "--from", texts / "p2p.txt").exit_code == 0
    result = invoke("doctor", "--from", texts / "p2p.txt", "--strict")
    assert result.exit_code == 1
    assert "warning: slow-p2p" in result.output


def test_doctor_json(texts):
    data = json.loads(invoke("doctor", "--from", texts / "lspci.txt", "--json").stdout)
    assert {item["id"] for item in data["findings"]} >= {"acs-redirect", "link-errors"}
    assert {item["id"] for item in data["unjudged"]} >= {"mig", "stale-advice"}


def test_advise_and_stale_advice(tmp_path):
    top = pairs_of_switches().write(tmp_path / "host")
    path = tmp_path / "advice.json"
    result = invoke("advise", "--from", top, "--gpus", 4, "--out", path)
    assert result.exit_code == 0, result.output
    assert "order: GPU0 GPU1 GPU2 GPU3" in result.output
    assert invoke("doctor", "--from", top, "--advice", path).exit_code == 0
    other = FakeHost([Root([Switch([Gpu(), Gpu()])])]).write(tmp_path / "other")
    result = invoke("doctor", "--from", other, "--advice", path)
    assert result.exit_code == 1
    assert "error: stale-advice" in result.output
    assert from_sysfs(other).gpus is not None


WRONG = {
    "empty": b"",
    "truncated": b'{"format": "pcie_comm topology 1", "sour',
    "binary": bytes(range(256)),
    "another tool's": b"Filesystem 1K-blocks Used Available\n/dev/sda1 1 1 0\n",
    "50 MB": b"GPU0 X\n" * (50_000_000 // 7),
    "cut XML": b"<system version='1'><cpu numaid='0'>",
}


@pytest.mark.parametrize("command", ["topo", "doctor", "advise"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_end_in_one_line(command, name, tmp_path):
    path = tmp_path / "wrong"
    path.write_bytes(WRONG[name])
    result = invoke(command, "--from", path)
    assert result.exit_code == 2
    (line,) = result.output.strip().splitlines()
    assert line.startswith("pcie-comm: InvalidArgumentError: file=")


@pytest.mark.parametrize(
    "arguments",
    [
        ("topo", "--from", "/nowhere/at/all"),
        ("topo", "diff", "/nowhere", "/nowhere"),
        ("doctor", "--advice", "/nowhere"),
        ("topo", "--html", "/nowhere/page.html"),
    ],
)
def test_files_that_are_not_there_end_in_one_line(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1


def test_a_folder_without_anything(tmp_path):
    result = invoke("topo", "--from", tmp_path)
    assert result.exit_code == 2
    assert "no file that can be read" in result.output


def test_advise_without_gpus(tmp_path):
    top = FakeHost([Root([])]).write(tmp_path / "host")
    result = invoke("advise", "--from", top)
    assert result.exit_code == 2
    assert "there is none" in result.output


# ---- levels that need CUDA: what the program gives to the command


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Note which levels were asked for; the host is a made one, probed."""
    levels = []
    fake = pairs_of_switches()
    fake.write(tmp_path / "made")
    made = probed(collect(tmp_path / "made", FakeNvml(fake)))

    def probe(host, wanted):
        levels.append(wanted)
        return made

    monkeypatch.setattr(commands, "_probe", [probe])
    return levels


def test_levels_are_passed_on_and_their_report_is_read_again(asked, tmp_path):
    result = invoke("topo", "--verify", "--measure", "--quick", "--json", "--redact")
    assert result.exit_code == 0, result.output
    assert asked == [commands.Levels(verify=True, measure=True, quick=True)]
    path = tmp_path / "report.json"
    path.write_text(result.stdout)
    again = invoke("topo", "--from", path)
    assert "GPU0 -> GPU1" in again.output and "islands by traffic" in again.output
    assert invoke("topo", "diff", path, path).exit_code == 0
    assert "GPU-" not in result.stdout
    advice = invoke("advise", "--from", path)
    assert "islands by traffic: GPU0 GPU1 | " in advice.output
    assert "protocol in vram: tagged up to 8192 bytes" in advice.output
    judged = invoke("doctor", "--from", path, "--json")
    assert "data-fault" not in judged.stdout


def test_capability_alone(asked):
    assert invoke("topo", "--capability").exit_code == 0
    assert asked == [commands.Levels(capability=True)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--verify", "--from", "x"), "leave it out"), (("--quick",), "--quick needs")],
)
def test_options_that_do_not_go_together(asked, arguments, words):
    result = invoke("topo", *arguments)
    assert result.exit_code == 2
    assert words in result.output and len(result.output.strip().splitlines()) == 1
    assert asked == []


def test_without_a_gpu_verify_says_why():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = invoke("topo", "--verify")
    assert result.exit_code == 2
    assert "UnsupportedError: CUDA" in result.output

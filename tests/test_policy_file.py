"""`Config.policy_file`: read once per group, the same on all ranks, visible in describe()."""

from __future__ import annotations

import json

import pytest
from launcher import run_threads
from worlds import LIMIT_S, build_each, pair_of, small

from pcie_comm import CommError, Config, InvalidArgumentError, MismatchError, local_world
from pcie_comm.channel import Channel
from pcie_comm.crossovers import REPORT_FORMAT, Crossovers, Limits
from pcie_comm.kernels.collective import PlanInfo, TensorMeta
from pcie_comm.kernels.plan_checks import make_plan
from pcie_comm.kernels.registry import find
from pcie_comm.policy_file import load_crossovers


@pytest.fixture
def write(tmp_path):
    def write(name, tagged, push=None):
        content = {"format": REPORT_FORMAT, "correct": True}
        content["crossovers"] = {"vram": {"tagged_nbytes": tagged, "push_nbytes": push}}
        path = tmp_path / name
        path.write_text(json.dumps(content))
        return path

    return write


def test_without_a_file_the_defaults_hold():
    assert load_crossovers(None) == Crossovers()


def test_a_file_is_read(write):
    path = write("host.json", 1024, 4096)
    found = load_crossovers(path)
    assert (found.vram, found.source) == (Limits(1024, 4096), f"policy file {path}")


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe", b"[]"])
def test_a_file_that_is_missing_or_no_report_is_refused(tmp_path, content):
    path = tmp_path / "host.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"host\.json.*pcie-comm bench --out FILE"):
        load_crossovers(path)


def test_the_variable_names_the_file(write, monkeypatch):
    path = write("host.json", 1024)
    monkeypatch.setenv("PCIE_COMM_POLICY", str(path))
    assert Config().policy_file == path
    assert "policy_file" not in Config().contract()


def test_describe_says_what_a_group_goes_by(write):
    path = write("host.json", 1024, 4096)
    with local_world(2, "cpu", config=small(policy_file=path)) as world:
        world.run(lambda group: group.all_gather_pair(*pair_of(1.0)))
        facts = world.groups[0].describe()
    assert facts["crossovers"] == {
        "source": f"policy file {path}",
        "vram": [1024, 4096, None, None],
        "pinned": [163_840, None, 65_536, 262_144],
    }
    calls = facts["channel default"]["calls"]
    assert calls == {"all_gather_pair": ["push: on a CPU, push unless pull is asked for"]}


@pytest.mark.parametrize("names", [("a", "b"), ("a", None), (None, "b")])
def test_ranks_with_other_numbers_refuse_each_other(write, names):
    paths = [name and write(name, 1024 if name == "a" else 2048) for name in names]
    for error in build_each([{"config": small(policy_file=path)} for path in paths]):
        assert isinstance(error, MismatchError)
        assert "crossovers" in str(error)


def test_ranks_with_the_same_numbers_in_other_files_agree(write):
    paths = [write(name, 1024) for name in ("a", "b")]
    groups = build_each([{"config": small(policy_file=path)} for path in paths])
    sources = [group.describe()["crossovers"]["source"] for group in groups]
    run_threads(lambda rank: groups[rank].close(), 2, timeout_s=LIMIT_S)
    assert sources == [f"policy file {path}" for path in paths]


def test_a_bad_file_on_one_rank_fails_on_all(tmp_path):
    paths = [None, tmp_path / "missing.json"]
    for error in build_each([{"config": small(policy_file=path)} for path in paths]):
        assert isinstance(error, CommError)
        assert "missing.json" in str(error)
        assert "PCIE_COMM_POLICY" in str(error)


# --- what calls get ----------------------------------------------------------------------------

DOWN = TensorMeta((1, 448), "bfloat16", (448, 1), 2)
ROUTER = TensorMeta((1, 112), "float32", (112, 1), 4)
BIAS = TensorMeta((896,), "float32", (1,), 4)
HEADS = TensorMeta((1, 4, 96), "bfloat16", (384, 96, 1), 2)
CALLS = {
    "all_gather_pair": (DOWN, ROUTER),
    "all_gather_heads": (HEADS,),
    "all_gather_pair_kimi_topk": (DOWN, ROUTER, BIAS),
}


class NoEngine:
    """Stands in for the engine of a GPU."""

    broken = (0,)


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize(
    ("limits", "chosen"),
    [(Limits(1 << 20), "tagged"), (Limits(0), "push"), (Limits(0, 0), "pull")],
)
def test_every_operation_goes_by_the_limits_and_the_channel_says_so(op, limits, chosen):
    info = PlanInfo(0, 8, "auto", 1 << 20, 64, 16, limits=limits)
    plan = make_plan(find(op), info, CALLS[op])
    assert chosen in plan.kernel.variant
    channel = Channel("default", info, "cuda:0", NoEngine())
    channel._planned["a call"] = type("Call", (), {"plan": plan, "plans": [plan]})()
    (reason,) = channel.choices("host.json")[op]
    assert reason.startswith(f"{chosen}: receives ")
    assert "(host.json)" in reason

"""Machine code of the probes: memory order, bounded waits, no trap; for every architecture."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

from machine_code import Kind, caught, forbidden, report
from ptx_code import MEMORY, Ptx

from pcie_comm.build import WHEEL_ARCHS
from pcie_comm.kernels import compile as compiler
from pcie_comm.probe.kernels import PROBES

KEYS = [key for one in PROBES.values() for key in one.variants()]
ARCH = "sm_90a"
KIND = Kind(communicates=True, tagged=False, overlaps=False)
PLAIN = r"ld\.param\.\w+|st\.global\.(v4\.u32|u32|u64)|ld\.relaxed\.sys\.global\.v4\.u32"
HOPS = rf"{PLAIN}|ld\.relaxed\.sys\.global\.u64"
FLAGS = rf"{PLAIN}|st\.release\.sys\.global\.u64|ld\.acquire\.sys\.global\.u64"
UNITS = rf"{PLAIN}|(st|ld)\.relaxed\.sys\.global\.v2\.b64"
STAGE, COLLECT = r"st\.global\.v4", r"ld\.relaxed\.sys\.global\.v4"
RELEASE, POLL = r"st\.release\.", r"ld\.acquire\.|ld\.relaxed\.sys\.global\.v2"
TIMER = "%globaltimer"


def allowed(name: str) -> str:
    if name.startswith("probe_exchange"):
        return UNITS if name.endswith("tagged") else FLAGS
    return {"probe_ping_pong": FLAGS, "probe_chase": HOPS}.get(name, PLAIN)


def findings(name: str, text: str) -> list[str]:
    """Return everything that is wrong with a probe's PTX."""
    code = Ptx(text, KIND)
    opcodes = [one.opcode for one in code.statements]
    found = forbidden(opcodes, MEMORY, re.compile(allowed(name)))
    found += [f"ends the context: {one}" for one in opcodes if one in ("trap", "brkpt")]
    program = code.program

    def places(pattern: str) -> set[int]:
        return {at for at, one in enumerate(code.statements) if re.search(pattern, one.text)}

    barriers = {at for at, one in enumerate(code.statements) if one.is_barrier}
    timers = places(TIMER)
    for poll in places(POLL):
        around = program.reach(program.after([poll]))
        if poll in around and not (timers & program.leading_to(timers & around, {poll})):
            found.append("a wait without a look at the clock")
    for first, second in ((STAGE, RELEASE), (r"ld\.acquire\.", COLLECT)):
        early = program.reach(program.after(places(first)), barriers) & places(second)
        found += program.named({f"no barrier between {first} and this": early})
    return found


@pytest.fixture(scope="module")
def kernels():
    return {str(key): compiler.build(PROBES[key.op], key, ARCH) for key in KEYS}


@pytest.mark.parametrize("name", [str(key) for key in KEYS])
def test_rules(name, kernels):
    assert findings(name, kernels[name].ptx) == []


def test_the_rules_see_what_they_are_about(kernels):
    """Negative control: each rule finds its fault in code that was spoilt on purpose."""
    push, tagged = (kernels[f"probe_exchange-{name}"].ptx for name in ("push", "tagged"))
    weak = push.replace("st.release.sys", "st.relaxed.sys")
    assert caught("forbidden instruction: st.relaxed.sys", findings("probe_exchange-push", weak))
    weak = push.replace("ld.acquire.sys", "ld.relaxed.sys")
    assert caught("forbidden instruction: ld.relaxed.sys", findings("probe_exchange-push", weak))
    open_ended = push.replace("mov.u64 %rd23, %globaltimer;", "").replace(
        "mov.u64 %rd15, %globaltimer;", ""
    )
    assert open_ended != push
    assert caught("without a look at the clock", findings("probe_exchange-push", open_ended))
    bare = re.sub(r"barrier\.cta\.red\.and\.aligned\.pred q, 0, p;", "mov.pred q, p;", push)
    assert caught("no barrier between st", findings("probe_exchange-push", bare))
    assert caught("no barrier between ld", findings("probe_exchange-push", bare))
    timeless = re.sub(r"mov\.u64 %rd\d+, %globaltimer;", "", tagged)
    assert caught("without a look at the clock", findings("probe_exchange-tagged", timeless))
    halves = tagged.replace("st.relaxed.sys.global.v2.b64", "st.relaxed.sys.global.v4.u32")
    assert caught("forbidden instruction", findings("probe_exchange-tagged", halves))


def test_each_protocol_moves_its_payload_in_its_own_way(kernels):
    def count(name: str, pattern: str) -> int:
        return len(re.findall(pattern, kernels[f"probe_exchange-{name}"].ptx))

    for name in ("pull", "push"):
        assert count(name, STAGE) and count(name, COLLECT) and count(name, RELEASE)
    assert count("tagged", r"st\.relaxed\.sys\.global\.v2\.b64") == 1
    assert count("tagged", RELEASE) == count("tagged", r"ld\.acquire") == 0
    assert kernels["probe_exchange-pull"].ptx != kernels["probe_exchange-push"].ptx


@pytest.mark.parametrize("arch", WHEEL_ARCHS)
def test_every_architecture_without_spills(arch, cuobjdump):
    for key in KEYS:
        kernel = compiler.build(PROBES[key.op], key, arch)
        code = report.MachineCode(kernel, report.dump(kernel.cubin, cuobjdump))
        assert code.numbers()[1:4] == [0, 0, 0], (key, arch)


def test_a_changed_device_file_makes_them_stale(monkeypatch, tmp_path):
    probe = PROBES["probe_fill"]
    before = compiler.fingerprint(probe)
    edited = tmp_path / "device.py"
    edited.write_text("# other code")
    monkeypatch.setattr(type(probe), "device_sources", (edited,))
    assert compiler.fingerprint(probe) != before

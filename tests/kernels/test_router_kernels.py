"""Machine code of routers other than Kimi K3's: they keep the same rules, on every architecture.

`test_machine_code` sees to what is built ahead of time; these kernels are compiled when needed.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="compiles kernels")

from machine_code import Kind, report
from ptx_code import Ptx
from sass_code import Sass, usage_findings

from pcie_comm import policy
from pcie_comm.calls import fused_collective, router_collective
from pcie_comm.kernels import compile as compiler
from pcie_comm.kernels.collective import Collective, KernelKey
from pcie_comm.kernels.router import is_wide
from pcie_comm.kernels.router_presets import PRESETS
from pcie_comm.kernels.router_spec import RouterSpec
from pcie_comm.layout import align_up

REGISTERS_PER_UNIT = 65_536
LARGEST = RouterSpec(1024, 32, score="softmax", groups=16, topk_groups=8)
WIDE = RouterSpec(960, 8, score="sqrtsoftplus", scale=2.0)
ARCHS = ("sm_80", "sm_90a", "sm_120a")


def findings(plugin: Collective, key: KernelKey, arch: str, cuobjdump: str) -> list[str]:
    kernel = compiler.build(plugin, key, arch)
    kind = Kind.of(str(key), arch)
    made = report.MachineCode(kernel, report.dump(kernel.cubin, cuobjdump))
    usage = report.resources(made.dump)
    found = Ptx(kernel.ptx, kind).findings() + Sass(made.code, kind).findings()
    found += usage_findings(usage)
    held = align_up(usage["REG"], 8) * kernel.block * policy.BLOCKS_PER_UNIT
    if kind.communicates and plugin.spec != LARGEST and held > REGISTERS_PER_UNIT:
        found.append(f"{usage['REG']} registers")
    return found


def keys_of(plugin: Collective) -> list[KernelKey]:
    """One kernel per protocol, that of the widest pack."""
    widest = ("push", 16), ("pull", 16), ("tagged", 8)
    return [key for key in plugin.variants() if key.variant[:2] in widest or len(key.variant) == 1]


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"kimi-k3"}))
def test_stand_alone_kernels_keep_the_rules(name, cuobjdump):
    plugin = router_collective(PRESETS[name])
    for key in plugin.variants():
        assert findings(plugin, key, "sm_90a", cuobjdump) == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "spec", [PRESETS["deepseek-v3"], LARGEST, WIDE], ids=["v3", "most", "wide"]
)
def test_old_and_new_architectures_keep_the_rules(spec, arch, cuobjdump):
    assert is_wide(spec) == (spec == WIDE)
    for plugin in (router_collective(spec), fused_collective(spec)):
        for key in keys_of(plugin):
            assert findings(plugin, key, arch, cuobjdump) == []


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss-20b", "deepseek-v4-pro"])
def test_fused_kernels_keep_the_rules(name, cuobjdump):
    plugin = fused_collective(PRESETS[name])
    for key in keys_of(plugin):
        assert findings(plugin, key, "sm_90a", cuobjdump) == []

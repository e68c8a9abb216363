"""Runs every kernel once or more at world size 1; compute-sanitizer watches it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), "."]

import harness
import torch

from pcie_comm import KIMI_K3, Config, kimi_topk16, local_world


def main() -> None:
    torch.cuda.init()
    bias = torch.randn(896, device="cuda")
    for spec in (KIMI_K3, harness.VLLM):
        kimi_topk16(torch.randn(3, 896, device="cuda"), bias, spec=spec)
    for protocol in ("push", "pull", "tagged"):
        with local_world(1, harness.DEVICE, config=Config(protocol=protocol)) as world:
            for width, start in ((224, 0), (222, 2), (221, 1)):  # packs of 16, 4 and 1 byte
                first = torch.randn(9, width + 2, device="cuda").bfloat16()
                first = first.view(-1)[start : start + 9 * width].view(9, width)
                heads = torch.randn(9, 2, width // 2 * 2, device="cuda").bfloat16()
                down = torch.randn(9, 3584 + 8, device="cuda").bfloat16().view(-1)
                down = down[start : start + 9 * 3584].view(9, 3584)
                router = torch.randn(9, 896, device="cuda")
                for spec in (KIMI_K3, harness.VLLM):
                    world.run(
                        lambda g, d=down, r=router, s=spec: g.all_gather_pair_kimi_topk(
                            d, r, bias, spec=s
                        )
                    )
                world.run(lambda g, f=first, r=router: g.all_gather_pair(f, r))
                world.run(lambda g, f=first: g.all_gather_pair(f, f[:, :64]))
                world.run(lambda g, h=heads: g.all_gather_heads(h))
            kernels = sorted(world.groups[0].describe()["kernels"])
            print(protocol, len(kernels), kernels)
    torch.cuda.synchronize()


main()

"""The decoder example on a GPU: equal tokens at every number of ranks, under CUDA graphs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

ROOT = Path(__file__).resolve().parents[2]


def decode(ranks: str, tokens: int, *options: str) -> list[str]:
    """Run the example; return what it printed."""
    command = [sys.executable, "examples/decode/decode.py", "--device", "cuda:0", *options]
    command += ["--ranks", ranks, "--tokens", str(tokens)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = re.findall(r"ranks=(\d): .*equal streams: (\w+)", done.stdout)
    assert found == [(rank, "True") for rank in ranks.split(",")]
    return done.stdout.splitlines()


def test_512_tokens_are_the_same_at_every_number_of_ranks(figures):
    figures(lines=decode("1,2,4,8", 512))


def test_tokens_beside_torch_distributed_are_the_same(figures):
    figures(lines=decode("1,2", 64, "--beside"))

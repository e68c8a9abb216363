"""The decoder example on a GPU: equal tokens at every number of ranks, under CUDA graphs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

ROOT = Path(__file__).resolve().parents[2]


def test_512_tokens_are_the_same_at_every_number_of_ranks(figures):
    command = [sys.executable, "examples/decode/decode.py", "--device", "cuda:0"]
    command += ["--ranks", "1,2,4,8", "--tokens", "512", "--beside"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    figures(lines=done.stdout.splitlines())
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = re.findall(r"ranks=(\d): .*equal streams: (\w+)", done.stdout)
    assert found == [(ranks, "True") for ranks in "1248"]

"""The examples run, and say what their texts say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_example(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess:
    command = [sys.executable, "examples/decode/decode.py", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_the_decoder_says_the_same_with_one_rank_two_and_torch_distributed():
    done = run_example("--ranks", "1,2", "--tokens", "5", "--sequences", "2", "--beside")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"ranks=(\d): .*equal streams: (\w+)", done.stdout) == [
        ("1", "True"),
        ("2", "True"),
    ]
    assert "torch.distributed: " in done.stdout


def test_control_other_weights_decode_other_tokens():
    """A comparison of streams that cannot fail would say nothing."""
    code = (
        "import sys; sys.path.insert(0, 'examples/decode'); import torch, decode, model\n"
        "torch.set_num_threads(1)\n"
        "usual = model.Decoder.__init__\n"
        "def seeded(self, *rest, **named): usual(self, *rest, **named, seed=rest[2])\n"
        "model.Decoder.__init__ = seeded\n"  # the world size as the seed
        "sys.exit(decode.main(['--ranks', '1,2', '--tokens', '5', '--sequences', '1']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "different tokens" in done.stdout

"""compute-sanitizer over every kernel at world size 1."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

SCRIPT = Path(__file__).with_name("single_rank.py")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_are_clean(tool, figures):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--kernel-name", "kernel_substring=kernel_cutlass"]
    command += ["--report-api-errors", "no"]  # bindings probe for functions the driver lacks
    done = subprocess.run(
        [*command, sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    output = done.stdout + done.stderr
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", output)
    figures(
        tool=tool, summary=summary, kernels=re.findall(r"^(?:push|pull|tagged) \d+", output, re.M)
    )
    assert done.returncode == 0, output[-3000:]
    assert summary, output[-3000:]
    assert re.search(r"SUMMARY: 0 (errors|hazards)", summary[-1]), output[-3000:]

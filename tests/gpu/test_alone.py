"""What may leave torch or a context unusable, each scene of alone.py in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]

SCRIPT = Path(__file__).with_name("alone.py")
LIMIT_S = 60.0


SCENES = (
    ("nested_blocks",),
    ("nested_captures",),
    ("ends_with_everything_alive", "cuda_local"),
    ("ends_with_everything_alive", "host_pinned"),
)


def played(*scene: str) -> dict:
    """Play a scene; it ends by itself, in time, with exit code 0. Return what it printed last."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *scene],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    return {**told, "scene": scene, "seconds": round(time.monotonic() - started, 2)}


@pytest.fixture(scope="module")
def play():
    """Start all scenes at once; return a function that waits for one of them."""
    with ThreadPoolExecutor(len(SCENES)) as pool:
        futures = {scene: pool.submit(played, *scene) for scene in SCENES}
        yield lambda *scene: futures[scene].result()


def test_a_capture_inside_a_capture_is_refused_by_torch_and_breaks_no_rank(play, figures):
    """torch.cuda.graph waits for the device first, which nobody may while a stream captures."""
    told = play("nested_blocks")
    figures(**told)
    assert told["error"]
    assert told["wrong"] == 0


def test_captures_that_overlap_in_time_are_right_or_refused(play, figures):
    told = play("nested_captures")
    figures(**told)
    assert told["wrong"] == 0


@pytest.mark.parametrize("transport", ["cuda_local", "host_pinned"])
def test_b18_a_process_ends_with_everything_alive(transport, play, figures):
    """Groups, channels, graphs, and a replay that waits for a rank which does not come."""
    told = play("ends_with_everything_alive", transport)
    figures(**told)
    assert told["wrong"] == 0
    assert list(Path("/dev/shm").glob(f"pcie_comm.{told['pid']}.*")) == []

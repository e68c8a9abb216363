"""Runs one command in a process group of its own, which is ended when its time is up."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = "OUT"
"""In a command: the file that it writes."""

GRACE_S = 5.0
"""Between the request to end and the end."""

TAIL = 2000
"""Characters of what a failed command said that go into the report."""

PATH = re.compile(r"(?<![\w.])/(?:[\w.+@~-]+/)+([\w.+@~-]+)")
HOST = socket.gethostname() or "localhost"
UUID = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F-]{8,}")


@dataclass(frozen=True)
class Outcome:
    """What became of a command.

    Attributes:
        exit_code: None if it had to be ended.
        seconds: That it ran.
        written, printed: The file that it wrote, and its standard output.
        said: The end of what it said on standard error, without paths.
    """

    exit_code: int | None
    seconds: float
    written: str
    printed: str
    said: str


def clean(value: Any) -> Any:
    """Return plain values without paths, host names and UUIDs of this machine in their texts."""
    if isinstance(value, str):
        text = PATH.sub(r"\1", value.replace(f"{ROOT}/", ""))
        return UUID.sub(r"\1", re.sub(rf"\b{re.escape(HOST)}\b", "this-host", text))
    if isinstance(value, Mapping):
        return {clean(name): clean(one) for name, one in value.items()}
    return [clean(one) for one in value] if isinstance(value, (list, tuple)) else value


def run(command: Sequence[str], limit_s: float, environment: Mapping[str, str]) -> Outcome:
    """Run a command to its end, or to that of its time. Nothing it started outlives this."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        paths = [Path(folder, name) for name in ("figures.json", "stdout", "stderr")]
        parts = [str(paths[0]) if part == OUT else part for part in command]
        parts[0] = sys.executable if parts[0] == "python" else parts[0]
        started = time.monotonic()
        with paths[1].open("wb") as printed, paths[2].open("wb") as said:
            process = subprocess.Popen(
                parts,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": _search_path(), "TMPDIR": folder, **environment},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=said,
                start_new_session=True,
            )
            code = _wait(process, limit_s)
        seconds = round(time.monotonic() - started, 2)
        written, out, err = (_text(path) for path in paths)
        return Outcome(code, seconds, written, out, clean(err[-TAIL:]))


def _search_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Wait for a process; end its group. None if it did not end in time."""
    code = None
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        _signal(process, signal.SIGKILL)  # whoever is left of its group
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)  # a process that the driver holds does not end: leave it
    return code


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)

"""Runs one snippet in several processes at once, as torchrun would, but lets survivors live.

Usage: python snippet_ranks.py FILE RANKS SETTING
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from launcher import free_port  # noqa: E402 - a script: it finds its modules first
from snippet_settings import SETTINGS  # noqa: E402


def play(rank: int, ranks: int, port: int, code: str) -> None:
    """Be one rank; does not return."""
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    try:
        exec(compile(code, sys.argv[1], "exec"), {"__name__": "__main__"})
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def main() -> int:
    """Fork the ranks and compare their exit codes. Returns the exit code."""
    file, ranks, setting = Path(sys.argv[1]), int(sys.argv[2]), SETTINGS[sys.argv[3]]
    code = setting.before + file.read_text(encoding="utf-8") + "\n" + setting.after
    port = free_port()
    import torch  # once, before the forks

    torch.set_num_threads(1)
    children = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            play(rank, ranks, port, code)
        children[pid] = rank
    codes = {}
    while children:
        pid, status = os.wait()
        codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
    wanted = {rank: setting.exits.get(rank, 0) for rank in range(ranks)}
    print(f"exit codes: {dict(sorted(codes.items()))}, wanted {wanted}")
    return 0 if codes == wanted else 1


if __name__ == "__main__":
    sys.exit(main())

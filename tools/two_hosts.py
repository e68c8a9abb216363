"""Runs a group over two hosts that are network namespaces of this machine; checks and times it.

Each host has a network of its own, joined by one veth pair, a /dev/shm of its own, and a boot id of
its own, mounted over the kernel's. So nothing in the library is told to see two hosts: it finds
them. Needs root (`ip netns`, `unshare --mount`).

Usage: python tools/two_hosts.py --hosts aabb --out build/two_hosts.json
       python tools/two_hosts.py --hosts aab --delay-us 50 --calls 500
       python tools/two_hosts.py --hosts abb --fault kill --victim 2

`--hosts aab` puts ranks 0 and 1 on host a, rank 2 on host b. The report holds every rank's digest
of all collectives, beside that of a group on one host, and microseconds per call, split into the
part across hosts and the part inside; or, with `--fault`, the error of every rank that lives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PORT = 29511
INTERFACE = "veth"
NETWORK = "10.199.77"

INSIDE = (
    "mount -t tmpfs tmpfs /dev/shm"
    ' && mount --bind "$1" /proc/sys/kernel/random/boot_id'
    ' && shift && exec "$@"'
)


class UnavailableError(RuntimeError):
    """This machine does not let us make such hosts."""


def _ip(*command: str) -> None:
    done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"ip {' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_networks(delay_us: int = 0) -> Iterator[dict[str, str]]:
    """Make two network namespaces that reach each other; return their names by host.

    Args:
        delay_us: Time that a packet takes from one to the other, besides its own.

    Raises:
        UnavailableError: No right, or no tool, to do it.
    """
    names = {host: f"pcie-comm-{os.getpid()}-{host}" for host in "ab"}
    made = []
    try:
        for name in names.values():
            _ip("netns", "add", name)
            made.append(name)
        first, second = names.values()
        pair = ("type", "veth", "peer", "name", INTERFACE, "netns", second)
        _ip("-n", first, "link", "add", INTERFACE, *pair)
        for number, name in enumerate(names.values(), 1):
            _ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", INTERFACE)
            for link in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", link, "up")
            if delay_us:
                _delay(name, delay_us)
        yield names
    except FileNotFoundError as error:
        raise UnavailableError(str(error)) from error
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _delay(name: str, delay_us: int) -> None:
    rule = ["tc", "qdisc", "add", "dev", INTERFACE, "root", "netem", "delay", f"{delay_us}us"]
    done = subprocess.run(
        ["ip", "netns", "exec", name, *rule], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UnavailableError(f"{' '.join(rule)}: {done.stderr.strip()}")


def run(
    hosts: str, arguments: Sequence[str], limit_s: float = 110.0, delay_us: int = 0
) -> list[dict[str, Any]]:
    """Run one process per rank, each on its host; return what each reports.

    Args:
        hosts: Per rank, `a` or `b`.
        arguments: Of tools/two_hosts_rank.py.
        limit_s: Longest time for all of it; who still runs then is killed.
        delay_us: As for two_networks.

    Raises:
        UnavailableError: As for two_networks.
    """
    with two_networks(delay_us) as networks, tempfile.TemporaryDirectory() as folder:
        processes = []
        try:
            for host in "ab":
                (Path(folder) / host).write_text(f"{uuid.uuid4()}\n")
                ranks = [str(rank) for rank, name in enumerate(hosts) if name == host]
                command = [
                    *("ip", "netns", "exec", networks[host]),
                    *("unshare", "--mount", "sh", "-c", INSIDE, "sh", f"{folder}/{host}"),
                    *(sys.executable, str(ROOT / "tools/two_hosts_rank.py"), folder),
                    *(",".join(ranks), *arguments),
                ]
                environment = {
                    **os.environ,
                    "WORLD_SIZE": str(len(hosts)),
                    "MASTER_ADDR": f"{NETWORK}.{'ab'.index(hosts[0]) + 1}",
                    "MASTER_PORT": str(PORT),
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    "PYTHONPATH": str(ROOT),
                }
                processes.append(subprocess.Popen(command, env=environment, cwd=ROOT))
            deadline = time.monotonic() + limit_s
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        reports = [Path(folder) / f"rank{rank}.json" for rank in range(len(hosts))]
        return [json.loads(p.read_text()) if p.exists() else {"silent": True} for p in reports]


def table(reports: Sequence[dict[str, Any]]) -> str:
    """Return rank 0's times as text."""
    lines = ["way       op                          rows     us  across  inside"]
    for row in reports[0].get("times", ()):
        lines.append(
            f"{row['way']:9} {row['op']:26} {row['rows']:5} {row['us']:6.0f} "
            f"{row['across_us']:7.0f} {row['inside_us']:7.0f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run it; return 0 if all ranks had the bytes of one host, or if survivors had an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", default="aabb", help="per rank, a or b")
    parser.add_argument("--calls", type=int, default=200, help="calls per figure")
    parser.add_argument("--delay-us", type=int, default=0, help="of a packet between the hosts")
    parser.add_argument("--fault", choices=("kill", "stop", "abort"), help="what happens to a rank")
    parser.add_argument("--victim", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "two_hosts.json")
    options = parser.parse_args()
    if set(options.hosts) != {"a", "b"}:
        parser.error("--hosts: give a and b, both")
    arguments = ["--calls", str(options.calls)]
    if options.fault:
        arguments = ["--fault", options.fault, "--victim", str(options.victim)]
    try:
        reports = run(options.hosts, arguments, delay_us=options.delay_us)
    except UnavailableError as error:
        print(f"two hosts cannot be made here: {error}")
        return 2
    whole = {
        "command": " ".join(sys.argv),
        "hosts": options.hosts,
        "delay_us": options.delay_us,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "ranks": reports,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(whole, indent=1))
    if options.fault:
        living = [r for rank, r in enumerate(reports) if rank != options.victim]
        print(json.dumps(living, indent=1))
        return int(not all("error" in report for report in living))
    print(table(reports))
    equal = [report.get("digest") == reports[0].get("one_host") for report in reports]
    print(f"bytes equal to one host: {sum(equal)} of {len(equal)} ranks; report: {options.out}")
    return int(not all(equal))


if __name__ == "__main__":
    sys.exit(main())

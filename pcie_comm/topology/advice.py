"""Advice for groups on a host: islands, order, best GPUs, vetoes; and the file that holds it.

`Config.advice` names such a file. It holds for the machine whose fingerprint is in it: on another,
or after a change, it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..crossovers import from_limits
from ..errors import InvalidArgumentError
from .fingerprint import changed_parts, fingerprint
from .labels import islands
from .model import Host, Pair
from .ordering import best_order, best_subset
from .probed import HOST
from .traffic import bad_checks, crossovers, slower_than_host, traffic_islands

FORMAT = "pcie_comm advice 1"
REMEDY = "write it again with `pcie-comm advise --out FILE`"


@dataclass(frozen=True)
class Veto:
    """A pair that must not use peer access.

    Attributes:
        source: GPU that would read or write; by UUID if that is known, else by name.
        target: GPU whose memory it would be; likewise.
        reason: In words.
    """

    source: str
    target: str
    reason: str


@dataclass(frozen=True)
class Advice:
    """What follows from a host for groups on it.

    Attributes:
        fingerprint: Of the machine, by part.
        islands: GPUs that reach each other without a host bridge, by UUID if known.
        traffic_islands: GPUs that are near by what was measured; None if nothing was.
        order: All GPUs of the advice, mates side by side; likewise.
        visible_devices: Value for CUDA_VISIBLE_DEVICES that makes it the order of CUDA; None if a
            UUID is not known.
        vetoes: Pairs without usable peer access.
        crossovers: Up to which size which protocol is the fastest, by memory, as a report of the
            benchmark has them; None if it was not measured.
        source: Name of the file.
    """

    fingerprint: Mapping[str, str | None]
    islands: tuple[tuple[str, ...], ...]
    traffic_islands: tuple[tuple[str, ...], ...] | None
    order: tuple[str, ...]
    visible_devices: str | None
    vetoes: tuple[Veto, ...]
    crossovers: Mapping[str, Mapping[str, int | None]] | None = None
    source: str = "this host"

    def changed_parts(self, host: Host) -> tuple[str, ...]:
        """Return the parts of the fingerprint in which a host differs, none if it fits."""
        return changed_parts(self.fingerprint, fingerprint(host))

    def vetoed(self, source: str, target: str) -> str | None:
        """Return why a GPU, by UUID, must not address another's memory; None if it may."""
        found = (veto for veto in self.vetoes if (veto.source, veto.target) == (source, target))
        return next((veto.reason for veto in found), None)

    def veto_among(self, devices: Iterable[str]) -> str | None:
        """Return why GPUs must not use peer access with each other; None if they may.

        Args:
            devices: UUIDs as CUDA has them, 32 hexadecimal digits.
        """
        present = set(devices)
        for veto in self.vetoes:
            if {_digits(veto.source), _digits(veto.target)} <= present:
                return f"{self.source} vetoes {veto.source} -> {veto.target}: {veto.reason}"
        return None

    def to_json(self) -> str:
        """Return the file's text."""
        data: dict[str, Any] = {"format": FORMAT}
        for item in fields(self):
            if item.name != "source":
                data[item.name] = getattr(self, item.name)
        data["vetoes"] = [veto.__dict__ for veto in self.vetoes]
        return json.dumps(data, indent=1) + "\n"


def _digits(uuid: str) -> str:
    return uuid.removeprefix("GPU-").replace("-", "").lower()


def advise(host: Host, count: int | None = None) -> Advice:
    """Return the advice for a host.

    Args:
        host: What is known of it.
        count: How many GPUs the group has; None for all of them.

    Raises:
        InvalidArgumentError: No GPU is known, or not so many.
    """
    gpus = host.gpus or ()
    if not gpus:
        reason = host.why("gpus") or "there is none"
        raise InvalidArgumentError(f"advice needs GPUs: {reason}")
    if count is not None and not 1 <= count <= len(gpus):
        raise InvalidArgumentError(f"gpus={count} is not 1 to {len(gpus)}, what this host has")
    refused = _refused(host)
    order = best_order(host) if count is None else best_subset(host, count, set(refused))
    names = {gpu.name: gpu.uuid or gpu.name for gpu in gpus}
    known = all(gpu.uuid for gpu in gpus if gpu.name in order)
    near = traffic_islands(host)

    def named(groups: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(names[name] for name in group) for group in groups)

    return Advice(
        fingerprint=fingerprint(host),
        islands=named(islands(host)),
        traffic_islands=None if near is None else named(near),
        order=tuple(names[name] for name in order),
        visible_devices=",".join(names[name] for name in order) if known else None,
        vetoes=tuple(Veto(names[s], names[t], reason) for (s, t), reason in refused.items()),
        crossovers=crossovers(host),
    )


def _refused(host: Host) -> dict[tuple[str, str], str]:
    """Return the ordered pairs without usable peer access, with the reason.

    A pair that is bad in one direction is refused in both.
    """
    found: dict[tuple[str, str], str] = {}
    for (source, target), checks in bad_checks(host).items():
        if target != HOST:
            first = checks[0]
            found[source, target] = f"{first.name}: {first.verdict}, {first.detail}"
    for pair in host.pairs or ():
        if reason := _refusal(pair):
            found.setdefault((pair.source, pair.target), reason)
    for ends, figures in slower_than_host(host).items():
        found.setdefault(ends, figures)
    back = {(t, s): f"{reason} in the other direction" for (s, t), reason in found.items()}
    return {**back, **found}


def _refusal(pair: Pair) -> str:
    if pair.cuda_access is False:
        return "CUDA says that it cannot access the peer"
    for kind, status in sorted((pair.p2p or {}).items()):
        if kind in ("read", "write", "?") and status != "OK":
            return f"the driver's P2P status is {status}"
    return ""


def read_advice(path: Path) -> Advice:
    """Read an advice file, whatever machine it is for.

    Raises:
        InvalidArgumentError: The file cannot be read, or is no advice.
    """
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"advice={path} cannot be read ({error}); {REMEDY}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise InvalidArgumentError(f"advice={path} has format={found!r}, not {FORMAT!r}; {REMEDY}")
    try:
        return _built(data, str(path))
    except InvalidArgumentError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"advice={path} is damaged ({error!r}); {REMEDY}") from error


def _built(data: dict[str, Any], source: str) -> Advice:
    if not isinstance(data["fingerprint"], dict):
        raise ValueError("fingerprint is no object")
    line = data["visible_devices"]
    parts = data["fingerprint"].items()
    vetoes = data["vetoes"]
    near, limits = data.get("traffic_islands"), data.get("crossovers")
    if limits is not None:
        if not isinstance(limits, dict):
            raise ValueError("crossovers is no object")
        from_limits(limits, source)
    return Advice(
        fingerprint={str(part): None if at is None else str(at) for part, at in parts},
        islands=tuple(tuple(map(str, group)) for group in data["islands"]),
        traffic_islands=None if near is None else tuple(tuple(map(str, some)) for some in near),
        order=tuple(map(str, data["order"])),
        visible_devices=None if line is None else str(line),
        vetoes=tuple(Veto(str(v["source"]), str(v["target"]), str(v["reason"])) for v in vetoes),
        crossovers=limits,
        source=source,
    )


def load_advice(path: Path, host: Host) -> Advice:
    """Read an advice file for a machine.

    Raises:
        InvalidArgumentError: It cannot be read, or is for another machine or an earlier state of
            this one; the message names the parts that changed.
    """
    advice = read_advice(path)
    if changed := advice.changed_parts(host):
        raise InvalidArgumentError(
            f"advice={path} does not fit this machine, changed={', '.join(changed)}; {REMEDY}"
        )
    return advice

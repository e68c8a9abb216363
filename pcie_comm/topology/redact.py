"""Takes out of a host what identifies its owner: UUIDs, serial numbers, host and file names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from . import codec
from .model import Host

MARK = "redacted"
_UUID = re.compile(
    r"(?:GPU|MIG)-[0-9a-f][\w/-]*"
    r"|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    re.IGNORECASE,
)
_PATH = re.compile(r"(?<![\w.])/(?:[^\s,;:)'\"]+/)*[^\s,;:)'\"]+")
FREE_TEXT = (
    "cmdline",
    "detail",
    "environment",
    "reason",
    "remarks",
    "sources",
    "title",
    "unknown",
)
"""Fields whose text others wrote, or that quotes it."""


def redact(host: Host) -> Host:
    """Return a host without UUIDs, serial numbers, host name and file names.

    What was taken out is None with a reason. PCI addresses, products and versions stay.
    """
    system = host.system
    secrets = [system.hostname, *(gpu.serial for gpu in host.gpus or ())]
    patterns = [_exactly(secret) for secret in secrets if secret]
    gpus = host.gpus
    if gpus is not None:
        gpus = tuple(
            replace(
                gpu,
                uuid=None,
                serial=None,
                mig_uuids=None,
                unknown={
                    **gpu.unknown,
                    "uuid": gpu.why("uuid") or MARK,
                    "serial": gpu.why("serial") or MARK,
                    "mig_uuids": gpu.why("mig_uuids") or MARK,
                },
            )
            for gpu in gpus
        )
    nameless = {**system.unknown, "hostname": system.why("hostname") or MARK}
    bare = replace(host, gpus=gpus, system=replace(system, hostname=None, unknown=nameless))
    data = _cleaned(codec.plain(bare), patterns, free=False)
    data["sources"] = [source.split(":", 1)[0] for source in host.sources]
    return codec.from_json(json.dumps(data), MARK)


def _exactly(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-]){re.escape(text)}(?![\w-])", re.IGNORECASE)


def _cleaned(value: Any, secrets: list[re.Pattern[str]], free: bool) -> Any:
    if isinstance(value, dict):
        return {
            key: _cleaned(item, secrets, free or key in FREE_TEXT) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_cleaned(item, secrets, free) for item in value]
    if not isinstance(value, str):
        return value
    value = _UUID.sub(MARK, value)
    if free:
        for pattern in (*secrets, _PATH):
            value = pattern.sub(MARK, value)
    return value

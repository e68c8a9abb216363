"""Configuration, and the only place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import InvalidArgumentError
from .layout import MAX_BLOCKS

PROTOCOLS = ("auto", "pull", "push", "tagged")


LONGEST_CALL_S = 1800
"""Longest `timeout_s`. Devices time waits with 32 bits that last 4,398 s, and give some twice the
time: see TIMER_SHIFT and Lane.wait_flag."""


def switch(text: str) -> bool:
    """Read what a variable says that is on or off."""
    if text not in ("0", "1"):
        raise ValueError("neither 0 nor 1")
    return text == "1"


DEFAULTS: dict[str, tuple[str, Callable[[str], Any], Any]] = {
    "timeout_s": ("PCIE_COMM_TIMEOUT_S", float, 30.0),
    "setup_timeout_s": ("PCIE_COMM_SETUP_TIMEOUT_S", float, 60.0),
    "slot_nbytes": ("PCIE_COMM_SLOT_NBYTES", int, 4 << 20),
    "max_rows": ("PCIE_COMM_MAX_ROWS", int, 64),
    "protocol": ("PCIE_COMM_PROTOCOL", str, "auto"),
    "overlap": ("PCIE_COMM_OVERLAP", switch, False),
    "max_blocks": ("PCIE_COMM_MAX_BLOCKS", int, None),
    "kernels_dir": ("PCIE_COMM_KERNELS", Path, None),
    "cache_dir": ("PCIE_COMM_CACHE", Path, None),
    "policy_file": ("PCIE_COMM_POLICY", Path, None),
    "advice": ("PCIE_COMM_ADVICE", Path, None),
    "stats": ("PCIE_COMM_STATS", switch, False),
    "nvtx": ("PCIE_COMM_NVTX", switch, False),
}
"""Per field of Config: the variable that sets its default, its type, and the default without it."""

SHARED = (
    "timeout_s",
    "setup_timeout_s",
    "slot_nbytes",
    "max_rows",
    "protocol",
    "overlap",
    "max_blocks",
)


def _default(name: str) -> Any:
    variable, kind, fallback = DEFAULTS[name]
    text = os.environ.get(variable)
    if not text:
        return _default_cache_dir() if name == "cache_dir" else fallback
    try:
        return kind(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{variable}={text!r} is not a valid {kind.__name__} ({error}); mend or unset it"
        ) from error


def _from_env(name: str) -> Any:
    return field(default_factory=lambda: _default(name))


def _default_cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "pcie_comm"
    try:
        return Path.home() / ".cache" / "pcie_comm"
    except RuntimeError:  # a user without a home
        return Path(os.devnull) / "pcie_comm"  # where nothing is, nor can be written


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _folder(name: str, value: str | os.PathLike[str]) -> Path:
    try:
        return Path(value)
    except TypeError as error:
        raise _unusable(name, value, "give a path") from error


def _unusable(name: str, value: object, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{name}={value!r} is not usable; {remedy} (Config.{name}, or {DEFAULTS[name][0]})"
    )


@dataclass(frozen=True)
class Config:
    """Settings of a group. What is not given comes from the environment, else from the defaults.

    All ranks must agree on the first seven.

    Args:
        timeout_s: Longest wait of a launch for its peers, in seconds of wall time, at most 1800;
            30 by default, PCIE_COMM_TIMEOUT_S.
        setup_timeout_s: Longest wait of a constructor for its peers, in seconds; 60,
            PCIE_COMM_SETUP_TIMEOUT_S.
        slot_nbytes: Bytes that all ranks together may stage in one launch; larger calls take
            several. Four such slots lie in every rank's slab; 4 MiB, PCIE_COMM_SLOT_NBYTES.
        max_rows: Most rows of one launch of a plugin without `row_inputs`, whose calls are never
            cut; other calls have any number of rows. 64, PCIE_COMM_MAX_ROWS.
        protocol: `auto`, `pull`, `push` or `tagged`; `auto`, PCIE_COMM_PROTOCOL.
        overlap: Let a captured launch be dispatched while its predecessor ends, from sm_90 on;
            False, PCIE_COMM_OVERLAP=1 for True.
        max_blocks: Most thread blocks of a launch, 2 to 64, or None for what the devices can always
            keep resident (policy.resident_budget); PCIE_COMM_MAX_BLOCKS. On a device that ranks
            share, a larger number is faster with many rows, and may leave what a rank runs between
            collectives no room while others wait for that rank: they time out.
        kernels_dir: Folder of ahead-of-time compiled kernels (`pcie-comm compile`), or None;
            PCIE_COMM_KERNELS.
        cache_dir: Folder of the compile cache; PCIE_COMM_CACHE.
        policy_file: Report of `pcie-comm bench`, whose crossovers `auto` goes by, or None for those
            built in; PCIE_COMM_POLICY. Ranks must have the same crossovers.
        advice: File of `pcie-comm advise --out`, or None: its vetoes are obeyed, and its limits
            where there is no policy file; refused on a machine that it does not fit. Ranks must
            have the same. PCIE_COMM_ADVICE.
        stats: Count operations and waits, for `PcieDcpGroup.stats`; kernels are other ones then.
            False, PCIE_COMM_STATS=1 for True. Ranks may differ in it.
        nvtx: Mark every call on the host as a range for NVIDIA's profilers; False, PCIE_COMM_NVTX=1
            for True. Ranks may differ in it.

    Raises:
        InvalidArgumentError: A value, or a variable, is out of range or of the wrong type.
    """

    timeout_s: float = _from_env("timeout_s")
    setup_timeout_s: float = _from_env("setup_timeout_s")
    slot_nbytes: int = _from_env("slot_nbytes")
    max_rows: int = _from_env("max_rows")
    protocol: str = _from_env("protocol")
    overlap: bool = _from_env("overlap")
    max_blocks: int | None = _from_env("max_blocks")
    kernels_dir: Path | None = _from_env("kernels_dir")
    cache_dir: Path = _from_env("cache_dir")
    policy_file: Path | None = _from_env("policy_file")
    advice: Path | None = _from_env("advice")
    stats: bool = _from_env("stats")
    nvtx: bool = _from_env("nvtx")

    def __post_init__(self) -> None:
        for name, most in (("timeout_s", LONGEST_CALL_S), ("setup_timeout_s", 86_400)):
            value = getattr(self, name)
            if not _is_number(value, int, float) or not 0.0 < value <= most:
                raise _unusable(name, value, f"give seconds above 0, at most {most}")
        nbytes = self.slot_nbytes
        if not _is_number(nbytes, int) or not 4096 <= nbytes <= 1 << 30 or nbytes % 128:
            remedy = f"give 4096 to {1 << 30} bytes, a multiple of 128"
            raise _unusable("slot_nbytes", nbytes, remedy)
        if not _is_number(self.max_rows, int) or not 1 <= self.max_rows <= 65_536:
            raise _unusable("max_rows", self.max_rows, "give 1 to 65536 rows")
        named: object = self.protocol
        if not isinstance(named, str) or named not in PROTOCOLS:
            raise _unusable("protocol", self.protocol, f"choose one of {', '.join(PROTOCOLS)}")
        for name in ("overlap", "stats", "nvtx"):
            if not isinstance(getattr(self, name), bool):
                raise _unusable(name, getattr(self, name), "give True or False")
        blocks = self.max_blocks
        if blocks is not None and not (_is_number(blocks, int) and 2 <= blocks <= MAX_BLOCKS):
            raise _unusable("max_blocks", blocks, f"give 2 to {MAX_BLOCKS} blocks, or None")
        if self.kernels_dir is not None:
            object.__setattr__(self, "kernels_dir", _folder("kernels_dir", self.kernels_dir))
        object.__setattr__(self, "cache_dir", _folder("cache_dir", self.cache_dir))
        for name in ("policy_file", "advice"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _folder(name, getattr(self, name)))

    def contract(self) -> dict[str, object]:
        """Return the settings that every rank must share, by name."""
        return {name: getattr(self, name) for name in SHARED}


def settings_of(config: object) -> Config:
    """Return the settings of a group: the given ones, else those of the environment.

    Raises:
        InvalidArgumentError: Neither None nor a Config.
    """
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise InvalidArgumentError(
            f"config={config!r} is no Config; give pcie_comm.Config(...), or None"
        )
    return config


@dataclass(frozen=True)
class LaunchEnvironment:
    """What a launcher such as torchrun tells a process through its environment.

    Attributes:
        rendezvous: Host and port of the store; None if one of them is not told.
    """

    rank: int | None
    world_size: int | None
    rendezvous: tuple[str, int] | None

    @classmethod
    def read(cls) -> LaunchEnvironment:
        """Read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Raises:
            InvalidArgumentError: A number is none, or the port is out of range.
        """

        def number(name: str) -> int | None:
            text = os.environ.get(name)
            if text is None:
                return None
            if not text.isdecimal():
                raise InvalidArgumentError(f"{name}={text!r} is not a rank count; mend or unset it")
            return int(text)

        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if port and not (port.isdecimal() and 0 < int(port) < 1 << 16):
            raise InvalidArgumentError(f"MASTER_PORT={port!r} is no port; mend or unset it")
        return cls(
            rank=number("RANK"),
            world_size=number("WORLD_SIZE"),
            rendezvous=(host, int(port)) if host and port else None,
        )


def agent_hosts_store() -> bool:
    """Tell whether the launch's store is the torchrun agent's, and not that of global rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def cuda_visibility() -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, each if it is set."""
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    return {name: os.environ[name] for name in names if name in os.environ}


def cuda_home() -> Path:
    """Return the folder of the CUDA toolkit: CUDA_HOME, CUDA_PATH, or the usual place."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return Path(named or "/usr/local/cuda")


def named_revision() -> str:
    """Return the source revision that a build or a copy without git is told, or nothing."""
    return os.environ.get("PCIE_COMM_REVISION", "")


def request_hardware_queues(count: int) -> int:
    """Ask CUDA for `count` hardware queues unless the user chose a number; return the number.

    Streams that share a queue run one after the other, so a rank could wait for ever behind a
    spinning one. The variable counts only until the first CUDA context of the process exists.

    Raises:
        InvalidArgumentError: The variable is set to something else than a number.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    text = os.environ.setdefault(name, str(count))
    if not text.isdecimal():
        raise InvalidArgumentError(f"{name}={text!r} is no number of queues; mend or unset it")
    return int(text)

"""What NVML knows, through nvidia-ml-py. Creates no CUDA context and changes nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import UnsupportedError
from .address import normalise
from .model import ANY, P2P_KINDS, Gpu, LabelMatrix, Link, Pair

SPEED_BY_GENERATION = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
LABEL_BY_LEVEL = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
STATUS = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}
"""By NVML's number: what nvidia-smi topo -p2p prints."""

P2P_INDEX = dict(zip(P2P_KINDS, ("READ", "WRITE", "NVLINK", "ATOMICS", "PROP"), strict=True))
MOST_MIG = 8


class Nvml:
    """An open NVML.

    Args:
        module: `pynvml`, or what a test puts in its place.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._handles = [
            module.nvmlDeviceGetHandleByIndex(index) for index in range(module.nvmlDeviceGetCount())
        ]
        self.names = tuple(f"GPU{index}" for index in range(len(self._handles)))

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Return what an NVML call returns, None if this GPU, driver or binding has no answer."""
        function: Callable[..., Any] | None = getattr(self._module, name, None)
        if function is None:
            return None
        try:
            value = function(*arguments)
        except self._module.NVMLError:
            return None
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    def driver_version(self) -> str | None:
        """Return the version of the driver."""
        version: str | None = self._ask("nvmlSystemGetDriverVersion")
        return version

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every GPU in NVML's order."""
        return tuple(self._gpu(index) for index in range(len(self._handles)))

    def _gpu(self, index: int) -> Gpu:
        handle = self._handles[index]
        place = self._ask("nvmlDeviceGetPciInfo", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        bar = self._ask("nvmlDeviceGetBAR1MemoryInfo", handle)
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        display = self._ask("nvmlDeviceGetDisplayActive", handle)
        address = getattr(place, "busId", None)
        if isinstance(address, bytes):
            address = address.decode()
        return Gpu(
            name=self.names[index],
            nvml_index=index,
            address=normalise(address) if address else None,
            uuid=self._ask("nvmlDeviceGetUUID", handle),
            serial=self._ask("nvmlDeviceGetSerial", handle),
            product=self._ask("nvmlDeviceGetName", handle),
            memory_nbytes=None if memory is None else int(memory.total),
            bar1_nbytes=None if bar is None else int(bar.bar1Total),
            mig=None if mode is None else bool(mode[0]),
            mig_uuids=self._mig_uuids(handle) if mode is not None and mode[0] else None,
            display=None if display is None else bool(display),
            link=self._link(handle),
            unknown={
                ANY: "NVML has no answer for this GPU",
                "ordinal": "not matched yet",
                "numa_node": "NVML was not asked",
                "cpus": "NVML was not asked",
                "mig": "NVML says that this GPU has no such mode",
                "mig_uuids": "MIG is off",
            },
        )

    def _mig_uuids(self, handle: Any) -> tuple[str, ...]:
        count = self._ask("nvmlDeviceGetMaxMigDeviceCount", handle)
        slots = range(MOST_MIG if count is None else count)
        parts = (self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, at) for at in slots)
        found = (self._ask("nvmlDeviceGetUUID", part) for part in parts if part is not None)
        return tuple(uuid for uuid in found if uuid)

    def _link(self, handle: Any) -> Link:
        now = self._ask("nvmlDeviceGetCurrPcieLinkGeneration", handle)
        most = self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)
        return Link(
            speed_gts=SPEED_BY_GENERATION.get(now),
            max_speed_gts=SPEED_BY_GENERATION.get(most),
            width=self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            max_width=self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            unknown={ANY: "NVML has no answer for this GPU"},
        )

    def links(self) -> dict[str, tuple[Link, int | None]]:
        """Return link and PCIe replay counter of every GPU as they are now, by UUID."""
        found = {}
        for handle in self._handles:
            uuid = self._ask("nvmlDeviceGetUUID", handle)
            if uuid is not None:
                replays = self._ask("nvmlDeviceGetPcieReplayCounter", handle)
                found[str(uuid)] = self._link(handle), replays
        return found

    def labels(self) -> LabelMatrix:
        """Return the driver's labels."""
        rows = [
            tuple("X" if one is other else self._label(one, other) for other in self._handles)
            for one in self._handles
        ]
        return LabelMatrix(self.names, self.names, tuple(rows))

    def _label(self, one: Any, other: Any) -> str | None:
        level = self._ask("nvmlDeviceGetTopologyCommonAncestor", one, other)
        return None if level is None else LABEL_BY_LEVEL.get(level)

    def pairs(self) -> tuple[Pair, ...]:
        """Return the P2P status of every ordered pair."""
        return tuple(
            self._pair(source, target)
            for source in range(len(self._handles))
            for target in range(len(self._handles))
            if source != target
        )

    def _pair(self, source: int, target: int) -> Pair:
        status = {}
        for kind, constant in P2P_INDEX.items():
            index = getattr(self._module, f"NVML_P2P_CAPS_INDEX_{constant}", None)
            handles = (self._handles[source], self._handles[target])
            answer = self._ask("nvmlDeviceGetP2PStatus", *handles, index)
            if answer is not None:
                status[kind] = STATUS.get(answer, "U")
        return Pair(
            source=self.names[source],
            target=self.names[target],
            p2p=status or None,
            unknown={ANY: "CUDA was not asked", "p2p": "NVML has no answer"},
        )


@contextmanager
def open_nvml(module: Any = None) -> Iterator[Nvml]:
    """Open NVML, and close it in the end.

    Args:
        module: In place of `pynvml`.

    Raises:
        UnsupportedError: nvidia-ml-py or the driver is missing.
    """
    if module is None:
        try:
            module = importlib.import_module("pynvml")
        except ImportError as error:
            raise UnsupportedError(
                "NVML needs nvidia-ml-py; pip install 'pcie_comm[topology]'",
                reason="nvidia-ml-py is not installed",
            ) from error
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        raise UnsupportedError(f"NVML does not start: {error}", reason=str(error)) from error
    try:
        yield Nvml(module)
    finally:
        module.nvmlShutdown()

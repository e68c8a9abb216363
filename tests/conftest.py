"""Leaves out, visibly, the tests that this machine or this run cannot serve; shared fixtures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("busy machine", deadline=None)  # pytest-timeout bounds a test
settings.load_profile("busy machine")

DEVICES_NEEDED = {"gpu": 1, "gpu2": 2, "gpu4": 4}
REASONS = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pcie_comm")
    group.addoption("--run-slow", action="store_true", help="also run the tests marked slow")
    group.addoption("--no-gpu", action="store_true", help="act as if there were no CUDA device")


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves slabs mapped, or their files in /dev/shm."""
    import leaks

    before = leaks.own_mappings()
    yield
    leaks.assert_none(before)


def device_count() -> int:
    """CUDA devices that torch sees; without torch, none."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def devices_needed(item: pytest.Item) -> int:
    marked = (n for mark, n in DEVICES_NEEDED.items() if item.get_closest_marker(mark))
    return max(marked, default=0)


def reason_to_leave_out(item: pytest.Item, found: int) -> str | None:
    config = item.config
    needed = devices_needed(item)
    if needed > found:
        seen = "--no-gpu was given" if config.getoption("--no-gpu") else f"found={found}"
        return f"CUDA devices needed={needed}, {seen}"
    if item.get_closest_marker("slow") and not config.getoption("--run-slow"):
        return "slow: run with --run-slow"
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wants_devices = any(devices_needed(item) for item in items)
    found = device_count() if wants_devices and not config.getoption("--no-gpu") else 0
    reasons = {item: reason_to_leave_out(item, found) for item in items}
    left_out = [item for item in items if reasons[item]]
    config.stash[REASONS] = Counter(reason for reason in reasons.values() if reason)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not reasons[item]]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    reasons = config.stash.get(REASONS, Counter())
    if reasons:
        terminalreporter.section("deselected")
        for reason, count in sorted(reasons.items()):
            terminalreporter.line(f"{count} deselected: {reason}")

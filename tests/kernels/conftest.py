"""What the tests of machine code share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def cuobjdump() -> str:
    """Path of the disassembler."""
    from machine_code import report

    return report.cuobjdump() or pytest.skip("cuobjdump is not installed")

"""What every collective must pass, for the tests of packages that bring one.

    import pytest
    from pcie_comm.testing import CHECKS, Subject

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(check):
        check(Subject(MyCollective()))

Each check raises ConformanceError, an AssertionError, or unittest.SkipTest where a machine lacks
what it needs: the CuTe DSL, a GPU. pytest and unittest show that as skipped. Nothing here needs
pytest.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable

from . import kernels, on_cpu, on_device, operators, plans
from .subject import ConformanceError, InputMaker, Subject

CHECKS: tuple[Callable[[Subject], None], ...] = (
    plans.plans_are_pure_and_alike,
    plans.variants_cover_every_plan,
    plans.outputs_are_those_of_the_reference,
    on_cpu.runs_on_cpu_ranks,
    on_cpu.refuses_wrong_arguments,
    on_cpu.tells_calls_apart,
    on_cpu.waits_are_bounded,
    operators.is_a_torch_operator,
    kernels.kernels_compile_and_signal,
    on_device.runs_on_a_device,
    on_device.stages_what_it_declares,
)
"""The checks, cheap ones first; each takes a Subject, and says in its docstring what it shows."""


def check_all(subject: Subject) -> dict[str, str]:
    """Run every check.

    Returns:
        By name of the check, `passed`, or `skipped: ` and why.

    Raises:
        ConformanceError: What the first check that fails has found; it names the plugin.
    """
    outcomes = {}
    for check in CHECKS:
        try:
            check(subject)
        except unittest.SkipTest as reason:
            outcomes[check.__name__] = f"skipped: {reason}"
        else:
            outcomes[check.__name__] = "passed"
    return outcomes


__all__ = ["CHECKS", "ConformanceError", "InputMaker", "Subject", "check_all"]

"""`auto` is held against integer programmes: Checkmate's, and POET's with a tier below, solved by HiGHS."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Plan
from lowtide.core.trace import Trace
from lowtide.plan.policies.auto import Auto
from lowtide.plan.policies.checkmate import Checkmate
from lowtide.plan.policies.offmate import OffMate
from lowtide.plan.policies.poet import Poet
from lowtide.testing.shapes import resnet_trace, transformer_trace, unet_trace
from lowtide.testing.traces import chain_trace, machine_of
from tests.plan.policies.recomputing import problem_of

SMALL = (chain_trace(12), resnet_trace(3), unet_trace(3), transformer_trace(2))


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


@pytest.mark.parametrize("bytes_per_s", [1e3, 2e9])
@pytest.mark.parametrize("trace", SMALL, ids=lambda trace: trace.model)
def test_auto_is_within_two_percent_of_what_the_programmes_find(trace: Trace, bytes_per_s: float) -> None:
    link = Link(write_bytes_per_s=bytes_per_s, read_bytes_per_s=bytes_per_s)
    held = 0
    for share in (0.3, 0.6, 0.9):
        problem = replace(problem_of(trace, share), machine=machine_of(link))
        ours = step_s(Auto().plan(problem))
        for rival in (Checkmate(), Poet(), OffMate()):
            plan = rival.plan(problem)
            assert plan.prediction is not None
            if plan.prediction.peak_bytes <= problem.budget_bytes:
                held += 1
                assert ours <= 1.02 * step_s(plan), (rival.name, share)
    assert held >= 4

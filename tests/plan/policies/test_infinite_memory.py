"""Infinite memory: the bound that no policy passes."""

from __future__ import annotations

import pytest

from lowtide import registry
from lowtide.core.trace import Trace
from lowtide.plan.policies.infinite_memory import InfiniteMemory
from lowtide.plan.policy import Runs
from lowtide.testing.traces import residual_trace
from tests.plan.policies.shapes import predicted, problem_of, resnet


@pytest.mark.parametrize("trace", [residual_trace(4), resnet(3)], ids=lambda trace: trace.model)
@pytest.mark.parametrize("name", registry.policy_names())
def test_nobody_is_faster(trace: Trace, name: str) -> None:
    problem = problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2, can_recompute=True)
    bound = predicted(InfiniteMemory().plan(problem))
    assert bound.step_s == pytest.approx(trace.duration_s)
    plan = registry.policy(name).plan(problem)
    if plan.prediction is not None:
        assert plan.prediction.step_s >= bound.step_s * (1 - 1e-9)


def test_the_budget_is_ignored_and_the_plan_says_so() -> None:
    trace = resnet()
    plan = InfiniteMemory().plan(problem_of(trace, 1))
    assert (plan.swaps, plan.recomputes) == ((), ())
    assert predicted(plan).peak_bytes == trace.peak_bytes
    assert plan.notes[0].startswith("the budget of 1 B is ignored: ")
    assert InfiniteMemory().plan(problem_of(trace, trace.peak_bytes)).notes == ()
    assert InfiniteMemory.about.runs == (Runs.MODEL,)

"""Chen et al.: about two roots of n units of memory for one more forward pass, on articulation points."""

from __future__ import annotations

from math import ceil, sqrt

import pytest

from lowtide.plan.policies.chen import ChenGreedy, ChenSqrt
from lowtide.plan.views.values import Values
from lowtide.testing.shapes import unet_trace
from lowtide.testing.traces import chain_trace
from tests.plan.policies.recomputing import peak_of, problem_of, reruns


@pytest.mark.parametrize("n", [16, 36, 64, 100])
def test_a_chain_takes_about_two_roots_of_n_units_and_one_more_forward_pass(n: int) -> None:
    trace = chain_trace(n, nbytes=100, duration_s=1.0)
    problem = problem_of(trace, 1.0)
    plan = ChenSqrt().plan(problem)
    units = (peak_of(plan, problem) - trace.static_bytes) / 100
    assert units <= 2 * ceil(sqrt(n)) + 1
    waiting = len(Values(problem).waiting())
    kept = ceil(waiting / ceil(sqrt(waiting)))
    assert len(plan.recomputes) == reruns(plan) == waiting - kept


def test_the_greedy_is_no_leaner_than_it_has_to_be_and_no_slower_than_the_root() -> None:
    trace = chain_trace(36, nbytes=100, duration_s=1.0)
    steps = []
    for share in (0.4, 0.6, 0.9):
        problem = problem_of(trace, share)
        plan = ChenGreedy().plan(problem)
        assert peak_of(plan, problem) <= problem.budget_bytes
        assert plan.prediction is not None
        steps.append(plan.prediction.step_s)
    assert steps[0] >= steps[1] >= steps[2] < steps[0]
    root = ChenSqrt().plan(problem).prediction
    assert root is not None
    assert steps[2] <= root.step_s


def test_a_unet_has_hardly_a_point_to_cut_at_and_the_linearised_version_works() -> None:
    trace = unet_trace(3)
    problem = problem_of(trace, 0.5)
    values = Values(problem)
    bridged = range(values.cuts()[0] + 1, values.cuts()[-2])
    assert len(bridged) > len(values.all) / 2, "the bridges span most of the network"
    assert not ChenGreedy().plan(problem).recomputes
    assert "nothing is discarded" in " ".join(ChenGreedy().plan(problem).notes)
    assert peak_of(ChenGreedy(linearised=True).plan(problem), problem) <= problem.budget_bytes

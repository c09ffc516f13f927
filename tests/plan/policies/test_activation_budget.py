"""PyTorch's knapsack: what is dearest to make again stays, within a share of the bytes."""

from __future__ import annotations

from itertools import combinations

import pytest

from lowtide.plan.policies.activation_budget import ActivationBudget, keep
from lowtide.plan.views.values import Values
from lowtide.testing.shapes import resnet_trace
from lowtide.testing.traces import chain_trace
from tests.plan.policies.recomputing import peak_of, problem_of


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_the_knapsack_is_the_best_of_all(share: float) -> None:
    values = Values(problem_of(resnet_trace(1), 1.0))
    waiting = values.waiting()
    total = sum(values.all[k].nbytes for k in waiting)
    kept = keep(values, share=share)
    assert sum(values.all[k].nbytes for k in kept) <= share * total
    best_s = max(
        sum(values.all[k].cost_s for k in some)
        for size in range(len(waiting) + 1)
        for some in combinations(waiting, size)
        # Rounded up, as the knapsack does.
        if sum(-(-values.all[k].nbytes * 512 // total) for k in some) <= int(share * 512) or share == 1.0
    )
    assert sum(values.all[k].cost_s for k in kept) == pytest.approx(best_s)


def test_the_larger_the_budget_the_more_is_kept() -> None:
    trace = chain_trace(24, nbytes=100, duration_s=1.0)
    seen = []
    for share in (0.2, 0.5, 0.8):
        problem = problem_of(trace, share)
        plan = ActivationBudget().plan(problem)
        assert peak_of(plan, problem) <= problem.budget_bytes
        assert plan.prediction is not None
        seen.append(plan.prediction.step_s)
    assert seen == sorted(seen, reverse=True)

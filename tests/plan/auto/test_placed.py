"""`auto` on machines with slow memory that operators read in place."""

from __future__ import annotations

import pytest

from lowtide import registry
from lowtide.core.plan import Plan, Problem
from lowtide.estimate import machine
from lowtide.plan.auto.placed import best_placed
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policies.auto import NEGLIGIBLE
from lowtide.plan.verify import replay
from lowtide.simulate import simulate
from lowtide.testing.traces import training_trace

MIB = 1 << 20
STEP = training_trace(6, nbytes=8 * MIB, activation_bytes=32 * MIB, duration_s=2e-3, update_s=5e-4)
OTHERS = (
    "bandwidth_aware",
    "cori",
    "deeptm",
    "first_touch",
    "halo",
    "sentinel",
    "soft2lm",
    "tahoe",
    "tiertrain",
    "two_level",
)


def problem_of(share: float, name: str = "optane") -> Problem:
    return Problem(trace=STEP, machine=machine(name), budget_bytes=int(share * STEP.peak_bytes), can_place=True)


def simulated_s(problem: Problem, plan: Plan) -> float:
    replay(plan, problem)
    return simulate(problem, plan, strict=True).step_s


@pytest.mark.parametrize("name", ["optane", "cxl"])
@pytest.mark.parametrize("share", [0.25, 0.4, 0.6])
def test_auto_is_at_least_as_good_as_everybody_in_the_simulator(share: float, name: str) -> None:
    problem = problem_of(share, name)
    own_s = simulated_s(problem, registry.policy("auto").plan(problem))
    for other in OTHERS:
        plan = registry.policy(other).plan(problem)
        assert plan.prediction is not None
        if plan.prediction.peak_bytes <= problem.budget_bytes:
            assert own_s <= simulated_s(problem, plan) * (1 + NEGLIGIBLE), other


def test_auto_keeps_a_budget_below_the_floor_with_operands_that_are_read_in_place() -> None:
    problem = problem_of(0.1)
    assert problem.budget_bytes < STEP.floor_bytes()
    plan = registry.policy("auto").plan(problem)
    assert plan.places
    assert "slow memory" in plan.notes[0]
    replay(plan, problem)


def test_nothing_is_placed_where_the_executor_cannot() -> None:
    without = Problem(trace=STEP, machine=machine("optane"), budget_bytes=STEP.peak_bytes // 2)
    assert best_placed(without, Sweep(without), negligible=NEGLIGIBLE) is None
    assert not registry.policy("auto").plan(without).places

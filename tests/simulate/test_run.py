"""Several steps: the first is reactive, the others follow a plan, and a policy may learn from what it sees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem
from lowtide.core.timeline import Lane, Timeline
from lowtide.errors import BadArgument, BudgetTooSmall
from lowtide.plan.policies.auto import Auto
from lowtide.plan.policies.keep_all import KeepAll
from lowtide.plan.policies.lru import Lru
from lowtide.plan.policies.swap_all import SwapAll
from lowtide.plan.policy import About, Family, Runs
from lowtide.simulate import simulate_run
from lowtide.testing.traces import chain_trace, machine_of

TRACE = chain_trace(8, nbytes=100, duration_s=1.0)
PROBLEM = Problem(
    trace=TRACE, machine=machine_of(Link(write_bytes_per_s=200.0, read_bytes_per_s=200.0)), budget_bytes=500
)


class Learner:
    """Fetches everything on demand at first, then as `swap_all` does, and then is content."""

    name = "learner"
    summary = "learns"
    about = About(family=Family.BASELINE, runs=(Runs.SIMULATED,))

    def __init__(self) -> None:
        self.seen: list[Timeline] = []

    def plan(self, problem: Problem) -> Plan:
        plan = SwapAll().plan(problem)
        late = tuple(replace(swap, fetch_op=swap.gap.before_op) for swap in plan.swaps)
        return replace(plan, policy=self.name, swaps=late, prediction=None)

    def observe(self, problem: Problem, plan: Plan, timeline: Timeline) -> Plan:
        self.seen.append(timeline)
        waited = any(span.lane is Lane.STALL and span.cause == "arrival" for span in timeline.spans)
        better = replace(SwapAll().plan(problem), policy=self.name, prediction=None)
        return better if waited and plan != better else plan


def test_the_first_step_is_reactive_and_the_others_follow_the_plan() -> None:
    run = simulate_run(PROBLEM, Auto(), steps=3, strict=True)
    assert run.plans[0] is None
    assert run.plans[1] == run.plans[2] == Auto().plan(PROBLEM)
    assert {span.cause for span in run.timelines[0].spans if span.lane is Lane.OUT} == {"pressure"}
    assert {span.cause for span in run.timelines[1].spans if span.lane is Lane.OUT} == {"plan"}
    assert run.timelines[1] == run.timelines[2] == run.settled
    assert run.settled.step_s < run.timelines[0].step_s
    assert (run.trial_steps, run.trial_s) == (1, run.timelines[0].step_s)


def test_a_policy_that_observes_changes_its_plan_and_its_trials_are_counted() -> None:
    policy = Learner()
    run = simulate_run(PROBLEM, policy, steps=5, strict=True)
    assert len(policy.seen) == 4
    assert run.plans[1] != run.plans[2] == run.plans[3] == run.plans[4]
    assert run.timelines[2].step_s < run.timelines[1].step_s
    assert [timeline.trials for timeline in run.timelines] == [0, 1, 2, 2, 2]
    assert run.trial_steps == 2
    assert run.trial_s == pytest.approx(run.timelines[0].step_s + run.timelines[1].step_s)


def test_trials_that_a_policy_made_on_its_own_count_as_settled_steps() -> None:
    class Trying(Auto):
        def plan(self, problem: Problem) -> Plan:
            return replace(super().plan(problem), trials=10)

    run = simulate_run(PROBLEM, Trying(), steps=2)
    assert run.trial_steps == 11
    assert run.trial_s == pytest.approx(run.timelines[0].step_s + 10 * run.settled.step_s)
    assert run.settled.trials == 11


def test_one_step_needs_no_plan() -> None:
    run = simulate_run(PROBLEM, Lru(), steps=1)
    assert run.plans == (None,)
    with pytest.raises(BadArgument, match="0 steps"):
        simulate_run(PROBLEM, Lru(), steps=0)


def test_a_policy_that_gives_nothing_up_fails_in_the_first_step() -> None:
    with pytest.raises(BudgetTooSmall, match="layer5"):
        simulate_run(PROBLEM, KeepAll())

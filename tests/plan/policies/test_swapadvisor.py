"""SwapAdvisor: a genetic search that starts from its planner and only gets better (Huang et al., ASPLOS 2020)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from lowtide.core.plan import Problem
from lowtide.core.trace import Trace
from lowtide.errors import BadArgument
from lowtide.plan.policies.belady import Belady
from lowtide.plan.policies.infinite_memory import InfiniteMemory
from lowtide.plan.policies.swapadvisor import POPULATION, SwapAdvisor
from lowtide.plan.verify import check, replay
from lowtide.testing.networks import networks
from lowtide.testing.traces import chain_trace, problems
from tests.plan.policies.shapes import BOUND, DISK, densenet, inception, predicted, problem_of, resnet, vgg

NETS = (vgg(), resnet(), inception(), densenet())
SHARES = (0.1, 0.4, 0.7)


def at(trace: Trace, share: float, **more: object) -> Problem:
    floor = trace.floor_bytes()
    return replace(problem_of(trace, floor + int(share * (trace.peak_bytes - floor)), BOUND), **more)  # type: ignore[arg-type]


@given(problem=problems(networks()) | problems())
@settings(max_examples=40, deadline=None)
def test_every_budget_from_the_floor_on_is_met(problem: Problem) -> None:
    for budget_bytes in (problem.trace.floor_bytes(), problem.budget_bytes):
        tight = replace(problem, budget_bytes=budget_bytes)
        assert replay(SwapAdvisor(generations=2).plan(tight), tight).peak_bytes <= budget_bytes


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("share", SHARES)
def test_more_generations_are_never_worse(trace: Trace, share: float) -> None:
    problem = at(trace, share)
    times = [predicted(SwapAdvisor(generations=count).plan(problem)).step_s for count in (0, 1, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_the_search_finds_what_its_planner_alone_does_not() -> None:
    gains = []
    for trace in NETS:
        for share in SHARES:
            problem = at(trace, share)
            planner = predicted(SwapAdvisor(generations=0).plan(problem)).step_s
            gains.append(planner / predicted(SwapAdvisor().plan(problem)).step_s)
    assert max(gains) > 1.02


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("share", SHARES)
def test_it_lies_between_fetching_on_demand_and_endless_memory(trace: Trace, share: float) -> None:
    problem = at(trace, share)
    found = predicted(SwapAdvisor().plan(problem)).step_s
    assert predicted(InfiniteMemory().plan(problem)).step_s <= found < predicted(Belady().plan(problem)).step_s


def test_equal_seeds_give_equal_plans_and_trials_are_counted() -> None:
    problem = at(resnet(), 0.1)
    first, second = SwapAdvisor(seed=3).plan(problem), SwapAdvisor(seed=3).plan(problem)
    assert first == second
    check(first, problem)
    assert POPULATION < first.trials <= POPULATION * 9
    assert SwapAdvisor(generations=0).plan(problem).trials == POPULATION


def test_the_search_ends_when_nothing_is_left_to_gain() -> None:
    trace = chain_trace(20, duration_s=1.0)
    plan = SwapAdvisor().plan(problem_of(trace, trace.peak_bytes // 2, DISK))
    assert predicted(plan).stall_s == 0
    assert plan.trials == POPULATION


def test_a_very_long_step_gets_fewer_trials() -> None:
    trace = chain_trace(3000)
    plan = SwapAdvisor().plan(problem_of(trace, trace.peak_bytes // 2, BOUND))
    assert plan.trials == 150_000 // (6000 + len(trace.gaps()) + 1)


def test_a_negative_number_of_generations_is_refused() -> None:
    with pytest.raises(BadArgument, match="generations is -1"):
        SwapAdvisor(generations=-1)

"""The cross-system suite by simulation: every line of it says something about every policy, with a plan or without.

| line | shown by |
|---|---|
| safety, conservation, bounds | `assert_simulated`: on random and recorded steps in test_cross_system.py, more here |
| no faster than the best of all plans | `test_no_simulated_step_beats_the_best_of_all_plans` |
| limits: memory, an endless link, a dead link | the three tests named after them |
| exactness | tests/bitwise: every policy trains to the bit like stock PyTorch |
| simulated as real | tests/accelerator/test_plan_order.py: order; docs/agreement.md: time and peak, by measurement |
| published shapes | tests/plan/policies |
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lowtide import registry
from lowtide.core.machine import Link
from lowtide.core.plan import Problem
from lowtide.core.serialize import load_trace
from lowtide.core.timeline import Timeline
from lowtide.core.trace import Trace
from lowtide.plan.policy import Family
from lowtide.simulate import simulate_run
from lowtide.testing.networks import networks
from lowtide.testing.optimum import optimum
from lowtide.testing.policies import DEAD, ENDLESS, FAST, SLOW, TRACES
from lowtide.testing.shapes import resnet_trace
from lowtide.testing.simulated import simulated_steps
from lowtide.testing.traces import chain_trace, machine_of, problems, residual_trace, skip_trace

NAMES = registry.policy_names()
RECORDED = sorted((Path(__file__).parent.parent / "data").glob("*.trace"))

# What a line of the suite does not ask of a policy, and why. Each entry is itself held against the policy below.
KEEPS = "gives up nothing, so that a step above the budget is refused"
WHATEVER = "moves the same whatever the budget is, as its paper does"
OUTSIDE: dict[str, dict[str, str]] = {
    "runs at every budget from the floor on": {
        "keep_all": KEEPS,
        "infinite_memory": KEEPS,
        "dtr": "discards only what can be made again, and making it takes memory: it may need more than the floor",
    },
    "moves nothing where everything fits": dict.fromkeys(
        ("dymem", "layrub", "swap_all", "vdnn_all", "vdnn_conv"), WHATEVER
    ),
    "does not depend on the link": {
        name: "swaps, by its plan or where its plan does not fit: what it moves takes the link's time"
        for name in NAMES
        if name not in ("dtr", "keep_all", "infinite_memory")
    },
}


def outside(line: str, name: str) -> bool:
    return name in OUTSIDE[line]


def problem_of(trace: Trace, share: float, link: Link, *, can_recompute: bool) -> Problem:
    """Return a problem whose budget lies `share` of the way from the floor to the peak."""
    floor = trace.floor_bytes()
    budget_bytes = floor + int(share * max(0, trace.peak_bytes - floor))
    return Problem(trace=trace, machine=machine_of(link), budget_bytes=budget_bytes, can_recompute=can_recompute)


def both_steps(name: str, problem: Problem) -> list[Timeline]:
    """Return the step without a plan and the one with the policy's, those that the budget is not refused to."""
    policy = registry.policy(name)
    may_refuse = name in OUTSIDE["runs at every budget from the floor on"]
    return simulated_steps(problem, policy, policy.plan(problem), may_refuse=may_refuse)


@cache
def recorded(path: Path) -> Trace:
    return load_trace(path)


# ---- safety, conservation, bounds ----


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("can_recompute", [False, True], ids=("swap", "recompute"))
def test_recorded_steps_keep_the_equations_at_every_budget(name: str, path: Path, can_recompute: bool) -> None:
    for link in (FAST, SLOW):
        for share in (0.0, 0.05, 0.35, 0.5, 0.8, 1.0):
            both_steps(name, problem_of(recorded(path), share, link, can_recompute=can_recompute))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_random_steps_keep_the_equations(name: str) -> None:
    @settings(max_examples=250, deadline=None, database=None, phases=[Phase.generate])
    @given(problem=problems(can_recompute=True) | problems(networks(), can_recompute=True), can=st.booleans())
    def check(problem: Problem, can: bool) -> None:
        both_steps(name, replace(problem, can_recompute=can))

    check()


@pytest.mark.parametrize("name", OUTSIDE["runs at every budget from the floor on"])
def test_who_may_need_more_than_the_floor_does(name: str) -> None:
    refused = 0
    for trace in TRACES:
        refused += len(both_steps(name, problem_of(trace, 0.0, FAST, can_recompute=True))) < 2
    assert refused


# ---- no faster than the best of all plans ----

TINY = (chain_trace(3, nbytes=100, duration_s=1.0), chain_trace(4, nbytes=100, duration_s=1.0))
TINY_LINK = Link(write_bytes_per_s=60.0, read_bytes_per_s=60.0, read_latency_s=0.1)


@cache
def best_s(trace: int, share: float, can_recompute: bool) -> tuple[Problem, float]:
    problem = problem_of(TINY[trace], share, TINY_LINK, can_recompute=can_recompute)
    best = optimum(problem)
    assert best is not None
    return problem, best.prediction.step_s


@pytest.mark.parametrize("name", NAMES)
def test_no_simulated_step_beats_the_best_of_all_plans(name: str) -> None:
    ran = 0
    for trace in range(len(TINY)):
        for share in (0.0, 0.5):
            for can_recompute in (False, True):
                problem, least_s = best_s(trace, share, can_recompute)
                for timeline in both_steps(name, problem):
                    ran += 1
                    assert timeline.step_s >= least_s * (1 - 1e-9)
    assert ran or name in ("keep_all", "infinite_memory")


# ---- limits ----


@pytest.mark.parametrize("name", NAMES)
def test_nothing_moves_and_nothing_runs_again_where_everything_fits(name: str) -> None:
    moved_bytes = 0
    for trace in TRACES:
        problem = replace(problem_of(trace, 1.0, SLOW, can_recompute=True), budget_bytes=trace.peak_bytes)
        reactive, planned = both_steps(name, problem)
        assert (reactive.moved_out_bytes, reactive.recompute_s, reactive.stall_s) == (0, 0, 0)
        moved_bytes += planned.moved_out_bytes
        assert planned.recompute_s == 0
        if not outside("moves nothing where everything fits", name):
            assert planned.step_s == pytest.approx(trace.duration_s, rel=1e-9)
    assert (moved_bytes > 0) == outside("moves nothing where everything fits", name)
    about = registry.policy(name).about
    if about.family is not Family.PLACEMENT:  # this machine has no slow memory to place in
        assert about.adapts != outside("moves nothing where everything fits", name)


@pytest.mark.parametrize("name", NAMES)
def test_an_endless_link_leaves_compute_and_what_runs_again(name: str) -> None:
    for trace in (skip_trace(6), resnet_trace(3)):
        for can_recompute in (False, True):
            for timeline in both_steps(name, problem_of(trace, 0.5, ENDLESS, can_recompute=can_recompute)):
                again_s = timeline.recompute_s if can_recompute else 0.0
                assert timeline.step_s == pytest.approx(trace.duration_s + again_s, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_dead_link_changes_nothing_for_who_does_not_swap(name: str) -> None:
    about = registry.policy(name).about
    if about.family is Family.RECOMPUTE and about.discards_victims:
        assert not outside("does not depend on the link", name)
    changed = 0
    for trace in (chain_trace(12), residual_trace(4)):
        fast, dead = (both_steps(name, problem_of(trace, 0.5, link, can_recompute=True)) for link in (FAST, DEAD))
        if not outside("does not depend on the link", name):
            assert fast == dead
        changed += sum(one.step_s != other.step_s for one, other in zip(fast, dead, strict=False))
    assert (changed > 0) == outside("does not depend on the link", name)


# ---- what a policy learns ----


@pytest.mark.parametrize("name", ["capuchin", "survey3"])
def test_a_plan_that_was_revised_keeps_the_equations(name: str) -> None:
    policy = registry.policy(name)
    for path in RECORDED:
        problem = problem_of(recorded(path), 0.3, FAST, can_recompute=True)
        run = simulate_run(problem, policy, steps=4, strict=True)
        assert all(timeline.peak_bytes <= problem.budget_bytes for timeline in run.timelines)


def test_the_table_names_policies_that_there_are() -> None:
    for line, policies in OUTSIDE.items():
        assert set(policies) <= set(NAMES), line
        assert set(policies) != set(NAMES), f"nobody is held against: {line}"

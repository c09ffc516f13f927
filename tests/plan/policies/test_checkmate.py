"""Checkmate's programme and its relatives with a tier below, held against one another and the best of all plans."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem
from lowtide.core.trace import Trace
from lowtide.errors import BadArgument
from lowtide.plan.policies.checkmate import THRESHOLDS, Answer, Checkmate, CheckmateLp, Stages
from lowtide.plan.policies.chen import ChenGreedy
from lowtide.plan.policies.offmate import OffMate
from lowtide.plan.policies.poet import Poet
from lowtide.plan.programme import Solution
from lowtide.plan.verify import check
from lowtide.testing.optimum import optimum
from lowtide.testing.policies import DEAD, ENDLESS
from lowtide.testing.shapes import resnet_trace, unet_trace
from lowtide.testing.traces import chain_trace, machine_of, skip_trace
from tests.plan.policies.recomputing import peak_of, problem_of

TRACES = (chain_trace(10, nbytes=100, duration_s=1.0), resnet_trace(2), unet_trace(2))


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def fits(plan: Plan) -> bool:
    assert plan.prediction is not None
    return plan.prediction.peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.model)
def test_nobody_recomputes_less_than_the_programme(trace: Trace) -> None:
    found = 0
    for share in (0.4, 0.6, 0.8, 0.95):
        problem = problem_of(trace, share)
        exact = Checkmate().plan(problem)
        for other in (CheckmateLp(), ChenGreedy(), ChenGreedy(linearised=True)):
            plan = other.plan(problem)
            if fits(plan):
                assert peak_of(exact, problem) <= problem.budget_bytes
                assert step_s(exact) <= step_s(plan) * (1 + 1e-9), other.name
                found += 1
    assert found > 4


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_small_chain_is_within_two_percent_of_the_best_of_all_plans(share: float) -> None:
    problem = replace(problem_of(chain_trace(4, nbytes=100, duration_s=1.0), share), machine=machine_of(DEAD))
    best = optimum(problem)
    assert best is not None
    assert step_s(Checkmate().plan(problem)) <= 1.02 * best.prediction.step_s


def test_a_value_is_kept_from_the_threshold_on() -> None:
    """Of a chain's last values, S says 0.2, 0.4 and so on: the higher the threshold, the more is made again."""
    stages = Stages(problem_of(TRACES[0], 0.6))
    count = len(stages.blocks)
    kept = tuple(tuple((i + 1) / count for i in range(count)) for _ in stages.moments)
    solution = Solution(values=(), objective=0.0, bound=0.0, seconds=0.0, solver="by hand")
    answer = Answer(kept=kept, paged=(0.0,) * count, solution=solution)
    for threshold in THRESHOLDS:
        swaps, discards = stages.decisions(answer, threshold=threshold)
        assert not swaps
        assert len(discards) == sum((i + 1) / count < threshold for i in range(count))


@pytest.mark.parametrize("trace", TRACES[:2], ids=lambda trace: trace.model)
@pytest.mark.parametrize("share", [0.4, 0.5])
def test_of_all_thresholds_the_fastest_rounding_that_fits_is_taken(trace: Trace, share: float) -> None:
    problem = problem_of(trace, share)
    single = [CheckmateLp(thresholds=(threshold,)).plan(problem) for threshold in THRESHOLDS]
    times = [step_s(plan) if fits(plan) else inf for plan in single]
    assert step_s(CheckmateLp().plan(problem)) == min(times) < max(times)


def test_no_threshold_is_the_best_everywhere() -> None:
    problems = [problem_of(trace, share) for trace in TRACES[:2] for share in (0.4, 0.5)]
    for threshold in THRESHOLDS:
        single = [CheckmateLp(thresholds=(threshold,)).plan(problem) for problem in problems]
        best = [CheckmateLp().plan(problem) for problem in problems]
        assert any(not fits(one) or step_s(one) > step_s(all_) for one, all_ in zip(single, best, strict=True))


@pytest.mark.parametrize("wrong", [(), (0.0,), (0.5, 1.1)])
def test_thresholds_lie_between_0_and_1(wrong: tuple[float, ...]) -> None:
    with pytest.raises(BadArgument, match="thresholds are"):
        CheckmateLp(thresholds=wrong)


def test_the_solver_is_named_with_its_gap_and_its_time() -> None:
    (note, *_) = Checkmate().plan(problem_of(TRACES[0], 0.6)).notes
    assert "HiGHS" in note
    assert "gap 0.00%" in note
    assert "within 5 s" in note


@pytest.mark.parametrize("policy", [Checkmate(), CheckmateLp()], ids=lambda policy: policy.name)
def test_below_the_working_set_nothing_is_discarded(policy: Checkmate | CheckmateLp) -> None:
    trace = TRACES[0]
    problem = replace(problem_of(trace, 0.5), budget_bytes=trace.floor_bytes() - 1)
    assert not policy.plan(problem).recomputes


def with_link(problem: Problem, link: Link) -> Problem:
    return replace(problem, machine=machine_of(link))


@pytest.mark.parametrize("policy", [Poet(), OffMate()], ids=lambda policy: policy.name)
def test_with_a_tier_below_it_is_never_slower_and_the_link_decides(policy: Poet | OffMate) -> None:
    problem = problem_of(chain_trace(10, nbytes=100, duration_s=1.0), 0.4)
    dead, endless = (policy.plan(with_link(problem, link)) for link in (DEAD, ENDLESS))
    check(dead, with_link(problem, DEAD))
    check(endless, with_link(problem, ENDLESS))
    assert not dead.swaps
    assert dead.recomputes
    assert step_s(dead) == pytest.approx(step_s(Checkmate().plan(problem)))
    assert endless.swaps
    assert not endless.recomputes
    only_pages = policy.plan(replace(problem, can_recompute=False))
    assert only_pages.swaps
    assert not only_pages.recomputes


def test_offmate_pays_only_for_transfers_that_do_not_hide() -> None:
    """Everything that waits takes three quarters of a pass to move: POET would rather compute."""
    trace = chain_trace(10, nbytes=100, duration_s=1.0)
    link = Link(write_bytes_per_s=130.0, read_bytes_per_s=130.0, duplex=True)
    problem = with_link(problem_of(trace, 0.5), link)
    poet, offmate = Poet().plan(problem), OffMate().plan(problem)
    check(offmate, problem)
    assert offmate.swaps
    assert not offmate.recomputes
    assert len(poet.swaps) < len(offmate.swaps)


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_where_a_plan_passes_the_budget_the_programme_is_solved_again_with_less(share: float) -> None:
    problem = problem_of(skip_trace(6), share)
    assert peak_of(Checkmate().plan(problem), problem) <= problem.budget_bytes

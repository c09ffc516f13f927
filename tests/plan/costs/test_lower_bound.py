"""The least time of a step: no plan is faster, and where one thing is short it is what that thing takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lowtide.core.machine import Link
from lowtide.core.plan import Problem
from lowtide.plan.costs.lower_bound import least_step_s
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policies.auto import Auto
from lowtide.plan.policies.belady import Belady
from lowtide.plan.policies.swap_all import SwapAll
from lowtide.testing.optimum import optimum
from lowtide.testing.traces import chain_trace, machine_of, problems, touched_traces, traces
from tests.plan.policies.recomputing import problem_of


@st.composite
def some_problems(draw: st.DrawFn) -> Problem:
    source = touched_traces(max_ops=14, max_storages=8) if draw(st.booleans()) else traces()
    return draw(problems(source, can_recompute=draw(st.booleans())))


@given(problem=some_problems())
@settings(max_examples=150, deadline=None, phases=[Phase.generate])
def test_no_plan_is_faster(problem: Problem) -> None:
    least_s = least_step_s(problem)
    for policy in (Auto(), SwapAll(), Belady()):
        plan = policy.plan(problem)
        prediction = predict(problem, plan.swaps, plan.recomputes, plan.places)
        if prediction.peak_bytes <= problem.budget_bytes:
            assert prediction.step_s >= least_s * (1 - 1e-9), policy.name


@pytest.mark.parametrize("bytes_per_s", [1e8, 1e9, 1e10])
@pytest.mark.parametrize("share", [0.4, 0.7])
def test_not_even_the_best_of_all_plans_is_faster(bytes_per_s: float, share: float) -> None:
    link = Link(write_bytes_per_s=bytes_per_s, read_bytes_per_s=bytes_per_s)
    problem = replace(problem_of(chain_trace(3), share), machine=machine_of(link))
    best = optimum(problem)
    assert best is not None
    assert best.prediction.step_s >= least_step_s(problem) * (1 - 1e-9)


def test_a_slow_link_takes_what_has_to_be_written_and_read() -> None:
    trace = chain_trace(12)
    link = Link(write_bytes_per_s=1e3, read_bytes_per_s=2e3)
    problem = replace(problem_of(trace, 0.5), machine=machine_of(link), can_recompute=False)
    peak = max(range(len(trace.ops)), key=lambda op: trace.ops[op].peak_bytes)
    need = trace.ops[peak].peak_bytes - problem.budget_bytes
    waits_s = need / 1e3 - trace.ops[peak].start_s
    after_s = trace.duration_s - trace.ops[peak].start_s - trace.ops[peak].duration_s
    waits_s += need / 2e3 - after_s
    assert least_step_s(problem) >= trace.duration_s + waits_s * (1 - 1e-9)
    assert least_step_s(replace(problem, can_recompute=True)) < trace.duration_s + waits_s / 2, "operators run again"


@pytest.mark.parametrize("can_recompute", [False, True])
def test_nothing_is_added_where_everything_fits_or_hides(can_recompute: bool) -> None:
    trace = chain_trace(12)
    roomy = replace(problem_of(trace, 1.0), budget_bytes=trace.peak_bytes, can_recompute=can_recompute)
    assert least_step_s(roomy) == trace.duration_s
    fast = Link(write_bytes_per_s=1e15, read_bytes_per_s=1e15)
    assert least_step_s(replace(problem_of(trace, 0.5), machine=machine_of(fast))) == trace.duration_s

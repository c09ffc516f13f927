"""Steps whose pages move, decided when memory runs out: the second of two, by any policy, never above the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings

from lowtide import registry
from lowtide.core.plan import Problem
from lowtide.core.timeline import Lane
from lowtide.core.trace import Kind, Reach, Storage
from lowtide.core.trace import Phase as Training
from lowtide.errors import BudgetTooSmall
from lowtide.simulate import simulate
from lowtide.testing.policies import FAST
from lowtide.testing.traces import Step, held_traces, machine_of, make_trace, problems, touched_traces, training_trace


@pytest.mark.parametrize("name", ["lru", "belady", "auto", "swap_all"])
@given(problem=problems(touched_traces(max_ops=16, max_storages=9)))
@settings(max_examples=40, deadline=None, phases=[Phase.generate])
def test_whoever_swaps_runs_from_the_floor_on(name: str, problem: Problem) -> None:
    policy = registry.policy(name)
    for plan in (None, policy.plan(problem)):
        timeline = simulate(problem, plan, policy=policy, strict=True, allocator="pytorch")
        assert timeline.peak_bytes <= problem.budget_bytes
        assert [span.op for span in timeline.spans if span.lane is Lane.COMPUTE] == list(range(len(problem.trace.ops)))
        assert timeline.step_s >= problem.trace.duration_s * (1 - 1e-9)


@pytest.mark.parametrize("name", ["lru", "belady", "auto", "swap_all", "dtr"])
@given(problem=problems(held_traces(max_ops=16, max_storages=7), can_recompute=True))
@settings(max_examples=40, deadline=None, phases=[Phase.generate])
def test_what_is_saved_beside_what_is_held_leaves_in_its_gaps_only(name: str, problem: Problem) -> None:
    policy = registry.policy(name)
    gaps = problem.trace.gaps()
    for plan in (None, policy.plan(problem)):
        try:
            timeline = simulate(problem, plan, policy=policy, strict=True)
        except BudgetTooSmall:
            assert name == "dtr"  # to make again takes memory
            continue
        assert timeline.peak_bytes <= problem.budget_bytes
        for span in timeline.spans:
            if span.lane is Lane.OUT and span.storage in problem.trace.saved():
                mine = [gap for gap in gaps if gap.storage == span.storage]
                assert any(gap.after_op <= span.op < gap.before_op for gap in mine if span.op is not None)


def test_the_timeline_is_that_of_a_step_among_others() -> None:
    trace = training_trace(3, nbytes=1 << 20, activation_bytes=1 << 10, duration_s=1e-2, update_s=1e-2)
    problem = Problem(trace=trace, machine=machine_of(FAST), budget_bytes=trace.peak_bytes - (1 << 20))
    timeline = simulate(problem, registry.policy("auto").plan(problem), strict=True)
    assert timeline.step_s == pytest.approx(trace.duration_s, rel=1e-3)
    assert min(span.start_s for span in timeline.spans if span.lane is Lane.COMPUTE) >= 0
    assert max(span.end_s for span in timeline.spans if span.lane is Lane.COMPUTE) <= timeline.step_s * (1 + 1e-9)
    assert timeline.moved_out_bytes == timeline.moved_in_bytes > 0


def test_state_that_nobody_changes_is_not_written_under_pressure_either() -> None:
    trace = training_trace(6, nbytes=1 << 20, activation_bytes=1)
    inference = replace(trace, ops=tuple(replace(op, writes=()) for op in trace.ops))
    problem = Problem(trace=inference, machine=machine_of(FAST), budget_bytes=inference.floor_bytes() + (4 << 20))
    timeline = simulate(problem, None, policy=registry.policy("lru"), strict=True)
    living = {storage for storage in range(len(trace.storages)) if trace.lives_on(storage)}
    assert timeline.moved_in_bytes > 0
    assert not [span for span in timeline.spans if span.lane is Lane.OUT and span.storage in living]


def test_what_the_next_step_changes_is_written_again_under_pressure() -> None:
    # 100 bytes are made by operator 3. In the next step, operator 0 writes them and 2 frees them. Operators 1 and 4
    # leave no room for them.
    full = {1, 4}
    steps = [
        Step(
            name=f"op{k}",
            phase=Training.FORWARD,
            duration_s=1.0,
            reads=(0,) if k == 5 else (),
            writes={3: (0,), 0: (1,)}.get(k, ()),
            scratch_bytes=100 if k in full else 0,
        )
        for k in range(7)
    ]
    storages = [
        Storage(nbytes=100, kind=Kind.GRAD, first_op=3, last_op=7, producer=3),
        Storage(nbytes=100, kind=Kind.GRAD, first_op=-1, last_op=2),
    ]
    trace = make_trace(steps, storages, (), reach=Reach.TOUCHED)
    problem = Problem(trace=trace, machine=machine_of(FAST), budget_bytes=100)
    timeline = simulate(problem, None, policy=registry.policy("lru"), strict=True)
    assert [span.op for span in timeline.spans if span.lane is Lane.OUT] == [1, 4]
    assert timeline.moved_out_bytes == 200
    assert timeline.moved_in_bytes == 100


def test_an_allocator_holds_nothing_for_what_the_next_step_frees_while_it_is_away() -> None:
    big = 64 << 20
    steps = [
        Step(
            name=f"op{k}",
            phase=Training.FORWARD,
            duration_s=1.0,
            writes=(0,) if k == 3 else (),
            scratch_bytes=big if k < 2 else 0,
        )
        for k in range(6)
    ]
    storages = [
        Storage(nbytes=big, kind=Kind.GRAD, first_op=3, last_op=6, producer=3),
        Storage(nbytes=big, kind=Kind.GRAD, first_op=-1, last_op=1),
    ]
    trace = make_trace(steps, storages, (), reach=Reach.TOUCHED)
    problem = Problem(trace=trace, machine=machine_of(FAST), budget_bytes=trace.peak_bytes)
    kept = simulate(problem, registry.policy("keep_all").plan(problem), allocator="pytorch")
    assert (kept.peak_bytes, kept.reserved_peak_bytes) == (2 * big, 2 * big)
    away = simulate(problem, registry.policy("swap_all").plan(problem), allocator="pytorch")
    assert (away.peak_bytes, away.reserved_peak_bytes) == (big, big)

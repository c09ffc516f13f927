"""Three clocks, one model: on steps whose pages move, sweep, verifier and simulator see the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lowtide import registry
from lowtide.core.machine import Link, Machine
from lowtide.core.plan import IDENTITY, CodecCost, Plan, Problem, SampledRatio, Swap
from lowtide.core.trace import Gap, Kind, Reach, Storage, Trace
from lowtide.core.trace import Phase as Training
from lowtide.plan.costs.sweep import Sweep, predict
from lowtide.plan.verify import replay
from lowtide.simulate import simulate
from lowtide.testing.plans import plans
from lowtide.testing.traces import (
    Step,
    held_traces,
    links,
    machine_of,
    make_trace,
    problems,
    touched_traces,
    training_trace,
)

HALF = CodecCost(name="half", encode_bytes_per_s=2e9, decode_bytes_per_s=3e9, ratio=0.5)


@st.composite
def planned(draw: st.DrawFn, *, held: bool = False) -> tuple[Problem, Plan]:
    """A step, a machine of one or two tiers, and decisions of every kind with as much memory as they need."""
    source = held_traces(max_ops=16, max_storages=7) if held else touched_traces(max_ops=16, max_storages=9)
    problem = draw(problems(source, can_recompute=not held))
    if draw(st.booleans()):
        both = {**problem.machine.links, "host": draw(links())}
        problem = replace(problem, machine=Machine(name="two", links=both), tiers=("spill", "host"))
    if problem.trace.storages and draw(st.booleans()):
        problem = replace(problem, codecs=(IDENTITY, HALF))
        shares = st.dictionaries(st.integers(0, len(problem.trace.storages) - 1), st.floats(0.0, 1.2), max_size=4)
        sampled = (SampledRatio(storage=key, codec="half", ratio=ratio) for key, ratio in draw(shares).items())
        problem = replace(problem, sampled=tuple(sampled))
    plan = draw(plans(problem))
    return _with_enough(problem, plan), plan


def _with_enough(problem: Problem, plan: Plan) -> Problem:
    peak_bytes = predict(problem, plan.swaps, plan.recomputes).peak_bytes
    return replace(problem, budget_bytes=max(problem.budget_bytes, peak_bytes))


def assert_all_agree(problem: Problem, plan: Plan) -> None:
    expected = predict(problem, plan.swaps, plan.recomputes)
    assert expected.peak_bytes <= problem.budget_bytes
    seen = replay(plan, problem)
    timeline = simulate(problem, plan, strict=True)
    for other in (seen, timeline):
        assert other.peak_bytes == expected.peak_bytes
        assert other.step_s == pytest.approx(expected.step_s, rel=1e-9, abs=1e-12)
        assert other.stall_s == pytest.approx(expected.stall_s, rel=1e-6, abs=1e-9)
        assert other.recompute_s == pytest.approx(expected.recompute_s, rel=1e-9, abs=1e-12)
        assert other.moved_out_bytes == expected.moved_out_bytes
        assert other.moved_in_bytes == expected.moved_in_bytes


@given(case=planned())
@settings(max_examples=250, deadline=None, phases=[Phase.generate])
def test_any_decisions_take_the_same_on_all_clocks(case: tuple[Problem, Plan]) -> None:
    assert_all_agree(*case)


@given(case=planned(held=True))
@settings(max_examples=250, deadline=None, phases=[Phase.generate])
def test_what_is_saved_and_what_is_held_take_the_same_on_all_clocks(case: tuple[Problem, Plan]) -> None:
    assert_all_agree(*case)


@pytest.mark.parametrize("name", ["auto", "belady", "swap_all", "vdnn", "superneurons", "capuchin"])
@given(problem=problems(held_traces(max_ops=16, max_storages=7), can_recompute=True))
@settings(max_examples=60, deadline=None, phases=[Phase.generate])
def test_plans_for_what_is_saved_and_held_take_as_long_as_they_say(name: str, problem: Problem) -> None:
    plan = registry.policy(name).plan(problem)
    assert_all_agree(_with_enough(problem, plan), plan)


@st.composite
def inheriting(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """A step that makes storages and leaves them to the next, which frees them after any operator, touched or not."""
    count, pairs = 10, draw(st.integers(1, 3))
    reads: list[set[int]] = [set() for _ in range(count)]
    writes: list[set[int]] = [set() for _ in range(count)]
    made, found = [], []
    for k in range(pairs):
        first = draw(st.integers(2, 6))
        freed = draw(st.integers(0, first - 1))
        made.append(Storage(nbytes=100 + k, kind=Kind.GRAD, first_op=first, last_op=count, producer=first))
        found.append(Storage(nbytes=100 + k, kind=Kind.GRAD, first_op=-1, last_op=freed))
        writes[first].add(k)
        for op in draw(st.sets(st.integers(first + 1, count - 1), max_size=2)):
            draw(st.sampled_from((reads, writes)))[op].add(k)
        for op in draw(st.sets(st.integers(0, freed), max_size=2)) if draw(st.booleans()) else ():
            draw(st.sampled_from((reads, writes)))[op].add(pairs + k)
    other = Storage(nbytes=150, kind=Kind.PARAM, first_op=-1, last_op=count)
    for op in draw(st.sets(st.integers(0, count - 1), max_size=3)):
        draw(st.sampled_from((reads, writes)))[op].add(2 * pairs)
    steps = [
        Step(
            name=f"op{k}",
            phase=Training.FORWARD,
            duration_s=draw(st.sampled_from((0.1, 1.0, 3.0))),
            reads=tuple(reads[k]),
            writes=tuple(writes[k]),
            scratch_bytes=draw(st.sampled_from((0, 200))),
        )
        for k in range(count)
    ]
    trace = make_trace(steps, [*made, *found, other], (), reach=Reach.TOUCHED)
    assert dict(trace.heirs()) == {k: pairs + k for k in range(pairs)}
    link = Link(write_bytes_per_s=draw(st.sampled_from((40.0, 400.0))), read_bytes_per_s=200.0)
    problem = Problem(trace=trace, machine=machine_of(link), budget_bytes=draw(st.integers(300, 700)))
    plan = draw(plans(problem))
    return _with_enough(problem, plan), plan


@given(case=inheriting())
@settings(max_examples=250, deadline=None, phases=[Phase.generate])
def test_what_the_next_step_frees_takes_the_same_on_all_clocks(case: tuple[Problem, Plan]) -> None:
    assert_all_agree(*case)


@pytest.mark.parametrize("name", ["auto", "belady", "swap_all"])
@given(case=inheriting())
@settings(max_examples=60, deadline=None, phases=[Phase.generate])
def test_policies_fit_the_floor_with_what_the_next_step_frees(name: str, case: tuple[Problem, Plan]) -> None:
    problem, _ = case
    for share in (0.0, 0.5):
        floor = problem.trace.floor_bytes()
        budget_bytes = floor + int(share * (problem.trace.peak_bytes - floor))
        tight = replace(problem, budget_bytes=budget_bytes)
        assert_all_agree(tight, registry.policy(name).plan(tight))


# Four operators of a second. A parameter of 100 bytes is read by the first two and written by the last; a moment of
# 200 bytes is read and written by the last; nobody touches a buffer of 50 bytes.
def state_trace(*, frozen: bool = False) -> Trace:
    steps = [
        Step(name="forward", phase=Training.FORWARD, duration_s=1.0, reads=(0,)),
        Step(name="wait", phase=Training.FORWARD, duration_s=1.0),
        Step(name="backward", phase=Training.BACKWARD, duration_s=1.0, reads=(0,)),
        Step(name="update", phase=Training.UPDATE, duration_s=1.0, reads=(0, 1), writes=() if frozen else (0, 1)),
    ]
    kinds = ((100, Kind.PARAM), (200, Kind.OPTIMIZER), (50, Kind.BUFFER))
    storages = [Storage(nbytes=nbytes, kind=kind, first_op=-1, last_op=4) for nbytes, kind in kinds]
    return make_trace(steps, storages, (), reach=Reach.TOUCHED)


LINK = Link(write_bytes_per_s=200.0, read_bytes_per_s=200.0)
PARAMETER = Swap(gap=Gap(storage=0, after_op=1, before_op=2), fetch_op=2)
MOMENT = Swap(gap=Gap(storage=1, after_op=4, before_op=7), fetch_op=6)
BUFFER = Swap(gap=Gap(storage=2, after_op=0, before_op=4), fetch_op=4)


def problem_of(trace: Trace, budget_bytes: int = 350) -> Problem:
    return Problem(trace=trace, machine=machine_of(LINK), budget_bytes=budget_bytes)


def test_a_gap_past_the_end_is_away_when_the_step_begins() -> None:
    trace = state_trace()
    assert MOMENT.gap in trace.gaps()
    # Written from 0 to 1 s, read from 2 to 3 s, beside the next step's operators: nobody waits.
    seen = predict(problem_of(trace), (MOMENT,))
    assert (seen.step_s, seen.stall_s) == (4.0, 0.0)
    assert (seen.moved_out_bytes, seen.moved_in_bytes) == (200, 200)
    assert seen.peak_bytes == 350
    # With less memory the first operator waits for the landing, the read for its own; only the update does not fit.
    tight = Sweep(problem_of(trace, budget_bytes=200)).run((MOMENT,))
    assert tight.over == (3,)
    assert tight.short == ((0, 150),)
    assert_all_agree(problem_of(trace), Plan(policy="test", budget_bytes=350, swaps=(MOMENT,)))


def test_a_read_may_be_asked_for_in_the_step_before() -> None:
    trace = state_trace()
    gap = Gap(storage=1, after_op=4, before_op=7)
    for fetch_op in (5, 6, 7):
        plan = Plan(policy="test", budget_bytes=350, swaps=(Swap(gap=gap, fetch_op=fetch_op),))
        assert_all_agree(problem_of(trace), plan)
    assert predict(problem_of(trace), (Swap(gap=gap, fetch_op=7),)).stall_s == pytest.approx(1.0)


def test_what_is_on_its_way_when_a_step_ends_goes_on_in_the_next() -> None:
    # 300 bytes leave with the last operator but one and take 15 s; the first operator of the next step wants them.
    trace = make_trace(
        [Step(name=f"op{k}", phase=Training.FORWARD, duration_s=1.0, reads=(0,) * (k == 0)) for k in range(3)],
        [
            Storage(nbytes=300, kind=Kind.PARAM, first_op=-1, last_op=3),
            Storage(nbytes=1, kind=Kind.ACTIVATION, first_op=0, last_op=2),
        ],
        (),
        reach=Reach.TOUCHED,
    )
    trace = replace(trace, ops=tuple(replace(op, writes=(0,)) if k == 0 else op for k, op in enumerate(trace.ops)))
    slow = Link(write_bytes_per_s=20.0, read_bytes_per_s=300.0)
    problem = Problem(trace=trace, machine=machine_of(slow), budget_bytes=400)
    plan = Plan(policy="test", budget_bytes=400, swaps=(Swap(gap=Gap(storage=0, after_op=2, before_op=3), fetch_op=3),))
    seen = predict(problem, plan.swaps)
    # A second of each step's compute hides a part of the write: 3 s of compute, 14 s for the rest, 1 s for the read.
    assert seen.step_s == pytest.approx(3 + 14 + 1)
    assert_all_agree(problem, plan)


def test_a_storage_that_nobody_needs_is_away_for_good_and_costs_nothing() -> None:
    problem = problem_of(state_trace(), budget_bytes=300)
    plan = Plan(policy="test", budget_bytes=300, swaps=(BUFFER,))
    seen = predict(problem, plan.swaps)
    assert (seen.peak_bytes, seen.moved_out_bytes, seen.moved_in_bytes) == (300, 0, 0)
    assert_all_agree(problem, plan)
    late = replace(BUFFER, gap=Gap(storage=2, after_op=3, before_op=4))
    assert_all_agree(problem, replace(plan, swaps=(late,)))


def test_what_an_operator_frees_untouched_may_be_away_while_it_runs() -> None:
    # 100 bytes are made by the first operator, left alone, and freed during the third, which needs 300 of its own.
    steps = [
        Step(name="make", phase=Training.FORWARD, duration_s=1.0, writes=(0,)),
        Step(name="wait", phase=Training.FORWARD, duration_s=1.0),
        Step(name="free", phase=Training.FORWARD, duration_s=1.0, scratch_bytes=300),
        Step(name="rest", phase=Training.FORWARD, duration_s=1.0),
    ]
    for freed_op in (2, 3):
        made = Storage(nbytes=100, kind=Kind.ACTIVATION, first_op=0, last_op=freed_op, producer=0)
        trace = make_trace(steps, [made], (), reach=Reach.TOUCHED)
        assert trace.gaps() == (Gap(storage=0, after_op=1, before_op=freed_op + 1),)
        assert trace.floor_bytes() == 300
        problem = problem_of(trace, budget_bytes=300)
        plan = Plan(policy="test", budget_bytes=300, swaps=(Swap(gap=trace.gaps()[0], fetch_op=freed_op + 1),))
        seen = predict(problem, plan.swaps)
        assert (seen.peak_bytes, seen.stall_s) == (300, 0.0)
        assert (seen.moved_out_bytes, seen.moved_in_bytes) == (100, 0)
        assert_all_agree(problem, plan)


def test_a_parameter_that_leaves_twice_is_written_once() -> None:
    trace = training_trace(2, nbytes=100, activation_bytes=1, duration_s=1.0, update_s=1.0)
    own = [gap for gap in trace.gaps() if gap.storage == 0]
    assert [gap.before_op >= len(trace.ops) for gap in own] == [False, True]
    problem = problem_of(trace, budget_bytes=trace.peak_bytes)
    swaps = tuple(Swap(gap=gap, fetch_op=gap.before_op) for gap in own)
    both = predict(problem, swaps)
    assert (both.moved_out_bytes, both.moved_in_bytes) == (100, 200)
    for one in swaps:
        alone = predict(problem, (one,))
        assert (alone.moved_out_bytes, alone.moved_in_bytes) == (100, 100)
    assert_all_agree(problem, Plan(policy="test", budget_bytes=problem.budget_bytes, swaps=swaps))


def test_a_barrier_may_lie_in_the_next_step_behind_an_early_arrival() -> None:
    gap = Gap(storage=0, after_op=1, before_op=4)
    steps = [Step(name=f"op{k}", phase=Training.FORWARD, duration_s=1.0, writes=(0,) * (k == 0)) for k in range(4)]
    trace = make_trace(steps, [Storage(nbytes=100, kind=Kind.PARAM, first_op=-1, last_op=4)], (), reach=Reach.TOUCHED)
    swap = Swap(gap=gap, fetch_op=2, arrived_op=3, landed_op=4)
    assert_all_agree(problem_of(trace), Plan(policy="test", budget_bytes=350, swaps=(swap,)))


def test_frozen_weights_are_never_written() -> None:
    seen = predict(problem_of(state_trace(frozen=True)), (PARAMETER, MOMENT))
    assert (seen.moved_out_bytes, seen.moved_in_bytes) == (0, 300)


def test_a_copy_in_one_tier_is_none_in_another() -> None:
    trace = training_trace(2, nbytes=100, activation_bytes=1, duration_s=1.0, update_s=1.0)
    first, second = (gap for gap in trace.gaps() if gap.storage == 0)
    machine = Machine(name="two", links={"spill": LINK, "host": LINK})
    problem = Problem(trace=trace, machine=machine, budget_bytes=trace.peak_bytes, tiers=("spill", "host"))
    swaps = (Swap(gap=first, fetch_op=first.before_op), Swap(gap=second, fetch_op=second.before_op, tier="host"))
    assert predict(problem, swaps).moved_out_bytes == 200
    assert_all_agree(problem, Plan(policy="test", budget_bytes=problem.budget_bytes, swaps=swaps))


def test_two_tiers_work_side_by_side() -> None:
    trace = state_trace(frozen=False)
    machine = Machine(name="two", links={"spill": LINK, "host": LINK})
    problem = Problem(trace=trace, machine=machine, budget_bytes=350, tiers=("spill", "host"))
    other = Swap(gap=Gap(storage=0, after_op=1, before_op=2), fetch_op=2)
    alone = predict(problem, (other,)).stall_s
    crowded = predict(problem, (other, replace(MOMENT, fetch_op=4 + 1))).stall_s
    apart = predict(problem, (other, replace(MOMENT, fetch_op=4 + 1, tier="host"))).stall_s
    assert apart == pytest.approx(alone)
    assert crowded > apart

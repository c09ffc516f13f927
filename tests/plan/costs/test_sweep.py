from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.core.machine import Link, Machine
from lowtide.core.plan import Plan, Prediction, Problem, Recompute, Swap
from lowtide.core.trace import Gap, Kind, Phase, Save, Storage
from lowtide.errors import BadArgument
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import Sweep, link_of, predict
from lowtide.plan.verify import replay
from lowtide.testing.networks import networks
from lowtide.testing.plans import plans
from lowtide.testing.traces import Step, chain_trace, machine_of, make_trace, problems

# Four layers of 100 bytes, a second forward and two back. Storage 0 can be away in [2, 7), storage 1 in [3, 6).
TRACE = chain_trace(4, nbytes=100, duration_s=1.0)
LINK = Link(write_bytes_per_s=200.0, read_bytes_per_s=200.0)


@given(
    problem=problems(can_recompute=True) | problems(networks(max_layers=8), can_recompute=True),
    can_recompute=st.booleans(),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_the_prediction_for_any_legal_plan_is_what_the_verifier_sees(
    problem: Problem, can_recompute: bool, data: st.DataObject
) -> None:
    problem = replace(problem, can_recompute=can_recompute)
    plan = data.draw(plans(problem))
    # Nothing is read ahead without a budget: what is needed then is the least that the plan can do with.
    least = predict(replace(problem, budget_bytes=0), plan.swaps, plan.recomputes).peak_bytes
    # With little to spare, most prefetches find no room at first.
    tight = replace(problem, budget_bytes=least + data.draw(st.sampled_from((0, 4096, 2 << 20, 1 << 40))))
    seen = replay(replace(plan, budget_bytes=tight.budget_bytes), tight)
    expected = predict(tight, plan.swaps, plan.recomputes)
    assert seen.step_s == pytest.approx(expected.step_s, rel=1e-9)
    assert seen.stall_s == pytest.approx(expected.stall_s, abs=1e-9)
    assert seen.recompute_s == pytest.approx(expected.recompute_s)
    assert seen.peak_bytes == expected.peak_bytes <= tight.budget_bytes
    assert seen.moved_out_bytes == expected.moved_out_bytes
    assert seen.moved_in_bytes == expected.moved_in_bytes


def test_waiting_is_attributed_to_the_operator_and_the_swap() -> None:
    problem = Problem(trace=TRACE, machine=machine_of(LINK), budget_bytes=300)
    swaps = [Swap(gap=Gap(storage=0, after_op=3, before_op=7), fetch_op=7)]
    outcome = Sweep(problem).run(swaps)
    assert outcome.short == ((3, 100),)
    assert outcome.late == ((0, pytest.approx(0.5)),)
    assert outcome.prediction.stall_s == pytest.approx(1.0)


def test_prefetches_stand_back_while_an_operator_waits_for_a_write() -> None:
    # Storage 0 is written from 1 to 1.5 s, storage 1 from then to 6.5 s. Operator 4 wants to begin at 4 s and waits for
    # storage 1, which it releases, until 6.5 s; the read of storage 0 begins no earlier and keeps operator 5 waiting.
    steps = [Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1.0) for k in range(10)]
    storages = [Storage(nbytes=nbytes, kind=Kind.ACTIVATION, first_op=0, last_op=9) for nbytes in (10, 100)]
    saves = [
        Save(storage=0, packed_op=0, free_op=1, uses=(5,), released_op=5),
        Save(storage=1, packed_op=0, free_op=1, uses=(), released_op=4),
    ]
    machine = machine_of(Link(write_bytes_per_s=20.0, read_bytes_per_s=5.0, duplex=True))
    problem = Problem(trace=make_trace(steps, storages, saves), machine=machine, budget_bytes=10**4)
    swaps = tuple(Swap(gap=gap, fetch_op=4) for gap in problem.trace.gaps())
    assert predict(problem, swaps).step_s == pytest.approx(10 + 2.5 + 1)
    assert replay(Plan(policy="test", budget_bytes=10**4, swaps=swaps), problem).step_s == pytest.approx(13.5)


def test_a_prefetch_that_a_long_operator_leaves_no_room_for_begins_after_it() -> None:
    # Storage 0 has left by 2 s and is wanted back by operator 4 at 13 s. Operator 2 leaves no room for it until 12 s,
    # when operator 3 begins: the read takes from then to 14 s.
    steps = [
        Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=duration_s, scratch_bytes=scratch_bytes)
        for k, (duration_s, scratch_bytes) in enumerate(((1.0, 0), (1.0, 0), (10.0, 60), (1.0, 0), (1.0, 0)))
    ]
    storages = [Storage(nbytes=50, kind=Kind.ACTIVATION, first_op=0, last_op=4)]
    saves = [Save(storage=0, packed_op=0, free_op=1, uses=(4,), released_op=4)]
    machine = machine_of(Link(write_bytes_per_s=50.0, read_bytes_per_s=25.0))
    problem = Problem(trace=make_trace(steps, storages, saves), machine=machine, budget_bytes=100)
    swaps = (Swap(gap=Gap(storage=0, after_op=1, before_op=4), fetch_op=2),)
    assert predict(problem, swaps).step_s == pytest.approx(14 + 1)
    assert replay(Plan(policy="test", budget_bytes=100, swaps=swaps), problem).step_s == pytest.approx(15)


def outcomes(problem: Problem, swaps: Sequence[Swap] = (), recomputes: Sequence[Recompute] = ()) -> Prediction:
    """The prediction, which the verifier has to agree with."""
    prediction = predict(problem, swaps, recomputes)
    plan = Plan(
        policy="test",
        budget_bytes=problem.budget_bytes,
        swaps=tuple(swaps),
        recomputes=tuple(recomputes),
        prediction=prediction,
    )
    seen = replay(plan, problem)
    assert seen.step_s == pytest.approx(prediction.step_s)
    assert seen.peak_bytes == prediction.peak_bytes
    return prediction


SLOW = Link(write_bytes_per_s=40.0, read_bytes_per_s=40.0)


def test_a_barrier_makes_an_operator_wait_for_the_write() -> None:
    # The write takes 2.5 s from operator 2 on, at 2 s; operator 3 wants to begin at 3 s, operator 4 at 4 s.
    problem = Problem(trace=TRACE, machine=machine_of(SLOW), budget_bytes=400)
    gap = Gap(storage=0, after_op=2, before_op=7)
    for landed_op, stall_s in ((3, 1.5), (4, 0.5), (5, 0.0), (None, 0.0)):
        swap = Swap(gap=gap, fetch_op=5, landed_op=landed_op)
        assert outcomes(problem, [swap]).stall_s == pytest.approx(stall_s)


def test_a_barrier_makes_an_operator_wait_for_the_read() -> None:
    # The read is asked for when operator 5 begins, at 6 s, and takes 2.5 s; operator 6 wants to begin at 8 s.
    problem = Problem(trace=TRACE, machine=machine_of(SLOW), budget_bytes=400)
    gap = Gap(storage=0, after_op=2, before_op=7)
    for arrived_op, stall_s in ((5, 2.5), (6, 0.5), (7, 0.0), (None, 0.0)):
        swap = Swap(gap=gap, fetch_op=5, arrived_op=arrived_op)
        assert outcomes(problem, [swap]).stall_s == pytest.approx(stall_s)


def test_a_storage_that_has_to_arrive_early_is_paid_for_from_then_on() -> None:
    problem = Problem(trace=TRACE, machine=machine_of(LINK), budget_bytes=400)
    gap = Gap(storage=0, after_op=2, before_op=7)
    assert outcomes(problem, [Swap(gap=gap, fetch_op=7)]).peak_bytes == 300
    assert outcomes(problem, [Swap(gap=gap, fetch_op=4, arrived_op=4)]).peak_bytes == 400


def test_making_a_storage_again_takes_its_operators_time_and_nothing_of_the_link() -> None:
    problem = Problem(trace=TRACE, machine=machine_of(SLOW), budget_bytes=300, can_recompute=True)
    seen = outcomes(problem, recomputes=[Recompute(gap=Gap(storage=0, after_op=2, before_op=7), ops=(0,))])
    assert (seen.step_s, seen.recompute_s, seen.stall_s) == (13.0, 1.0, 0.0)
    assert (seen.peak_bytes, seen.moved_out_bytes, seen.moved_in_bytes) == (300, 0, 0)


def test_recomputations_for_one_operator_run_what_they_share_once() -> None:
    problem = Problem(trace=TRACE, machine=machine_of(SLOW), budget_bytes=300, can_recompute=True)
    pair = [
        Recompute(gap=Gap(storage=0, after_op=2, before_op=6), ops=(0,)),
        Recompute(gap=Gap(storage=1, after_op=3, before_op=6), ops=(0, 1)),
    ]
    assert outcomes(problem, recomputes=pair).recompute_s == 2.0
    apart = [
        Recompute(gap=Gap(storage=0, after_op=2, before_op=7), ops=(0,)),
        Recompute(gap=Gap(storage=1, after_op=3, before_op=6), ops=(0, 1)),
    ]
    assert outcomes(problem, recomputes=apart).recompute_s == 3.0


def test_memory_while_recomputing_counts_what_is_made_on_the_way_and_scratch() -> None:
    # Before operator 5, which needs storage 2, storages 0 to 2 are alive. Making 2 again from nothing makes 0, then 1
    # beside 0, then 2 beside 1, 0 being free by then, each with 50 bytes of scratch: 250 bytes at the highest.
    trace = chain_trace(4, nbytes=100, duration_s=1.0, scratch_bytes=50)
    problem = Problem(trace=trace, machine=machine_of(LINK), budget_bytes=10**6, can_recompute=True)
    swaps = [Swap(gap=Gap(storage=k, after_op=k + 2, before_op=7 - k), fetch_op=7 - k) for k in range(2)]
    again = Recompute(gap=Gap(storage=2, after_op=4, before_op=5), ops=(0, 1, 2))
    facts = Sweep(problem)
    (rerun,) = facts.reruns(swaps, [again])
    # With nothing absent but what is made, storages 0 and 1 are beside it: that is how peaks are told.
    assert rerun.peak_bytes == 200 + 250
    assert rerun.duration_s == 3.0
    assert outcomes(problem, swaps, [again]).recompute_s == 3.0


def test_a_prefetch_stands_back_for_memory_that_recomputation_needs() -> None:
    # Storage 1 is made again before operator 6 by operators 0 and 1, storage 0 being away until operator 7. Operator 1
    # takes 200 bytes of scratch: 400 bytes with what it reads and makes. Only 500 leave room for storage 0 beside that.
    ops = tuple(replace(op, peak_bytes=op.peak_bytes + 200) if index == 1 else op for index, op in enumerate(TRACE.ops))
    again = Recompute(gap=Gap(storage=1, after_op=3, before_op=6), ops=(0, 1))
    swaps = [Swap(gap=Gap(storage=0, after_op=2, before_op=7), fetch_op=5)]
    for budget_bytes, stall_s in ((400, 0.5), (500, 0.0)):
        problem = Problem(
            trace=replace(TRACE, ops=ops), machine=machine_of(LINK), budget_bytes=budget_bytes, can_recompute=True
        )
        seen = outcomes(problem, swaps, [again])
        assert (seen.peak_bytes, seen.stall_s) == (budget_bytes, pytest.approx(stall_s))


def test_a_dropped_storage_that_nobody_asks_for_again_is_not_made() -> None:
    unused = replace(TRACE.saves[0], uses=())
    ops = tuple(replace(op, reads=()) if op.name == "layer0.backward" else op for op in TRACE.ops)
    trace = replace(TRACE, saves=(unused, *TRACE.saves[1:]), ops=ops)
    problem = Problem(trace=trace, machine=machine_of(LINK), budget_bytes=300, can_recompute=True)
    seen = outcomes(problem, recomputes=[Recompute(gap=Gap(storage=0, after_op=2, before_op=7), ops=())])
    assert (seen.step_s, seen.peak_bytes) == (12.0, 300)


def test_a_gap_that_ends_with_the_step_is_written_and_not_read() -> None:
    trace = replace(TRACE, saves=(replace(TRACE.saves[0], uses=(8,), released_op=8), *TRACE.saves[1:]))
    trace = replace(trace, ops=tuple(replace(op, reads=()) if index == 7 else op for index, op in enumerate(trace.ops)))
    problem = Problem(trace=trace, machine=machine_of(LINK), budget_bytes=400)
    seen = outcomes(problem, [Swap(gap=Gap(storage=0, after_op=2, before_op=8), fetch_op=8)])
    assert (seen.moved_out_bytes, seen.moved_in_bytes, seen.step_s) == (100, 0, 12.0)


def test_a_plan_over_the_budget_is_predicted_and_not_refused() -> None:
    problem = Problem(trace=TRACE, machine=machine_of(LINK), budget_bytes=10)
    assert predict(problem, ()).peak_bytes == 400


def test_an_unknown_tier_is_named_with_those_there_are() -> None:
    machine = Machine(name="m", links={"disk": LINK})
    with pytest.raises(BadArgument, match=r"machine 'm' has no tier 'spill': its tiers are disk"):
        link_of(Problem(trace=TRACE, machine=machine, budget_bytes=1))


spans = st.tuples(st.integers(0, 9), st.integers(0, 10)).filter(lambda span: span[0] < span[1])


@given(steps=st.lists(st.tuples(spans, st.integers(-5, 5))), span=spans, limit=st.integers(-10, 10))
def test_a_curve_answers_as_a_plain_list_would(
    steps: list[tuple[tuple[int, int], int]], span: tuple[int, int], limit: int
) -> None:
    curve, plain, at_once = Curve([0] * 10), [0] * 10, Curve([0] * 10)
    at_once.add_all((lo, hi, nbytes) for (lo, hi), nbytes in steps)
    for (lo, hi), nbytes in steps:
        curve.add(lo, hi, nbytes)
        plain[lo:hi] = [value + nbytes for value in plain[lo:hi]]
    lo, hi = span
    assert curve.values() == at_once.values() == plain
    assert curve.lowest_op(lo, hi) == plain.index(min(plain[lo:hi]), lo, hi)
    assert curve.at(lo) == plain[lo]
    first = next(f for f in range(lo, hi + 1) if all(value <= limit for value in plain[f:hi]))
    assert curve.earliest(lo, hi, limit_bytes=limit) == first

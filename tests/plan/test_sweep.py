from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.core.machine import Link, Machine
from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap, Kind, Phase, Save, Storage
from lowtide.errors import BadArgument
from lowtide.plan.curve import Curve
from lowtide.plan.sweep import Sweep, link_of, predict
from lowtide.plan.verify import replay
from lowtide.testing.traces import Step, chain_trace, machine_of, make_trace, problems

TRACE = chain_trace(4, nbytes=100, duration_s=1.0)
LINK = Link(write_bytes_per_s=200.0, read_bytes_per_s=200.0)


@given(problem=problems(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_prediction_for_any_legal_swaps_is_what_the_verifier_sees(problem: Problem, data: st.DataObject) -> None:
    trace = problem.trace
    swaps = [
        Swap(gap=gap, fetch_op=data.draw(st.integers(gap.after_op + 1, gap.before_op)))
        for gap in trace.gaps()
        if data.draw(st.booleans())
    ]
    least = max(
        op.peak_bytes
        - sum(
            trace.storages[swap.gap.storage].nbytes for swap in swaps if swap.gap.after_op <= index < swap.gap.before_op
        )
        for index, op in enumerate(trace.ops)
    )
    # With little to spare, most prefetches find no room at first.
    tight = replace(problem, budget_bytes=least + data.draw(st.sampled_from((0, 4096, 2 << 20))))
    seen = replay(Plan(policy="random", budget_bytes=tight.budget_bytes, swaps=tuple(swaps)), tight)
    expected = predict(tight, swaps)
    assert seen.step_s == pytest.approx(expected.step_s, rel=1e-9)
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
    curve, plain = Curve([0] * 10), [0] * 10
    for (lo, hi), nbytes in steps:
        curve.add(lo, hi, nbytes)
        plain[lo:hi] = [value + nbytes for value in plain[lo:hi]]
    lo, hi = span
    assert curve.values() == plain
    assert curve.lowest(lo, hi) == min(plain[lo:hi])
    first = next(f for f in range(lo, hi + 1) if all(value <= limit for value in plain[f:hi]))
    assert curve.earliest(lo, hi, limit_bytes=limit) == first

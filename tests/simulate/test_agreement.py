"""The simulator and the planner's evaluator are two programs of one model: where both can answer, they answer alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lowtide.core.plan import Plan, Problem, Recompute, Swap
from lowtide.core.timeline import Lane, Timeline
from lowtide.core.trace import Gap, Kind, Save, Storage
from lowtide.core.trace import Phase as Training
from lowtide.errors import BudgetTooSmall
from lowtide.plan.costs.sweep import Sweep, predict
from lowtide.plan.policies.auto import Auto
from lowtide.plan.policies.belady import Belady
from lowtide.plan.policies.keep_all import KeepAll
from lowtide.plan.policies.swap_all import SwapAll
from lowtide.plan.policy import Policy
from lowtide.plan.views.lineage import Lineage
from lowtide.simulate import simulate
from lowtide.testing.policies import FAST
from lowtide.testing.traces import Step, machine_of, make_trace, problems


def assert_as_predicted(timeline: Timeline, problem: Problem, plan: Plan) -> None:
    expected = predict(problem, plan.swaps, plan.recomputes)
    assert timeline.step_s == pytest.approx(expected.step_s, rel=1e-9)
    assert timeline.recompute_s == pytest.approx(expected.recompute_s, rel=1e-9)
    assert timeline.stall_s == pytest.approx(expected.stall_s, rel=1e-9, abs=1e-12)
    assert timeline.peak_bytes == expected.peak_bytes
    assert timeline.moved_out_bytes == expected.moved_out_bytes
    assert timeline.moved_in_bytes == expected.moved_in_bytes


@pytest.mark.parametrize("policy", [KeepAll(), SwapAll(), Belady(), Auto()], ids=lambda policy: policy.name)
@given(problem=problems())
@settings(max_examples=60, deadline=None, phases=[Phase.generate])
def test_a_policys_plan_takes_the_time_and_bytes_that_were_predicted(policy: Policy, problem: Problem) -> None:
    plan = policy.plan(problem)
    expected = predict(problem, plan.swaps, plan.recomputes)
    if expected.peak_bytes > problem.budget_bytes:
        with pytest.raises(BudgetTooSmall):
            simulate(problem, plan, strict=True)
        return
    assert_as_predicted(simulate(problem, plan, strict=True), problem, plan)


@st.composite
def decisions(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """A problem with just enough memory for random decisions of every kind."""
    problem = draw(problems(can_recompute=True))
    trace = problem.trace
    lineage = Lineage(trace)
    swaps: list[Swap] = []
    dropped: list[Gap] = []
    for gap in trace.gaps():
        kind = draw(st.sampled_from(("keep", "swap", "swap", "drop")))
        if kind == "swap":
            fetch_op = draw(st.integers(gap.after_op + 1, gap.before_op))
            landed_op = draw(st.one_of(st.none(), st.integers(gap.after_op + 1, gap.before_op)))
            arrived_op = draw(st.one_of(st.none(), st.integers(fetch_op, gap.before_op)))
            swaps.append(Swap(gap=gap, fetch_op=fetch_op, landed_op=landed_op, arrived_op=arrived_op))
        elif kind == "drop" and lineage.makers(gap.storage, before_op=gap.before_op) is not None:
            dropped.append(gap)
    facts = Sweep(problem)
    absent = [(swap.gap.storage, swap.gap.after_op, facts.due_op(swap)) for swap in swaps]
    absent += [(gap.storage, gap.after_op, gap.before_op) for gap in dropped]
    recomputes = []
    for gap in dropped:

        def in_memory(storage: int, op: int = gap.before_op) -> bool:
            block = trace.storages[storage]
            return block.first_op < op <= block.last_op and not any(
                other == storage and begin <= op < end for other, begin, end in absent
            )

        recipe = lineage.recipe([gap.storage], available=in_memory, before_op=gap.before_op)
        if not facts.returns(gap):
            recipe = ()
        if recipe is not None:
            recomputes.append(Recompute(gap=gap, ops=recipe))
    plan = Plan(policy="random", budget_bytes=0, swaps=tuple(swaps), recomputes=tuple(recomputes))
    # Without a limit nothing waits for room: the peak of that is enough, and the least with which the plan can work.
    least = _least_bytes(problem, plan)
    spare = draw(st.sampled_from((0, 4096, 2 << 20)))
    return replace(problem, budget_bytes=least + spare), plan


def _least_bytes(problem: Problem, plan: Plan) -> int:
    facts = Sweep(problem)
    peaks = [op.peak_bytes for op in problem.trace.ops]
    for rerun in facts.reruns(plan.swaps, plan.recomputes):
        peaks[rerun.before_op] = max(peaks[rerun.before_op], rerun.peak_bytes)
    for swap in plan.swaps:
        for op in range(swap.gap.after_op, min(facts.due_op(swap), len(peaks))):
            peaks[op] -= problem.trace.storages[swap.gap.storage].nbytes
    for one in plan.recomputes:
        for op in range(one.gap.after_op, min(one.gap.before_op, len(peaks))):
            peaks[op] -= problem.trace.storages[one.gap.storage].nbytes
    return max(peaks, default=0)


@given(case=decisions())
@settings(max_examples=200, deadline=None, phases=[Phase.generate])
def test_any_decisions_take_the_time_and_bytes_that_were_predicted(case: tuple[Problem, Plan]) -> None:
    problem, plan = case
    assert_as_predicted(simulate(problem, plan, strict=True), problem, plan)


@given(case=decisions())
@settings(max_examples=60, deadline=None, phases=[Phase.generate])
def test_a_timeline_accounts_for_every_second_and_byte(case: tuple[Problem, Plan]) -> None:
    problem, plan = case
    timeline = simulate(problem, plan)
    lanes = {lane: [span for span in timeline.spans if span.lane is lane] for lane in Lane}
    assert sum(span.end_s - span.start_s for span in lanes[Lane.COMPUTE]) == pytest.approx(timeline.compute_s)
    assert sum(span.end_s - span.start_s for span in lanes[Lane.RECOMPUTE]) == pytest.approx(timeline.recompute_s)
    assert sum(span.end_s - span.start_s for span in lanes[Lane.STALL]) == pytest.approx(timeline.stall_s, abs=1e-12)
    assert sum(span.nbytes for span in lanes[Lane.OUT]) == timeline.moved_out_bytes
    assert sum(span.nbytes for span in lanes[Lane.IN]) == timeline.moved_in_bytes
    assert max((live for _, live in timeline.memory), default=0) == timeline.peak_bytes <= problem.budget_bytes
    assert [at_s for at_s, _ in timeline.memory] == sorted(at_s for at_s, _ in timeline.memory)
    for one in (Lane.COMPUTE, Lane.OUT, Lane.IN):
        for first, second in zip(lanes[one], lanes[one][1:], strict=False):
            assert second.start_s >= first.end_s


def test_a_drop_that_ends_unused_where_another_is_made_again_is_counted_once() -> None:
    # Operator 0 makes both storages. Both are dropped; 0 is needed at operator 3, 1 is let go of there without a use.
    storages = [Storage(nbytes=nbytes, kind=Kind.ACTIVATION, first_op=0, last_op=3) for nbytes in (100, 1000)]
    saves = [
        Save(storage=0, packed_op=0, free_op=1, uses=(3,), released_op=3),
        Save(storage=1, packed_op=0, free_op=1, uses=(), released_op=3),
    ]
    steps = [
        Step(name=name, phase=phase, duration_s=1.0, writes=writes)
        for name, phase, writes in (
            ("aten::max_pool2d_with_indices", Training.FORWARD, (0, 1)),
            ("aten::relu", Training.FORWARD, ()),
            ("aten::relu_backward", Training.BACKWARD, ()),
            ("aten::mul", Training.BACKWARD, ()),
        )
    ]
    trace = make_trace(steps, storages, saves)
    gaps = {gap.storage: gap for gap in trace.gaps()}
    recomputes = (Recompute(gap=gaps[0], ops=(0,)), Recompute(gap=gaps[1], ops=()))
    roomy = Problem(trace=trace, machine=machine_of(FAST), budget_bytes=10**6, can_recompute=True)
    problem = replace(roomy, budget_bytes=predict(roomy, (), recomputes).peak_bytes)
    plan = Plan(policy="test", budget_bytes=problem.budget_bytes, swaps=(), recomputes=recomputes)
    assert_as_predicted(simulate(problem, plan, strict=True), problem, plan)

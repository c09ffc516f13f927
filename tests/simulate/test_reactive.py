"""Steps without a plan, and plans that do not suffice: victims are chosen when memory runs out, as in the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.timeline import Lane
from lowtide.errors import BudgetTooSmall
from lowtide.plan.policies.auto import Auto
from lowtide.plan.policies.belady import Belady
from lowtide.plan.policies.dtr import Dtr
from lowtide.plan.policies.keep_all import KeepAll
from lowtide.plan.policies.lru import Lru
from lowtide.plan.policies.swap_all import SwapAll
from lowtide.plan.policy import About, Family, Policy, Runs, View, until_covered
from lowtide.simulate import simulate
from lowtide.simulate.view import DiscardingView
from lowtide.testing.traces import chain_trace, machine_of, problems

# Four layers of 100 bytes, a second forward and two back; 100 bytes take 0.5 s on the link.
TRACE = chain_trace(4, nbytes=100, duration_s=1.0)
LINK = Link(write_bytes_per_s=200.0, read_bytes_per_s=200.0)
PROBLEM = Problem(trace=TRACE, machine=machine_of(LINK), budget_bytes=300, can_recompute=True)


class Discarder:
    """Discards and recomputes the oldest; keeps what it was told."""

    name = "discarder"
    summary = "discards the oldest"
    about = About(family=Family.RECOMPUTE, runs=(Runs.SIMULATED,), discards_victims=True)

    def __init__(self) -> None:
        self.costs: list[tuple[int, float, float]] = []

    def plan(self, problem: Problem) -> Plan:
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes)

    def victims(self, view: View, need_bytes: int) -> Iterator[int]:
        assert isinstance(view, DiscardingView)
        self.costs += [(record, view.recompute_s(record), view.staleness_s(record)) for record in view.evictable()]
        return until_covered(sorted(view.evictable(), key=view.last_access), view, need_bytes)


@pytest.mark.parametrize("policy", [Lru(), Belady(), Auto(), SwapAll()], ids=lambda policy: policy.name)
@given(problem=problems(), planned=st.booleans())
@settings(max_examples=60, deadline=None, phases=[Phase.generate])
def test_a_reactive_step_runs_in_any_budget_above_the_floor(policy: Policy, problem: Problem, planned: bool) -> None:
    empty = Plan(policy="empty", budget_bytes=problem.budget_bytes) if planned else None
    timeline = simulate(problem, empty, policy=policy, strict=True)
    assert timeline.peak_bytes <= problem.budget_bytes
    assert timeline.step_s >= problem.trace.duration_s
    assert timeline.moved_in_bytes <= timeline.moved_out_bytes


@given(problem=problems(), data=st.data())
@settings(max_examples=80, deadline=None, phases=[Phase.generate])
def test_a_plan_that_does_not_suffice_is_helped_by_victims(problem: Problem, data: st.DataObject) -> None:
    swaps = tuple(
        Swap(gap=gap, fetch_op=data.draw(st.integers(gap.after_op + 1, gap.before_op)))
        for gap in problem.trace.gaps()
        if data.draw(st.booleans())
    )
    plan = Plan(policy="random", budget_bytes=problem.budget_bytes, swaps=swaps)
    assert simulate(problem, plan, policy=Lru(), strict=True).peak_bytes <= problem.budget_bytes


def test_the_oldest_is_written_when_memory_runs_out_and_read_on_demand() -> None:
    timeline = simulate(PROBLEM, None, policy=Lru(), strict=True)
    # Operator 3 waits half a second for storage 0 to leave; operator 7, which needs it, waits as long for its return.
    assert timeline.step_s == pytest.approx(12.0 + 0.5 + 0.5)
    moved = [
        (span.lane, span.storage, span.cause, span.op) for span in timeline.spans if span.lane in (Lane.OUT, Lane.IN)
    ]
    assert moved == [(Lane.OUT, 0, "pressure", 3), (Lane.IN, 0, "demand", 7)]
    stalls = [(span.op, span.cause, span.storage) for span in timeline.spans if span.lane is Lane.STALL]
    assert stalls == [(3, "room", None), (7, "arrival", 0)]


def test_without_a_plan_nobody_knows_the_next_use() -> None:
    seen: list[float] = []

    class Curious(Lru):
        def victims(self, view: View, need_bytes: int) -> Iterator[int]:
            seen.extend(view.next_use(record) for record in view.evictable())
            return iter(view.oldest(need_bytes))

    simulate(PROBLEM, None, policy=Curious())
    assert set(seen) == {float("inf")}
    seen.clear()
    simulate(PROBLEM, Plan(policy="empty", budget_bytes=300), policy=Curious())
    # Saves are events 0 to 3, uses 4 to 7 in the reverse order: storage 0 is used last.
    assert seen == [7, 6]


def test_a_storage_wanted_back_while_it_leaves_stays_and_is_not_read() -> None:
    class Hasty(Lru):
        """Gives up all it can, more than is needed."""

        def victims(self, view: View, need_bytes: int) -> Iterator[int]:
            return iter(view.evictable())

    # Operator 3 waits from 3 to 13 s for storage 0; storage 1 is written from 13 to 23 s and wanted back at 18 s.
    slow = machine_of(Link(write_bytes_per_s=10.0, read_bytes_per_s=1000.0, duplex=True))
    timeline = simulate(replace(PROBLEM, machine=slow), None, policy=Hasty(), strict=True)
    moved = [(span.lane, span.storage, span.start_s) for span in timeline.spans if span.lane in (Lane.OUT, Lane.IN)]
    assert moved == [(Lane.OUT, 0, 3.0), (Lane.OUT, 1, 13.0), (Lane.IN, 0, 20.0)]
    assert timeline.step_s == pytest.approx(12.0 + 10.0 + 0.1)


def test_nothing_to_give_up_names_the_operator_and_the_bytes() -> None:
    with pytest.raises(BudgetTooSmall, match=r"cannot run 'layer3', which needs at least .* \(400 bytes\)") as caught:
        simulate(PROBLEM, None, policy=KeepAll())
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (400, 300)
    with pytest.raises(BudgetTooSmall, match=r"'layer3'"):
        simulate(PROBLEM, None)


def test_below_the_floor_the_operator_that_needs_most_is_refused() -> None:
    floor = TRACE.floor_bytes()
    simulate(replace(PROBLEM, budget_bytes=floor), None, policy=Lru(), strict=True)
    with pytest.raises(BudgetTooSmall):
        simulate(replace(PROBLEM, budget_bytes=floor - 1), None, policy=Lru())


def test_victims_that_the_program_holds_are_passed_over() -> None:
    # Storage 0 is held again from operator 7 on; a policy that insists on it does not loop for ever.
    class Stubborn(Lru):
        def victims(self, view: View, need_bytes: int) -> Iterator[int]:
            return iter((0,))

    with pytest.raises(BudgetTooSmall):
        simulate(replace(PROBLEM, budget_bytes=150), None, policy=Stubborn())


# ---- discarding ----


def test_a_discarded_storage_is_made_again_where_it_is_needed() -> None:
    policy = Discarder()
    timeline = simulate(PROBLEM, None, policy=policy, strict=True)
    # Storage 0 has no operands: layer 0 runs again before layer 0's backward pass. Nothing moves.
    assert (timeline.moved_out_bytes, timeline.moved_in_bytes) == (0, 0)
    assert timeline.recompute_s == pytest.approx(1.0)
    assert timeline.step_s == pytest.approx(13.0)
    again = [(span.op, span.start_s) for span in timeline.spans if span.lane is Lane.RECOMPUTE]
    assert again == [(0, pytest.approx(10.0))]


def test_the_cost_of_a_chain_is_that_of_everything_discarded_before_it() -> None:
    policy = Discarder()
    simulate(replace(PROBLEM, budget_bytes=200), None, policy=policy, strict=True)
    costs = {}
    for record, recompute_s, staleness_s in policy.costs:
        costs.setdefault(record, recompute_s)
        assert staleness_s >= 0
    # Storage 0 costs its own layer. When storage 1 is looked at, storage 0 has been discarded: two layers.
    assert costs[0] == pytest.approx(1.0)
    assert costs[1] == pytest.approx(2.0)


@given(problem=problems(can_recompute=True))
@settings(max_examples=120, deadline=None, phases=[Phase.generate])
def test_discarding_keeps_the_budget_or_says_which_operator_needs_more(problem: Problem) -> None:
    try:
        timeline = simulate(problem, None, policy=Discarder(), strict=True)
    except BudgetTooSmall as error:
        assert error.needed_bytes > problem.budget_bytes
        return
    assert timeline.peak_bytes <= problem.budget_bytes
    assert timeline.moved_out_bytes == timeline.moved_in_bytes == 0
    assert timeline.step_s == pytest.approx(timeline.compute_s + timeline.recompute_s)


def test_who_cannot_recompute_gets_the_victims_of_a_discarding_policy_swapped() -> None:
    timeline = simulate(replace(PROBLEM, can_recompute=False), None, policy=Dtr())
    assert timeline.recompute_s == 0
    assert timeline.moved_out_bytes > 0

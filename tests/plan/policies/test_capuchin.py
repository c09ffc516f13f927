"""Capuchin: free time, triggers, feedback, and when it recomputes (Peng et al., ASPLOS 2020)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem
from lowtide.core.serialize import load_trace
from lowtide.core.timeline import Lane
from lowtide.core.trace import Gap, Kind, Phase, Save, Storage, Trace
from lowtide.plan.auto.choose import candidates
from lowtide.plan.auto.mix import Discarding
from lowtide.plan.costs.sweep import Sweep, predict
from lowtide.plan.policies.capuchin import Booking, Capuchin, time_swap, trigger_op
from lowtide.plan.policies.vdnn import Vdnn, that_fit
from lowtide.plan.policies.vdnn_pp import VdnnPlusPlus
from lowtide.plan.verify import check
from lowtide.simulate import simulate, simulate_run
from lowtide.testing.networks import network_trace
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import Step, chain_trace, make_trace
from tests.plan.policies.shapes import chain, densenet, inception, least_bytes, predicted, problem_of, resnet, vgg

LINK = Link(write_bytes_per_s=100.0, read_bytes_per_s=50.0, duplex=True)

NETS = (vgg(), resnet(), inception(), densenet())
RECORDED = [load_trace(path) for path in sorted((Path(__file__).parents[2] / "data").glob("*.trace"))]


class TestCapuchin(PolicyTests):
    def make_policy(self) -> Capuchin:
        return Capuchin()


def hand_trace(sizes: tuple[int, ...] = (200, 100)) -> Trace:
    """Twenty operators of a second; storage k is made by operator k and used again by operator 19 - k."""
    steps = [
        Step(
            name=f"aten::op{k}",
            phase=Phase.FORWARD if k < 10 else Phase.BACKWARD,
            duration_s=1.0,
            writes=(k,) if k < len(sizes) else (),
            reads=(19 - k,) if 19 - k < len(sizes) and k >= 10 else (),
        )
        for k in range(20)
    ]
    storages = [
        Storage(nbytes=nbytes, kind=Kind.INPUT, first_op=k, last_op=19 - k, producer=k)
        for k, nbytes in enumerate(sizes)
    ]
    saves = [Save(storage=k, packed_op=k, free_op=k + 1, uses=(19 - k,), released_op=19 - k) for k in range(len(sizes))]
    return make_trace(steps, storages, saves)


def test_free_time_is_what_both_transfers_leave_of_the_gap() -> None:
    trace = hand_trace()
    problem = problem_of(trace, 200, LINK)
    facts = Sweep(problem)
    first, second = candidates(problem, facts)
    lane_out, lane_in = Booking(), Booking()
    # Storage 0: evicted at 1, out by 3; back at 19, so in from 15 on. Storage 1: out 2 to 3, in from 16 to 18.
    alone = time_swap(first, facts, out=lane_out, back=lane_in)
    assert (alone.out_end_s, alone.in_start_s, alone.free_s) == (3.0, 15.0, 12.0)
    beside = time_swap(second, facts, out=lane_out, back=lane_in)
    assert (beside.out_end_s, beside.in_start_s, beside.free_s) == (3.0, 16.0, 13.0)
    # With the first one's transfers booked, the second waits for the link on both sides.
    lane_out.book(1.0, 2.0)
    lane_in.book(15.0, 4.0)
    pushed = time_swap(second, facts, out=lane_out, back=lane_in)
    assert (pushed.out_end_s, pushed.in_start_s, pushed.free_s) == (4.0, 13.0, 9.0)


def test_the_trigger_is_the_last_operator_that_begins_before_the_read_has_to() -> None:
    facts = Sweep(problem_of(hand_trace(), 200, LINK))
    gap = Gap(storage=0, after_op=1, before_op=19)
    assert trigger_op(facts, gap, 15.0) == 15
    assert trigger_op(facts, gap, 14.9) == 14
    assert trigger_op(facts, gap, 0.5) == 2, "a read cannot be asked for before its own write"
    assert trigger_op(facts, gap, 30.0) == 19


def peaked_trace() -> Trace:
    """The first storage alone, with scratch in operator 9, which is the only one to pass the budget of 550."""
    plain = hand_trace((500,))
    steps = [
        Step(
            name=op.name,
            phase=op.phase,
            duration_s=op.duration_s,
            reads=op.reads,
            writes=op.writes,
            scratch_bytes=100 if index == 9 else 0,
        )
        for index, op in enumerate(plain.ops)
    ]
    return make_trace(steps, plain.storages, plain.saves)


# Capuchin plans with a read of 5 s; the machine takes 8 s for it.
PLANNED = problem_of(peaked_trace(), 550, Link(write_bytes_per_s=1e3, read_bytes_per_s=100.0, duplex=True))
SLOWER = problem_of(peaked_trace(), 550, Link(write_bytes_per_s=1e3, read_bytes_per_s=62.5, duplex=True))


def test_a_free_swap_is_planned_with_its_trigger() -> None:
    (swap,) = Capuchin().plan(PLANNED).swaps
    assert (swap.gap, swap.fetch_op) == (Gap(storage=0, after_op=1, before_op=19), 14)


def waits(problem: Problem, plan: Plan) -> list[int | None]:
    spans = simulate(problem, plan, policy=Capuchin()).spans
    return [span.storage for span in spans if span.lane is Lane.STALL and span.cause == "arrival"]


def test_feedback_moves_a_late_trigger_earlier_by_a_twentieth_of_the_transfer() -> None:
    policy = Capuchin()
    plan = policy.plan(PLANNED)
    assert waits(SLOWER, plan) == [0]
    revised = policy.observe(SLOWER, plan, simulate(SLOWER, plan, policy=policy))
    (late,), (moved,) = plan.swaps, revised.swaps
    # 0.4 s before operator 14, and so by the one before it.
    assert (late.fetch_op, moved.fetch_op) == (14, 13)
    assert moved.gap == late.gap
    assert revised.prediction == predict(SLOWER, revised.swaps)


def test_feedback_converges() -> None:
    policy = Capuchin()
    plan = policy.plan(PLANNED)
    rounds = 0
    while waits(SLOWER, plan):
        plan = policy.observe(SLOWER, plan, simulate(SLOWER, plan, policy=policy))
        rounds += 1
        assert rounds <= 3, "8 s before operator 19 begins operator 11, three before 14"
    assert rounds == 3
    assert policy.observe(SLOWER, plan, simulate(SLOWER, plan, policy=policy)) is plan
    check(plan, SLOWER)


def misjudged(trace: Trace, *, traffic: float) -> tuple[Problem, Plan]:
    """Return a plan and a problem in which reads take half as long again as the plan was made for.

    `traffic` is how long everything saved takes on the planned link, each way, over the step's compute.
    """
    rate = sum(trace.storages[gap.storage].nbytes for gap in trace.gaps()) / (traffic * trace.duration_s)
    budget_bytes = trace.floor_bytes() + (trace.peak_bytes - trace.floor_bytes()) // 3
    planned, slower = (
        problem_of(trace, budget_bytes, Link(write_bytes_per_s=rate, read_bytes_per_s=rate / times, duplex=True))
        for times in (1.0, 1.5)
    )
    plan = Capuchin().plan(planned)
    assert len(plan.swaps) > 2
    return slower, plan


def under_feedback(problem: Problem, plan: Plan, *, rounds: int) -> list[int]:
    """Return how many reads each step waited for, until none did."""
    policy = Capuchin()
    found = []
    for _ in range(rounds):
        found.append(len(waits(problem, plan)))
        if not found[-1]:
            break
        plan = policy.observe(problem, plan, simulate(problem, plan, policy=policy))
    return found


@pytest.mark.parametrize("trace", [*NETS, *RECORDED], ids=lambda trace: f"{trace.model}-{len(trace.ops)}")
def test_feedback_converges_on_networks_whose_transfers_fit(trace: Trace) -> None:
    for traffic in (0.1, 0.3) if trace in NETS else (0.1,):
        assert under_feedback(*misjudged(trace, traffic=traffic), rounds=40)[-1] == 0


def test_what_converges_had_to_wait_at_first() -> None:
    first = [len(waits(*misjudged(trace, traffic=0.1))) for trace in (*NETS, *RECORDED)]
    assert sum(count > 0 for count in first) >= 4


def test_feedback_does_not_converge_where_the_link_is_nearly_full() -> None:
    """The counterexample of docs/systems.md: a plan without waits exists, and earlier reads chase one another."""
    problem, plan = misjudged(resnet(), traffic=0.6)
    as_early_as_fits = that_fit(problem, [replace(swap, fetch_op=swap.gap.after_op + 1) for swap in plan.swaps])
    assert not waits(problem, replace(plan, swaps=as_early_as_fits))
    assert all(under_feedback(problem, plan, rounds=40))


def test_a_run_under_feedback_counts_its_trials_and_gets_no_slower() -> None:
    problem = problem_of(
        vgg(), (vgg().floor_bytes() + vgg().peak_bytes) // 2, Link(write_bytes_per_s=4e9, read_bytes_per_s=4e9)
    )
    run = simulate_run(problem, Capuchin(), steps=6)
    assert run.timelines[-1].step_s <= run.timelines[1].step_s * (1 + 1e-9)
    assert run.timelines[0].step_s > run.timelines[-1].step_s, "the measured step is passive, and slower"


def sublinear(problem: Problem, every: int) -> Plan:
    """Chen et al.: every so many saved storages are kept, those between are made again, segment by segment."""
    facts = Sweep(problem)
    found = candidates(problem, facts)
    discardable = [one for k, one in enumerate(found) if k % every]
    mix = Discarding(problem, facts, found).mix(discardable, discarded={one.gap for one in discardable}, once=False)
    recomputed = {one.gap.storage for one in mix.recomputes}
    return Plan(
        policy="sublinear",
        budget_bytes=problem.budget_bytes,
        recomputes=tuple(one for one in mix.recomputes if one.gap.storage in recomputed),
    )


@pytest.mark.parametrize("trace", [vgg(), resnet(), inception(), densenet()], ids=lambda trace: trace.model)
@pytest.mark.parametrize("rate", [2e9, 4e9, 8e9])
@pytest.mark.parametrize("can_recompute", [False, True], ids=("swap", "recompute"))
def test_it_is_no_slower_than_vdnn_and_its_successor_at_equal_memory_on_a_moderate_link(
    trace: Trace, rate: float, can_recompute: bool
) -> None:
    link = Link(write_bytes_per_s=rate, read_bytes_per_s=rate, duplex=True)
    for share in (0.1, 0.5):
        least = least_bytes(Vdnn(), trace)
        budget_bytes = least + int(share * (trace.peak_bytes - least))
        problem = problem_of(trace, budget_bytes, link, can_recompute=can_recompute)
        ours, *theirs = (predicted(policy.plan(problem)) for policy in (Capuchin(), VdnnPlusPlus(), Vdnn()))
        for their in theirs:
            assert their.peak_bytes <= budget_bytes
            assert ours.step_s <= their.step_s * (1 + 1e-9)


@pytest.mark.parametrize("trace", [vgg(), resnet(), inception(), densenet()], ids=lambda trace: trace.model)
def test_it_is_no_slower_than_sublinear_recomputation_at_equal_memory_on_a_moderate_link(trace: Trace) -> None:
    link = Link(write_bytes_per_s=4e9, read_bytes_per_s=4e9, duplex=True)
    roomy = problem_of(trace, 1 << 50, link, can_recompute=True)
    theirs = sublinear(roomy, round(len(trace.gaps()) ** 0.5))
    prediction = predict(roomy, theirs.swaps, theirs.recomputes)
    assert theirs.recomputes
    assert prediction.recompute_s > 0
    problem = problem_of(trace, max(prediction.peak_bytes, trace.floor_bytes()), link, can_recompute=True)
    ours = Capuchin().plan(problem)
    check(ours, problem)
    assert predicted(ours).step_s <= prediction.step_s


@pytest.mark.parametrize("trace", [vgg(), resnet(), inception(), densenet()], ids=lambda trace: trace.model)
def test_with_an_endless_link_it_never_recomputes(trace: Trace) -> None:
    link = Link(write_bytes_per_s=float("inf"), read_bytes_per_s=float("inf"))
    for budget_bytes in (trace.floor_bytes(), (trace.floor_bytes() + trace.peak_bytes) // 2):
        plan = Capuchin().plan(problem_of(trace, budget_bytes, link, can_recompute=True))
        assert plan.swaps
        assert not plan.recomputes
        assert predicted(plan).stall_s == 0


@pytest.mark.parametrize(
    "trace",
    [chain_trace(12), network_trace(chain(*["conv", "relu"] * 6), model="linear")],
    ids=lambda trace: trace.model,
)
def test_with_a_dead_link_it_only_recomputes(trace: Trace) -> None:
    link = Link(write_bytes_per_s=1e-3, read_bytes_per_s=1e-3)
    budget_bytes = (trace.floor_bytes() + trace.peak_bytes) // 2
    problem = problem_of(trace, budget_bytes, link, can_recompute=True)
    plan = Capuchin().plan(problem)
    check(plan, problem)
    assert plan.recomputes
    assert not plan.swaps


def test_where_operators_cannot_run_again_it_swaps_and_says_so() -> None:
    trace = chain_trace(12)
    plan = Capuchin().plan(problem_of(trace, trace.floor_bytes(), Link(write_bytes_per_s=1e6, read_bytes_per_s=1e6)))
    assert plan.swaps
    assert not plan.recomputes
    assert any("only swaps" in note for note in plan.notes)


def test_the_lane_finds_holes_between_bookings() -> None:
    lane = Booking()
    lane.book(2.0, 1.0)
    lane.book(5.0, 2.0)
    assert lane.earliest(0.0, 2.0) == 0.0
    assert lane.earliest(0.5, 2.0) == 3.0
    assert lane.earliest(0.5, 3.0) == 7.0
    assert lane.latest(10.0, 3.0) == 7.0
    assert lane.latest(7.5, 1.0) == 4.0
    assert lane.latest(7.5, 2.5) == -0.5


def pressed_trace(sizes: tuple[int, ...], *, op: int, scratch_bytes: int) -> Trace:
    """The hand trace with scratch in one operator, which alone passes the budget."""
    plain = hand_trace(sizes)
    steps = [
        Step(
            name=one.name,
            phase=one.phase,
            duration_s=one.duration_s,
            reads=one.reads,
            writes=one.writes,
            scratch_bytes=scratch_bytes if index == op else 0,
        )
        for index, one in enumerate(plain.ops)
    ]
    return make_trace(steps, plain.storages, plain.saves)


def test_what_was_chosen_before_holds_the_link_against_later_reads() -> None:
    # Storage 1 has more free time and is read from 16 to 18; storage 0 has to be there at 19 and takes 4 s: by 16.
    problem = problem_of(pressed_trace((200, 100), op=9, scratch_bytes=1000), 1000, LINK)
    fetched = {swap.gap.storage: swap.fetch_op for swap in Capuchin().plan(problem).swaps}
    assert fetched == {1: 16, 0: 12}


def test_what_was_chosen_before_holds_the_link_against_later_writes() -> None:
    # Storage 1 is written from 2 to 3, storage 0 only after it, from 3 to 5: too late for the operator at 4.
    problem = problem_of(pressed_trace((200, 100), op=4, scratch_bytes=1000), 1000, LINK)
    plan = Capuchin().plan(problem)
    assert {swap.gap.storage for swap in plan.swaps} == {0, 1}
    assert plan.notes[0].startswith("1 swaps are free, 1 more")


def remade_trace(shapes: tuple[tuple[int, float], ...]) -> Trace:
    """Values that each take (bytes, seconds) to make from a parameter; all are used in backward, in reverse order."""
    count = len(shapes)
    steps = [
        Step(name=f"aten::make{k}", phase=Phase.FORWARD, duration_s=seconds, reads=(count,), writes=(k,))
        for k, (_, seconds) in enumerate(shapes)
    ]
    steps += [Step(name="aten::pause", phase=Phase.FORWARD, duration_s=1.0)]
    steps += [
        Step(name=f"aten::use{k}", phase=Phase.BACKWARD, duration_s=1.0, reads=(k,)) for k in reversed(range(count))
    ]
    storages = [
        Storage(nbytes=nbytes, kind=Kind.ACTIVATION, first_op=k, last_op=2 * count - k, producer=k)
        for k, (nbytes, _) in enumerate(shapes)
    ]
    storages.append(Storage(nbytes=1, kind=Kind.PARAM, first_op=-1, last_op=2 * count + 1))
    saves = [
        Save(storage=k, packed_op=k, free_op=k + 1, uses=(2 * count - k,), released_op=2 * count - k)
        for k in range(count)
    ]
    return make_trace(steps, storages, saves)


def test_the_recomputation_that_saves_most_bytes_a_second_is_chosen() -> None:
    # 100, 150 and 50 bytes a second: neither the quickest (0) nor the largest (2).
    trace = remade_trace(((100, 1.0), (300, 2.0), (400, 8.0)))
    dead = Link(write_bytes_per_s=1e-3, read_bytes_per_s=1e-3)
    plan = Capuchin().plan(problem_of(trace, trace.peak_bytes - 50, dead, can_recompute=True))
    assert [one.gap.storage for one in plan.recomputes] == [1]
    assert plan.swaps == ()

"""Slow memory that operators read in place: three clocks that agree, prices, dirty pages, runs and capacities."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lowtide.core.machine import Access, Link, Machine
from lowtide.core.plan import IDENTITY, CodecCost, MeasuredTime, Place, Plan, Problem, Swap
from lowtide.core.serialize import dumps, loads
from lowtide.core.trace import Kind, Reach, Storage, Trace
from lowtide.core.trace import Phase as Training
from lowtide.errors import PlanError
from lowtide.plan.costs.operator_times import OperatorTimes
from lowtide.plan.costs.options import Choice, Options
from lowtide.plan.costs.sweep import Sweep, predict
from lowtide.plan.verify import check_executable, replay
from lowtide.simulate import simulate
from lowtide.testing.plans import placed_plans
from lowtide.testing.traces import Step, make_trace, problems, slow_memory, touched_traces


def with_slow_memory(problem: Problem, link: Link, other: Link | None = None) -> Problem:
    links = {"spill": link} if other is None else {"spill": link, "far": other}
    machine = Machine(name="slow", links=links, memory_bytes_per_s=4e10, flops_per_s=1e12)
    return replace(problem, machine=machine, tiers=tuple(links), can_place=True)


@st.composite
def placed(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """A step on a machine with one or two slow memories, and storages that live there for a while."""
    problem = draw(problems(touched_traces(max_ops=14, max_storages=8)))
    problem = with_slow_memory(problem, draw(slow_memory()), draw(st.none() | slow_memory()))
    plan = draw(placed_plans(problem))
    needed = predict(problem, plan.swaps, (), plan.places).peak_bytes
    budget_bytes = max(problem.budget_bytes, needed)
    return replace(problem, budget_bytes=budget_bytes), replace(plan, budget_bytes=budget_bytes)


def assert_all_agree(problem: Problem, plan: Plan) -> None:
    expected = predict(problem, plan.swaps, plan.recomputes, plan.places)
    assert expected.peak_bytes <= problem.budget_bytes
    for other in (replay(plan, problem), simulate(problem, plan, strict=True, allocator="arena")):
        assert other.peak_bytes == expected.peak_bytes
        assert other.step_s == pytest.approx(expected.step_s, rel=1e-9, abs=1e-12)
        assert other.stall_s == pytest.approx(expected.stall_s, rel=1e-6, abs=1e-9)
        assert other.slow_s == pytest.approx(expected.slow_s, rel=1e-9, abs=1e-12)
        assert other.moved_out_bytes == expected.moved_out_bytes
        assert other.moved_in_bytes == expected.moved_in_bytes


@given(case=placed())
@settings(max_examples=150, deadline=None, phases=[Phase.generate])
def test_any_places_take_the_same_on_all_clocks(case: tuple[Problem, Plan]) -> None:
    assert_all_agree(*case)


@given(case=placed())
@settings(max_examples=40, deadline=None, phases=[Phase.generate])
def test_a_plan_with_places_and_its_step_survive_a_file(case: tuple[Problem, Plan]) -> None:
    problem, plan = case
    assert loads(dumps(plan)) == plan
    timeline = simulate(problem, plan)
    assert loads(dumps(timeline)) == timeline


@given(case=placed())
@settings(max_examples=60, deadline=None, phases=[Phase.generate])
def test_what_a_tier_holds_is_what_the_verifier_and_the_sweep_count(case: tuple[Problem, Plan]) -> None:
    problem, plan = case
    seen = replay(plan, problem).tier_peak_bytes
    for capacity in (1, 1 << 20, 1 << 40):
        links = {tier: replace(link, capacity_bytes=capacity) for tier, link in problem.machine.links.items()}
        bounded = replace(problem, machine=replace(problem.machine, links=links))
        room = Sweep(bounded).room_in_tiers(plan.swaps, plan.places)
        assert room == {tier: capacity - nbytes for tier, nbytes in seen.items()}
        if any(nbytes > capacity for nbytes in seen.values()):
            with pytest.raises(PlanError, match="V8: tier"):
                replay(plan, bounded)


# Four operators of a second. A parameter of 100 bytes is read by the first and the third and written by the last; an
# activation of 200 bytes is made by the first and read by the third.
def step_trace() -> Trace:
    steps = [
        Step(name="forward", phase=Training.FORWARD, duration_s=1.0, reads=(0,), writes=(1,)),
        Step(name="wait", phase=Training.FORWARD, duration_s=1.0),
        Step(name="backward", phase=Training.BACKWARD, duration_s=1.0, reads=(0, 1)),
        Step(name="update", phase=Training.UPDATE, duration_s=1.0, writes=(0,)),
    ]
    storages = [
        Storage(nbytes=100, kind=Kind.PARAM, first_op=-1, last_op=4),
        Storage(nbytes=200, kind=Kind.ACTIVATION, first_op=0, last_op=2, producer=0),
    ]
    return make_trace(steps, storages, (), reach=Reach.TOUCHED)


# Reading 100 bytes in place takes half a second, writing them one; they are copied in two seconds each way, or in one
# if somebody waits. Memory delivers 1000 bytes a second and each operator moves them as fast as it can.
SLOW = Link(
    write_bytes_per_s=50.0,
    read_bytes_per_s=50.0,
    waited_write_bytes_per_s=100.0,
    waited_read_bytes_per_s=100.0,
    page_bytes=1,
    access=Access(read_bytes_per_s=200.0, write_bytes_per_s=100.0),
)
MACHINE = Machine(name="slow", links={"spill": SLOW}, memory_bytes_per_s=1000.0, flops_per_s=1.0)
PROBLEM = Problem(trace=step_trace(), machine=MACHINE, budget_bytes=300, can_place=True)
ACTIVATION = Place(storage=1, tier="spill", from_op=0, until_op=3)
PARAMETER = Place(storage=0, tier="spill", from_op=0, until_op=4)


def plan_of(*places: Place, budget_bytes: int = 300) -> Plan:
    return Plan(policy="test", budget_bytes=budget_bytes, places=places)


def test_what_lives_in_slow_memory_takes_no_fast_memory_and_makes_its_operators_slower() -> None:
    seen = predict(PROBLEM, (), (), (ACTIVATION,))
    # "forward" writes 200 of its 300 bytes in place: a third of its second is left, and 2 s in slow memory. "backward"
    # reads 200 of 300: 1 s there.
    assert seen.slow_s == pytest.approx((1 / 3 + 2 - 1) + (1 / 3 + 1 - 1))
    assert (seen.peak_bytes, seen.moved_out_bytes, seen.moved_in_bytes, seen.stall_s) == (100, 0, 0, 0.0)
    assert_all_agree(PROBLEM, plan_of(ACTIVATION))


def test_state_may_live_in_slow_memory_for_good() -> None:
    seen = predict(PROBLEM, (), (), (PARAMETER,))
    assert (seen.peak_bytes, seen.moved_out_bytes, seen.moved_in_bytes) == (200, 0, 0)
    assert_all_agree(PROBLEM, plan_of(PARAMETER))


def test_a_migration_that_is_waited_for_has_its_own_rate_and_no_operator_beside_it() -> None:
    waited = Place(storage=1, tier="spill", from_op=1, until_op=2, landed_op=1)
    assert predict(PROBLEM, (), (), (waited,)).stall_s == pytest.approx(2.0 + 2.0)
    assert_all_agree(PROBLEM, plan_of(waited))
    # Beside "wait" the write takes 4 s, of which one is hidden; the read is waited for as before.
    beside = replace(waited, landed_op=None)
    assert predict(PROBLEM, (), (), (beside,)).stall_s == pytest.approx(3.0 + 2.0)
    assert_all_agree(PROBLEM, plan_of(beside))


def test_what_is_changed_in_slow_memory_comes_back_and_leaves_again_without_a_write() -> None:
    # Away from the update to the first operator of the next step, and again beside "wait": nobody writes it in between.
    away = Place(storage=0, tier="spill", from_op=3, until_op=4)
    again = Place(storage=0, tier="spill", from_op=1, until_op=2)
    seen = predict(PROBLEM, (), (), (away, again))
    assert (seen.moved_out_bytes, seen.moved_in_bytes) == (0, 200)
    assert_all_agree(PROBLEM, plan_of(away, again))
    # The copy is relied on: the tier holds it all the time.
    assert replay(plan_of(away, again), PROBLEM).tier_peak_bytes == {"spill": 100}


def test_what_is_changed_in_one_slow_memory_is_stale_in_another() -> None:
    # Away in "spill" beside "wait", and in "far" for the update, which writes it there: next time "spill" is stale.
    problem = with_slow_memory(PROBLEM, SLOW, SLOW)
    first = Place(storage=0, tier="spill", from_op=1, until_op=2)
    second = Place(storage=0, tier="far", from_op=3, until_op=4)
    assert predict(problem, (), (), (first, second)).moved_out_bytes == 100
    assert_all_agree(problem, plan_of(first, second))
    unchanged = tuple(replace(op, writes=tuple(s for s in op.writes if s != 0)) for op in problem.trace.ops)
    frozen = replace(problem, trace=replace(problem.trace, ops=unchanged))
    assert predict(frozen, (), (), (first, second)).moved_out_bytes == 0
    assert_all_agree(frozen, plan_of(first, second))


def test_a_part_of_a_storage_may_live_in_slow_memory() -> None:
    half = replace(ACTIVATION, nbytes=100)
    seen = predict(PROBLEM, (), (), (half,))
    assert seen.peak_bytes == 200
    assert seen.slow_s == pytest.approx((2 / 3 + 1 - 1) + (2 / 3 + 0.5 - 1))
    assert_all_agree(PROBLEM, plan_of(half))


def test_storages_that_share_pages_move_as_one_run() -> None:
    link = replace(SLOW, write_latency_s=0.25, read_latency_s=0.25, page_bytes=128)
    problem = replace(PROBLEM, machine=replace(MACHINE, links={"spill": link}))
    apart = [Place(storage=s, tier="spill", from_op=1, until_op=2, landed_op=1) for s in (0, 1)]
    together = [replace(place, run=7) for place in apart]
    rows, shared = Options(problem).places(apart), Options(problem).places(together)
    assert [row.link_bytes for row in rows] == [128, 256]
    assert [row.link_bytes for row in shared] == [184, 200]  # 384 bytes: three pages
    assert sum(row.read_s for row in shared) == pytest.approx(0.25 + 3.84)
    assert sum(row.read_s for row in rows) == pytest.approx(0.5 + 3.84)
    assert_all_agree(problem, plan_of(*together))
    with pytest.raises(PlanError, match="V2: storages 0 and 1 move as run 7"):
        replay(plan_of(together[0], replace(together[1], until_op=3, fetch_op=3)), problem)


def test_a_measured_time_goes_before_the_roofline() -> None:
    measured = MeasuredTime(op=2, tier="spill", storages=frozenset({1}), duration_s=5.0)
    times = OperatorTimes(replace(PROBLEM, measured=(measured,)))
    assert times.of(2, {1: ("spill", 200)}) == 5.0
    assert times.of(2, {1: ("spill", 100)}) != 5.0
    assert times.of(2, {0: ("spill", 100)}) == pytest.approx(2 / 3 + 0.5)
    assert times.of(1, {0: ("spill", 100)}) == 1.0


def test_slow_memory_on_channels_of_its_own_works_beside_fast_memory() -> None:
    own = replace(SLOW, access=Access(read_bytes_per_s=200.0, write_bytes_per_s=100.0, own_channel=True))
    times = OperatorTimes(replace(PROBLEM, machine=replace(MACHINE, links={"spill": own})))
    assert times.of(2, {0: ("spill", 100)}) == pytest.approx(max(1 - 0.1, 0.5))
    computing = tuple(replace(op, flops=5.0) for op in PROBLEM.trace.ops)  # 5 s at the machine's peak
    busy = OperatorTimes(replace(PROBLEM, trace=replace(PROBLEM.trace, ops=computing)))
    assert busy.of(2, {1: ("spill", 200)}) == pytest.approx(0.1 + 1.0)


def test_the_table_of_options_has_a_row_for_staying_in_slow_memory() -> None:
    gap = next(gap for gap in PROBLEM.trace.gaps() if gap.storage == 1)
    (row,) = [row for row in Options(PROBLEM).of(gap) if row.choice is Choice.PLACE]
    assert (row.tier, row.kept_bytes) == ("spill", 0)
    assert row.compute_s == pytest.approx(1 / 3)
    assert Choice.PLACE not in {row.choice for row in Options(replace(PROBLEM, can_place=False)).of(gap)}


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (replace(ACTIVATION, storage=9), "V1: storage 9 does not exist"),
        (replace(ACTIVATION, tier="disk"), "V1: .* is in tier 'disk'; of the problem's tiers, 1 can be read in place"),
        (replace(ACTIVATION, until_op=4), "V1: .* is not within its life, which is operators 0 to 3"),
        (replace(ACTIVATION, nbytes=201), "V1: .* is about 201 bytes of a storage of 200"),
        (replace(PARAMETER, from_op=1, until_op=6), "V1: .* is not within its life"),
        (replace(PARAMETER, from_op=4, until_op=6), "V2: .* begin in this step"),
        (replace(PARAMETER, from_op=1, until_op=3, fetch_op=2), "V2: .* has to be after 2, where it is touched"),
        (replace(PARAMETER, from_op=1, until_op=3, landed_op=3), "V2: .* has to be from 1 to 2, where it is touched"),
    ],
)
def test_places_that_cannot_be_are_refused(place: Place, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replay(plan_of(place), PROBLEM)


def test_two_places_of_one_storage_do_not_overlap_in_the_next_step_either() -> None:
    wrapping = Place(storage=0, tier="spill", from_op=3, until_op=6)
    with pytest.raises(PlanError, match=r"V3: .* of the next step overlap"):
        replay(plan_of(Place(storage=0, tier="spill", from_op=1, until_op=2), wrapping), PROBLEM)


def test_an_executor_that_cannot_place_refuses_the_plan() -> None:
    with pytest.raises(PlanError, match=r"V1: .* executor cannot do \(can_place is false"):
        check_executable(plan_of(ACTIVATION), replace(PROBLEM, can_place=False))


def test_what_operators_use_in_place_is_not_encoded() -> None:
    gap = next(gap for gap in PROBLEM.trace.gaps() if gap.storage == 0)
    coded = Plan(policy="test", budget_bytes=300, swaps=(Swap(gap=gap, fetch_op=gap.before_op, codec="zvc"),))
    known = replace(PROBLEM, codecs=(IDENTITY, CodecCost(name="zvc", ratio=0.5)))
    with pytest.raises(PlanError, match=r"V1: .* through codec 'zvc' to 'spill', whose pages operators use in place"):
        check_executable(coded, known)
    check_executable(coded, replace(known, can_place=False))

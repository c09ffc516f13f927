"""Plans as the operators of a step execute them: what leaves and comes back, and what cannot be asked for."""

from __future__ import annotations

import pytest

from lowtide.capture.builder import Recorded
from lowtide.core.machine import Access, Link
from lowtide.core.plan import Place, Plan, Problem, Recompute, Swap
from lowtide.core.trace import Gap, Kind, Phase, Reach, Storage, Trace
from lowtide.errors import PlanError
from lowtide.plan.verify import check
from lowtide.residency.range_schedule import Action, ActionKind, compile_ranges
from lowtide.testing.traces import Step, machine_of, make_trace


def inheriting(*, touched_op: int | None = None) -> Trace:
    """A gradient is made by operator 3 and read by 4 and 6; the next step frees it with operator 1."""
    reads = {4: (0,), 6: (0,)}
    if touched_op is not None:
        reads[touched_op] = (1,)
    steps = [
        Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1.0, reads=reads.get(k, ()), writes=(0,) if k == 3 else ())
        for k in range(8)
    ]
    storages = [
        Storage(nbytes=10, kind=Kind.GRAD, first_op=3, last_op=8, producer=3),
        Storage(nbytes=10, kind=Kind.GRAD, first_op=-1, last_op=1),
    ]
    return make_trace(steps, storages, (), reach=Reach.TOUCHED)


def swap(after_op: int, before_op: int, fetch_op: int) -> Swap:
    return Swap(gap=Gap(storage=0, after_op=after_op, before_op=before_op), fetch_op=fetch_op)


def actions(trace: Trace, *swaps: Swap) -> list[Action]:
    """Return what a plan that keeps the verifier's rules sets off."""
    plan = Plan(policy="test", budget_bytes=1000, swaps=swaps)
    link = Link(write_bytes_per_s=100.0, read_bytes_per_s=100.0)
    check(plan, Problem(trace=trace, machine=machine_of(link), budget_bytes=1000))
    recorded = Recorded(trace=trace, positions=(), use_events=(), serials=(7, 5), births=((3, 0), None))
    return list(compile_ranges(plan, recorded, tier="spill").actions)


LEAVES = Action(op=7, kind=ActionKind.LEAVE, storage=0, tier="spill")


def test_what_the_next_step_frees_leaves_in_its_own_and_is_never_fetched() -> None:
    trace = inheriting()
    assert trace.gaps()[-1] == Gap(storage=0, after_op=7, before_op=10)
    for fetch_op in (8, 9, 10):
        assert actions(trace, swap(7, 10, fetch_op)) == [LEAVES]


def test_what_the_next_step_touches_comes_back_on_demand() -> None:
    trace = inheriting(touched_op=1)
    assert trace.gaps()[-1] == Gap(storage=0, after_op=7, before_op=9)
    assert actions(trace, swap(7, 9, 9)) == [LEAVES]


def test_before_its_last_gap_it_leaves_as_anything_else() -> None:
    first = Action(op=5, kind=ActionKind.LEAVE, storage=0, tier="spill")
    assert actions(inheriting(), swap(5, 6, 6), swap(7, 10, 10)) == [first, LEAVES]


@pytest.mark.parametrize(
    ("refused", "touched_op", "reason"),
    [
        (swap(8, 10, 10), None, "begins with operator 0 of the next step, which knows it as storage 1"),
        (swap(7, 9, 9), None, "is fetched at operator 1 of the next step, which knows it as storage 1"),
        (swap(7, 9, 8), 1, "is fetched at operator 0 of the next step, which knows it as storage 1"),
    ],
)
def test_nothing_is_asked_for_it_in_the_next_step(refused: Swap, touched_op: int | None, reason: str) -> None:
    with pytest.raises(PlanError, match=f"V2: .* {reason}"):
        actions(inheriting(touched_op=touched_op), refused)


def test_what_is_discarded_is_made_again_by_its_list() -> None:
    """Operator 0 makes it, operator 5 reads it; the step's other storage is fetched for operator 5 as well."""
    touching = {0: (0,), 1: (1,), 5: (0, 1)}
    steps = [
        Step(
            name=f"op{k}",
            phase=Phase.FORWARD,
            duration_s=1.0,
            reads=touching.get(k, ()) if k == 5 else (),
            writes=touching.get(k, ()) if k < 5 else (),
        )
        for k in range(7)
    ]
    storages = [
        Storage(nbytes=10, kind=Kind.ACTIVATION, first_op=0, last_op=5, producer=0),
        Storage(nbytes=10, kind=Kind.ACTIVATION, first_op=1, last_op=5, producer=1),
    ]
    trace = make_trace(steps, storages, (), reach=Reach.TOUCHED)
    plan = Plan(
        policy="test",
        budget_bytes=1000,
        swaps=(Swap(gap=Gap(storage=1, after_op=2, before_op=5), fetch_op=4),),
        recomputes=(Recompute(gap=Gap(storage=0, after_op=2, before_op=5), ops=(0,)),),
    )
    link = Link(write_bytes_per_s=100.0, read_bytes_per_s=100.0)
    check(plan, Problem(trace=trace, machine=machine_of(link), budget_bytes=1000, can_recompute=True))
    recorded = Recorded(trace=trace, positions=(), use_events=(), serials=(7, 8), births=((0, 0), (1, 0)))
    schedule = compile_ranges(plan, recorded, tier="spill")
    assert schedule.remakes == ((0,),)
    assert schedule.actions == (
        Action(op=2, kind=ActionKind.LEAVE, storage=1, tier="spill"),
        Action(op=2, kind=ActionKind.DISCARD, storage=0, tier="spill", remake=0),
        Action(op=4, kind=ActionKind.FETCH, storage=1, tier="spill"),
        Action(op=5, kind=ActionKind.REMAKE, storage=0, tier="spill"),
    )


# ---- slow memory ----


def placed_actions(trace: Trace, *places: Place) -> tuple[list[tuple[int, ActionKind]], list[str | None]]:
    """Return what places set off, as operators and kinds, and where the storages begin."""
    plan = Plan(policy="test", budget_bytes=1000, places=places)
    access = Access(read_bytes_per_s=100.0, write_bytes_per_s=100.0)
    link = Link(write_bytes_per_s=100.0, read_bytes_per_s=100.0, access=access)
    check(plan, Problem(trace=trace, machine=machine_of(link), budget_bytes=1000, can_place=True))
    births = tuple((block.first_op, 0) if block.first_op >= 0 else None for block in trace.storages)
    recorded = Recorded(
        trace=trace, positions=(), use_events=(), serials=tuple(range(len(trace.storages))), births=births
    )
    schedule = compile_ranges(plan, recorded, tier="spill")
    return [(one.op, one.kind) for one in schedule.actions], [one.begins_in for one in schedule.storages]


def one_storage(block: Storage, *touches: int) -> Trace:
    steps = [
        Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1.0, reads=(0,) if k in touches else (), writes=())
        for k in range(8)
    ]
    return make_trace(steps, [block], (), reach=Reach.TOUCHED)


FOREVER = Storage(nbytes=10, kind=Kind.PARAM, first_op=-1, last_op=8)
ACTIVATION = Storage(nbytes=10, kind=Kind.ACTIVATION, first_op=1, last_op=6, producer=1)


def test_what_is_born_in_slow_memory_does_not_migrate_there_and_comes_back_where_the_plan_says() -> None:
    trace = one_storage(ACTIVATION, 1, 3, 6)
    there = Place(storage=0, tier="spill", from_op=1, until_op=6, fetch_op=5)
    assert placed_actions(trace, there) == ([(5, ActionKind.FETCH), (6, ActionKind.RETURN)], ["spill"])
    for_life = Place(storage=0, tier="spill", from_op=1, until_op=7)
    assert placed_actions(trace, for_life) == ([], ["spill"])


def test_who_waits_for_a_migration_does_so_before_anything_takes_its_room() -> None:
    there = Place(storage=0, tier="spill", from_op=2, until_op=6, landed_op=2)
    expected = [(2, ActionKind.PLACE), (2, ActionKind.LANDED), (6, ActionKind.RETURN)]
    assert placed_actions(one_storage(ACTIVATION, 1, 6), there) == (expected, [None])


def test_a_parameter_that_is_there_in_every_step_stays() -> None:
    there = Place(storage=0, tier="spill", from_op=0, until_op=8)
    assert placed_actions(one_storage(FOREVER, 2, 5), there) == ([(0, ActionKind.PLACE)], ["spill"])


def test_a_parameter_may_be_there_across_the_end_of_the_step() -> None:
    there = Place(storage=0, tier="spill", from_op=6, until_op=10, fetch_op=9)
    expected = [(1, ActionKind.FETCH), (2, ActionKind.RETURN), (6, ActionKind.PLACE)]
    assert placed_actions(one_storage(FOREVER, 2, 5), there) == (expected, ["spill"])

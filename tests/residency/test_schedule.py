"""Plans over a step's events: where writes, reads and barriers are placed."""

from __future__ import annotations

from dataclasses import replace

from lowtide.capture.builder import Recorded
from lowtide.core.plan import Plan, Swap
from lowtide.core.trace import Gap, Kind, Op, Phase, Save, Storage, Trace
from lowtide.plan.costs.curve import Curve
from lowtide.residency.schedule import Requests, StepPlan, compile_plan


def trace(*, saves: tuple[Save, ...], ops: int = 10) -> Trace:
    return Trace(
        ops=tuple(
            Op(name=f"op{index}", phase=Phase.FORWARD, start_s=0, duration_s=1, peak_bytes=100) for index in range(ops)
        ),
        storages=tuple(Storage(nbytes=10, kind=Kind.ACTIVATION, first_op=0, last_op=9) for _ in saves),
        saves=saves,
        static_bytes=0,
    )


def save(storage: int, *, packed: int, free: int, uses: tuple[int, ...]) -> Save:
    return Save(storage=storage, packed_op=packed, free_op=free, uses=uses, released_op=uses[-1] + 1)


# Two storages: saved before operators 1 and 2, unpacked before 7 (the second), 8 (the first) and 9 (the first again).
RECORDED = Recorded(
    trace=trace(saves=(save(0, packed=0, free=2, uses=(8, 9)), save(1, packed=1, free=3, uses=(7,)))),
    positions=(1, 2, 7, 8, 9),
    use_events=((3, 4), (2,)),
)
SIGNATURE = (10, 11, -2, -1, -1)


def swap(storage: int, after: int, before: int, fetch: int) -> Swap:
    return Swap(gap=Gap(storage=storage, after_op=after, before_op=before), fetch_op=fetch)


def compiled(*swaps: Swap) -> StepPlan:
    return compile_plan(Plan(policy="test", budget_bytes=1, swaps=swaps), RECORDED, SIGNATURE)


def test_a_swap_right_after_the_save_leaves_as_soon_as_it_is_free() -> None:
    made = compiled(swap(0, 2, 8, 8))
    assert made.swapped == frozenset({0})
    assert not made.leave


def test_a_swap_that_begins_later_than_its_gap_leaves_only_then() -> None:
    made = compiled(swap(0, 7, 8, 8))
    assert made.swapped == frozenset()
    assert made.leave == {2: (0,)}


def test_a_swap_between_two_uses_leaves_at_the_first_event_after_its_gap_begins() -> None:
    recorded = Recorded(
        trace=trace(saves=(save(0, packed=0, free=2, uses=(4, 8)),)), positions=(1, 4, 6, 8), use_events=((1, 3),)
    )
    made = compile_plan(Plan(policy="test", budget_bytes=1, swaps=(swap(0, 5, 8, 7),)), recorded, (1, 2, 3, 4))
    assert made.swapped == frozenset()
    assert made.leave == {2: (0,)}
    assert made.due == {2: (0,)}


def test_a_prefetch_is_asked_for_at_the_first_event_once_its_operator_may_begin() -> None:
    # Operator 7 begins after event 2 (the unpack before it); before operator 5, at event 1, there might be no room yet.
    assert compiled(swap(0, 2, 8, 7)).due == {2: (0,)}
    assert compiled(swap(0, 2, 8, 5)).due == {2: (0,)}


def test_a_prefetch_is_asked_for_before_its_use_in_any_case() -> None:
    # Operators 3 to 6 begin after event 1, and the next event is the use that ends the gap.
    assert compiled(swap(1, 3, 7, 5)).due == {1: (1,)}


def test_a_prefetch_takes_no_memory_that_the_plan_leaves_to_operators_before_it() -> None:
    # Gradients come back together before operator 8; the last event before that is before operator 4.
    recorded = Recorded(
        trace=trace(saves=tuple(save(k, packed=k, free=k + 2, uses=(8,)) for k in range(3))),
        positions=(1, 2, 3, 4, 8, 8, 8),
        use_events=((4,), (5,), (6,)),
    )

    def due(limit_bytes: int, *swaps: Swap) -> dict[int, tuple[int, ...]]:
        plan = Plan(policy="test", budget_bytes=limit_bytes, swaps=swaps)
        bytes_at = Curve([0, 0, 0, 0, 0, 50, 0, 0, 0])
        return dict(compile_plan(plan, recorded, range(7), requests=Requests(plan, recorded, bytes_at)).due)

    swaps = (swap(0, 2, 8, 6), swap(1, 3, 8, 6), swap(2, 4, 8, 6))
    assert due(80, *swaps) == {3: (0, 1, 2)}
    assert due(70, *swaps) == {3: (0, 1), 4: (2,)}, "the third is asked for when the first is used"
    assert due(50, *swaps) == {4: (1, 2)}, "the first is used before it could be asked for"
    assert due(50, swap(0, 2, 8, 4)) == {3: (0,)}, "as planned: nothing comes earlier than that"


def test_the_plan_that_is_executed_asks_for_reads_where_the_program_has_events() -> None:
    def asked(*swaps: Swap, budget_bytes: int = 80) -> list[int]:
        plan = Plan(policy="test", budget_bytes=budget_bytes, swaps=swaps)
        requests = Requests(plan, RECORDED, Curve([0, 0, 0, 0, 75, 75, 0, 0, 0, 0]))
        return [one.fetch_op for one in requests.as_plan(plan).swaps]

    assert asked(swap(0, 2, 8, 5)) == [7], "the first event once operator 5 may begin"
    assert asked(swap(0, 2, 8, 7)) == [7]
    assert asked(swap(0, 2, 8, 8)) == [8], "on demand"
    assert asked(swap(1, 3, 7, 5), budget_bytes=90) == [2], "the last event before: the next is its use"
    assert asked(swap(1, 3, 7, 5)) == [7], "which operator 4 leaves no room for"


def test_prefetches_of_one_event_are_asked_for_in_the_plans_order() -> None:
    recorded = Recorded(
        trace=trace(saves=tuple(save(k, packed=k, free=k + 2, uses=(9 - k,)) for k in range(3))),
        positions=(1, 2, 3, 7, 8, 9),
        use_events=((5,), (4,), (3,)),
    )

    def due(*swaps: Swap) -> dict[int, tuple[int, ...]]:
        return dict(compile_plan(Plan(policy="test", budget_bytes=1, swaps=swaps), recorded, range(6)).due)

    # Asked for at one operator, what is due first goes first: backward uses what was made last.
    assert due(swap(0, 2, 9, 6), swap(1, 3, 8, 6)) == {3: (1, 0)}
    # Asked for at different operators that lie between the same events, the earlier one goes first.
    assert due(swap(1, 3, 8, 6), swap(0, 2, 9, 5)) == {3: (0, 1)}
    # A barrier is when it is due.
    assert due(swap(1, 3, 8, 6), replace(swap(0, 2, 9, 6), arrived_op=7)) == {3: (0, 1)}


def test_what_leaves_at_one_event_leaves_in_the_plans_order() -> None:
    made = compile_plan(
        Plan(policy="test", budget_bytes=1, swaps=(swap(0, 6, 8, 8), swap(1, 5, 7, 7))),
        Recorded(
            trace=trace(saves=(save(0, packed=0, free=2, uses=(8,)), save(1, packed=1, free=3, uses=(9,)))),
            positions=(1, 2, 7, 8, 9),
            use_events=((3,), (4,)),
        ),
        SIGNATURE,
    )
    assert made.leave == {2: (1, 0)}


def test_what_is_fetched_on_demand_is_never_due() -> None:
    assert compiled(swap(0, 2, 8, 8)).due == {}


def test_a_barrier_falls_on_the_first_event_once_its_operator_may_begin() -> None:
    # The write can be asked for at event 1, before operator 2: who waits for it before operator 3 does so at event 2.
    waiting = replace(swap(0, 2, 8, 7), landed_op=3)
    assert compiled(waiting).awaited == {2: (0,)}


def test_a_read_that_nobody_but_its_user_waits_for_has_no_barrier() -> None:
    assert compiled(replace(swap(0, 2, 8, 7), arrived_op=8)).awaited == {}


def test_a_swap_that_ends_before_the_gap_it_lies_in_belongs_to_the_use_that_follows() -> None:
    assert compiled(swap(0, 2, 6, 5)).swapped == frozenset({0})


def test_every_save_keeps_its_uses_and_the_step_its_signature() -> None:
    made = compiled()
    assert made.uses == {0: (3, 4), 1: (2,)}
    assert made.signature == SIGNATURE


def test_keys_are_the_ordinals_of_saves_and_not_of_storages() -> None:
    recorded = Recorded(
        trace=trace(saves=(save(1, packed=0, free=2, uses=(8,)), save(0, packed=1, free=3, uses=(7,)))),
        positions=(1, 2, 7, 8),
        use_events=((3,), (2,)),
    )
    made = compile_plan(Plan(policy="test", budget_bytes=1, swaps=(swap(1, 2, 8, 8),)), recorded, (1, 2, 3, 4))
    assert made.swapped == frozenset({0})

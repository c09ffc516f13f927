"""Plans over a step's events: where they are placed, and which of them the running step follows."""

from __future__ import annotations

from dataclasses import replace

from lowtide.capture.builder import Recorded
from lowtide.core.plan import Plan, Swap
from lowtide.core.trace import Gap, Kind, Op, Phase, Save, Storage, Trace
from lowtide.execute.steps import Matcher, Requests, StepPlan, Turn, compile_plan
from lowtide.plan.curve import Curve


def plan(*signature: int, **fields: object) -> StepPlan:
    return StepPlan(signature=signature, **fields)  # type: ignore[arg-type]


def walk(matcher: Matcher, *signature: int) -> list[Turn]:
    matcher.begin()
    return [matcher.advance(event) for event in signature]


def known(*plans: StepPlan) -> Matcher:
    """A matcher that tries these plans in this order."""
    matcher = Matcher()
    for each in reversed(plans):
        matcher.add(each)
    return matcher


# ---- following ----


def test_without_plans_a_step_is_reactive_from_start_to_end() -> None:
    matcher = Matcher()
    assert matcher.begin() is None
    assert matcher.advance(1) == Turn()
    assert matcher.followed is None
    assert matcher.finish() is None


def test_a_step_that_matches_gets_what_is_due_and_what_leaves_at_each_event() -> None:
    matcher = known(plan(1, 2, 3, due={1: (7,)}, leave={2: (8, 9)}))
    assert walk(matcher, 1, 2, 3) == [Turn(), Turn(due=(7,)), Turn(leave=(8, 9))]


def test_what_a_synchronous_plan_waits_for_is_told_at_its_event() -> None:
    matcher = known(plan(1, 2, 3, awaited={2: (4,)}))
    assert walk(matcher, 1, 2, 3) == [Turn(), Turn(), Turn(awaited=(4,))]


def test_an_event_that_does_not_match_switches_to_a_plan_with_the_same_beginning() -> None:
    first, second = plan(1, 2, 3), plan(1, 2, 4, leave={2: (5,)})
    matcher = known(first, second)
    assert walk(matcher, 1, 2, 4)[-1] == Turn(changed=True, leave=(5,))
    assert matcher.followed is second


def test_a_switch_delivers_what_the_new_plan_wanted_back_by_now() -> None:
    matcher = known(plan(1, 2, 3), plan(1, 2, 4, due={0: (5,), 1: (6,), 2: (7,), 3: (8,)}))
    assert walk(matcher, 1, 2, 4)[-1] == Turn(changed=True, due=(5, 6, 7))


def test_an_event_that_no_plan_knows_ends_in_a_reactive_step() -> None:
    matcher = known(plan(1, 2, 3, due={2: (7,)}), plan(1, 2, 4))
    assert walk(matcher, 1, 2, 9, 3) == [Turn(), Turn(), Turn(changed=True), Turn()]
    assert matcher.followed is None
    assert matcher.finish() is None


def test_a_plan_with_the_same_event_but_another_beginning_is_not_followed() -> None:
    matcher = known(plan(1, 2, 3), plan(9, 2, 4))
    walk(matcher, 1, 2, 4)
    assert matcher.followed is None


def test_a_step_longer_than_its_plan_turns_reactive() -> None:
    matcher = known(plan(1, 2))
    assert walk(matcher, 1, 2, 3)[-1] == Turn(changed=True)


def test_a_step_that_ends_early_did_not_follow_the_longer_plan() -> None:
    matcher = known(plan(1, 2, 3))
    walk(matcher, 1, 2)
    assert matcher.finish() is None


def test_a_step_that_ends_early_is_told_from_a_plan_that_it_matches_whole() -> None:
    longer, shorter = plan(1, 2, 3), plan(1, 2)
    matcher = known(longer, shorter)
    walk(matcher, 1, 2)
    assert matcher.followed is longer
    assert matcher.finish() is shorter


def test_the_plan_that_a_step_followed_is_the_first_to_be_tried_in_the_next() -> None:
    first, second = plan(1, 2), plan(3, 4)
    matcher = known(first, second)
    assert matcher.begin() is first
    matcher.advance(3)
    matcher.advance(4)
    assert matcher.finish() is second
    assert matcher.begin() is second


def test_a_new_plan_replaces_the_one_of_the_same_signature() -> None:
    old, new = plan(1, 2, due={0: (1,)}), plan(1, 2, due={1: (1,)})
    matcher = known(new, old)
    assert walk(matcher, 1, 2) == [Turn(), Turn(due=(1,))]
    matcher.advance(9)
    assert matcher.followed is None, "the old plan is still known"


def test_only_so_many_plans_are_known_and_the_least_recent_goes() -> None:
    matcher = Matcher()
    for number in range(5):
        matcher.add(plan(number), most=3)
    assert [walk(matcher, number)[0][0] and matcher.followed is None for number in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]


# ---- compiling ----


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

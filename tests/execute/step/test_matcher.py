"""Which of the known plans a running step follows."""

from __future__ import annotations

from lowtide.execute.step.matcher import Matcher, Turn
from lowtide.residency.schedule import StepPlan


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

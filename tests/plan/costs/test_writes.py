from __future__ import annotations

import pytest

from lowtide.core.plan import Plan, Recompute, Swap
from lowtide.core.trace import Gap, Kind, Phase, Reach, Storage, Trace
from lowtide.plan.costs.writes import Writes
from lowtide.plan.verify.pages import decisions_that_write
from lowtide.testing.traces import Step, make_trace


def trace_of(*writers: int, first_op: int = -1, last_op: int = 10, reach: Reach = Reach.TOUCHED) -> Trace:
    """Ten operators, of which some write the one storage there is."""
    steps = [
        Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1.0, writes=(0,) if k in writers else ()) for k in range(10)
    ]
    storage = Storage(nbytes=100, kind=Kind.OTHER, first_op=first_op, last_op=last_op)
    return make_trace(steps, [storage], (), reach=reach)


def swaps_of(*begins: int, tier: str = "spill") -> list[Swap]:
    return [Swap(gap=Gap(storage=0, after_op=op, before_op=op + 1), fetch_op=op + 1, tier=tier) for op in begins]


def both(trace: Trace, swaps: list[Swap], recomputes: tuple[Recompute, ...] = ()) -> list[bool]:
    """Return which swaps write; the planner's and the verifier's answer have to be one."""
    found = Writes(trace).of(swaps, recomputes)
    plan = Plan(policy="test", budget_bytes=1, swaps=tuple(swaps), recomputes=recomputes)
    assert decisions_that_write(plan, trace) == {k for k, writes in enumerate(found) if writes}
    return found


@pytest.mark.parametrize(
    ("writers", "begins", "expected"),
    [
        ((), (2, 5), [False, False]),  # frozen, or inference: the tier has had it for long
        ((9,), (2, 5), [True, False]),  # changed at the end of the step before
        ((3,), (2, 5), [False, True]),
        ((3, 9), (2, 5), [True, True]),
        ((1,), (2,), [True]),  # alone: since its own beginning a step ago
        ((9,), (2, 5, 10), [False, False, True]),  # the update's write goes out with the last, for the two of the next
    ],
)
def test_what_lives_on_is_written_if_it_changed_since_it_left_last(
    writers: tuple[int, ...], begins: tuple[int, ...], expected: list[bool]
) -> None:
    assert both(trace_of(*writers), swaps_of(*begins)) == expected


def test_what_the_step_makes_is_written_the_first_time() -> None:
    assert both(trace_of(0, first_op=0, last_op=8), swaps_of(2, 5)) == [True, False]
    assert both(trace_of(0, 4, first_op=0, last_op=8), swaps_of(2, 5)) == [True, True]
    assert both(trace_of(first_op=0), swaps_of(2)) == [True]
    assert both(trace_of(first_op=-1, last_op=8), swaps_of(2)) == [True]


def test_a_copy_elsewhere_does_not_count() -> None:
    here, there = swaps_of(2, 7), swaps_of(5, tier="host")
    assert both(trace_of(9), [*here, *there]) == [True, False, True]
    assert both(trace_of(), [*here, *there]) == [False, False, False]


def test_what_was_made_again_has_changed() -> None:
    again = Recompute(gap=Gap(storage=0, after_op=3, before_op=4), ops=(0,))
    assert both(trace_of(0, first_op=0, last_op=9), swaps_of(2, 6), (again,)) == [True, True]


def test_what_autograd_saved_is_always_written() -> None:
    assert both(trace_of(reach=Reach.SAVED), swaps_of(2, 5)) == [True, True]

"""Whatever is to be discarded, the swaps and recomputations of a mix fit together."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings

from lowtide.core.machine import Link
from lowtide.core.plan import Problem, Swap
from lowtide.core.trace import Kind, Op, Phase, Reach, Storage, Trace
from lowtide.plan.auto.choose import candidates
from lowtide.plan.auto.mix import Discarding
from lowtide.plan.compose import compose
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.verify import check_executable
from lowtide.testing.traces import machine_of, problems, touched_traces

LINK = Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9)


def check_all_discarded(problem: Problem, *, once: bool) -> int:
    """Discard everything that can be made again; return how many recomputations that takes."""
    facts = Sweep(problem)
    found = candidates(problem, facts)
    discarding = Discarding(problem, facts, found)
    discarded = {one.gap for one in found if discarding.remake_s[one.gap] < inf}
    mix = discarding.mix(found, discarded=discarded, once=once)
    swaps = [Swap(gap=one.gap, fetch_op=one.gap.before_op) for one in mix.swapped]
    check_executable(compose("mix", problem, swaps, mix.recomputes), problem)
    return len(mix.recomputes)


@pytest.mark.parametrize("once", [True, False])
def test_what_begins_to_be_away_with_an_operator_is_there_for_the_recipe_before_it(once: bool) -> None:
    """Storage 0 is free to go when operator 4 begins, and storage 1 is made again from it before that and once more."""
    touches: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
        ((), (0,)),
        ((0,), (1,)),
        ((1,), (2,)),
        ((0,), (3,)),
        ((1,), (4,)),
        ((2, 3), (5,)),
        ((1, 4), (6,)),
        ((5,), (7,)),
        ((0,), (8,)),
    )
    ops = tuple(
        Op(
            name=f"aten::op{k}",
            phase=Phase.FORWARD,
            start_s=k * 1e-3,
            duration_s=1e-3,
            peak_bytes=800,
            reads=r,
            writes=w,
        )
        for k, (r, w) in enumerate(touches)
    )
    storages = tuple(
        Storage(nbytes=100, kind=Kind.ACTIVATION, first_op=k, last_op=len(ops) - 1, producer=k) for k in range(len(ops))
    )
    trace = Trace(ops=ops, storages=storages, saves=(), static_bytes=0, reach=Reach.TOUCHED)
    problem = Problem(trace=trace, machine=machine_of(LINK), budget_bytes=trace.peak_bytes, can_recompute=True)
    assert check_all_discarded(problem, once=once) > 0


@settings(max_examples=60, deadline=None, database=None)
@given(problem=problems(touched_traces(max_ops=24, max_storages=14), can_recompute=True))
def test_everything_discarded_at_random_is_a_plan(problem: Problem) -> None:
    for once in (True, False):
        check_all_discarded(problem, once=once)

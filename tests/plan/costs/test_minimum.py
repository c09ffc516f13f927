from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given, settings

from lowtide import registry
from lowtide.core.machine import Link
from lowtide.core.plan import Problem, Swap
from lowtide.core.trace import Gap, Kind, Phase, Reach, Storage, Trace
from lowtide.plan.costs.minimum import LeastTraffic, least_total_bytes, least_traffic
from lowtide.plan.costs.sweep import ends_unused
from lowtide.plan.costs.writes import Writes
from lowtide.testing.traces import (
    Step,
    chain_trace,
    machine_of,
    make_trace,
    problems,
    touched_traces,
    training_trace,
)

FAST = Link(write_bytes_per_s=1e10, read_bytes_per_s=1e10)


def brute_force(trace: Trace, *, budget_bytes: int) -> LeastTraffic:
    """Return the least of each figure over every set of whole gaps that fits the budget."""
    ends, writes, count = ends_unused(trace), Writes(trace), len(trace.ops)
    found = []
    gaps = trace.gaps()
    for chosen in chain.from_iterable(combinations(gaps, size) for size in range(len(gaps) + 1)):
        if any(_height(trace, chosen, op) > budget_bytes for op in range(count)):
            continue
        swaps = [Swap(gap=gap, fetch_op=gap.before_op) for gap in chosen]
        sizes = [trace.storages[gap.storage].nbytes for gap in chosen]
        out = sum(nbytes for nbytes, dirty in zip(sizes, writes.of(swaps), strict=True) if dirty)
        back = sum(nbytes for gap, nbytes in zip(chosen, sizes, strict=True) if ends.get(gap.storage) != gap.before_op)
        found.append((back, out))
    return LeastTraffic(
        read_bytes=min(back for back, _ in found),
        written_bytes=min(out for _, out in found),
        total_bytes=min(back + out for back, out in found),
    )


def _height(trace: Trace, chosen: tuple[Gap, ...], op: int) -> int:
    moments = (op, op + len(trace.ops))
    away = sum(
        trace.storages[gap.storage].nbytes
        for gap in chosen
        if any(gap.after_op <= moment < gap.before_op for moment in moments)
    )
    return trace.ops[op].peak_bytes - away


@given(problem=problems(touched_traces(max_ops=8, max_storages=4)))
@settings(max_examples=200, deadline=None)
def test_no_choice_of_gaps_moves_less(problem: Problem) -> None:
    bound = least_traffic(problem.trace, budget_bytes=problem.budget_bytes)
    best = brute_force(problem.trace, budget_bytes=problem.budget_bytes)
    assert bound.read_bytes <= best.read_bytes
    assert bound.written_bytes <= best.written_bytes
    assert bound.total_bytes <= best.total_bytes
    assert bound.total_bytes >= max(bound.read_bytes, bound.written_bytes)
    together = least_total_bytes(problem.trace, budget_bytes=problem.budget_bytes)
    assert together is not None
    assert together <= best.total_bytes


def test_half_of_the_state_fitting_means_half_of_the_traffic() -> None:
    # Parameters and two moments of one size, and next to nothing else: what does not fit goes out and comes back.
    trace = training_trace(24, nbytes=1 << 20, activation_bytes=1, moments=2)
    state_bytes = 3 * 24 << 20
    for share in (0.25, 0.5, 0.75):
        away = int((1 - share) * state_bytes)
        bound = least_traffic(trace, budget_bytes=trace.peak_bytes - away)
        assert (bound.read_bytes, bound.written_bytes, bound.total_bytes) == (away, away, 2 * away)


def test_the_bound_is_reached_where_whole_storages_cover_the_need_of_one_operator() -> None:
    steps = [
        Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1.0, writes=(0,) * (k == 3), scratch_bytes=200 * (k == 1))
        for k in range(4)
    ]
    storages = [Storage(nbytes=200, kind=Kind.OPTIMIZER, first_op=-1, last_op=4)]
    trace = make_trace(steps, storages, (), reach=Reach.TOUCHED)
    least = least_traffic(trace, budget_bytes=200)
    assert least == brute_force(trace, budget_bytes=200)
    assert least == LeastTraffic(read_bytes=200, written_bytes=200, total_bytes=400)


def test_operators_that_lack_different_bytes_need_more_than_the_one_that_lacks_most() -> None:
    # Two storages in turn: whenever one is used, the other has to be away.
    steps = [Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1.0, reads=(k % 2,)) for k in range(4)]
    storages = [Storage(nbytes=100, kind=Kind.PARAM, first_op=-1, last_op=4) for _ in range(2)]
    trace = make_trace(steps, storages, (), reach=Reach.TOUCHED)
    assert least_traffic(trace, budget_bytes=100).total_bytes < 400
    assert least_total_bytes(trace, budget_bytes=100) == 400 == brute_force(trace, budget_bytes=100).total_bytes
    assert least_total_bytes(trace, budget_bytes=50) is None


def test_gaps_between_two_writes_share_one() -> None:
    steps = [
        Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1.0, writes=(0,) * (k == 0), reads=(k % 2,))
        for k in range(4)
    ]
    storages = [Storage(nbytes=100, kind=Kind.PARAM, first_op=-1, last_op=4) for _ in range(2)]
    trace = make_trace(steps, storages, (), reach=Reach.TOUCHED)
    # The first is read for two operators and written once, though it leaves twice; the second is only read.
    assert least_total_bytes(trace, budget_bytes=100) == 500 == brute_force(trace, budget_bytes=100).total_bytes


def test_what_fits_moves_nothing() -> None:
    trace = training_trace(4)
    assert least_total_bytes(trace, budget_bytes=trace.peak_bytes) == 0
    nothing = LeastTraffic(read_bytes=0, written_bytes=0, total_bytes=0)
    assert least_traffic(trace, budget_bytes=trace.peak_bytes) == nothing


def test_what_autograd_saved_has_a_bound_too() -> None:
    trace = chain_trace(8, nbytes=100)
    bound = least_traffic(trace, budget_bytes=trace.peak_bytes - 250)
    assert (bound.read_bytes, bound.written_bytes, bound.total_bytes) == (250, 250, 500)


def test_auto_comes_close_to_the_least_traffic() -> None:
    trace = training_trace(96, nbytes=1 << 20, activation_bytes=1 << 16, update_s=4e-3)
    floor = trace.floor_bytes()
    for share in (0.25, 0.5, 0.75):
        budget_bytes = floor + int(share * (trace.peak_bytes - floor))
        problem = Problem(trace=trace, machine=machine_of(FAST), budget_bytes=budget_bytes)
        plan = registry.policy("auto").plan(problem)
        assert plan.prediction is not None
        moved = plan.prediction.moved_out_bytes + plan.prediction.moved_in_bytes
        least_bytes = least_total_bytes(trace, budget_bytes=budget_bytes)
        assert least_bytes is not None
        assert least_bytes <= moved <= 1.1 * least_bytes


def test_what_is_read_has_room_beside_it_when_it_is_used() -> None:
    steps = [Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1.0, reads=(k,)) for k in range(8)]
    # Of eight weights that a pass uses one by one six fit: two are absent while a third is used.
    for sizes, budget_bytes, expected in (([100] * 8, 600, 300), ([10 * k for k in range(1, 9)], 300, 60 + 40)):
        weights = [Storage(nbytes=nbytes, kind=Kind.PARAM, first_op=-1, last_op=8) for nbytes in sizes]
        trace = make_trace(steps, weights, (), reach=Reach.TOUCHED)
        assert least_traffic(trace, budget_bytes=budget_bytes).read_bytes == expected
        assert brute_force(trace, budget_bytes=budget_bytes).read_bytes == expected

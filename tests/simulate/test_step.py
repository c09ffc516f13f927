"""Plans on a virtual clock, worked out by hand: barriers, recomputation, codecs, mover threads, several tiers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.core.machine import Link, Machine
from lowtide.core.plan import CodecCost, Plan, Problem, Recompute, Swap
from lowtide.core.timeline import Lane, Timeline
from lowtide.core.trace import Gap
from lowtide.errors import BadArgument, BudgetTooSmall, PlanError
from lowtide.plan.policies.swap_all import SwapAll
from lowtide.simulate import Resources, simulate
from lowtide.testing.traces import chain_trace, machine_of

# Four layers of 100 bytes, a second forward and two back; 100 bytes take 0.5 s on the link. The gaps are those of
# storage 0 in [2, 7), 1 in [3, 6) and 2 in [4, 5).
TRACE = chain_trace(4, nbytes=100, duration_s=1.0)
LINK = Link(write_bytes_per_s=200.0, read_bytes_per_s=200.0)
PROBLEM = Problem(trace=TRACE, machine=machine_of(LINK), budget_bytes=400)


def swap(storage: int, after_op: int, before_op: int, fetch_op: int, **fields: object) -> Swap:
    gap = Gap(storage=storage, after_op=after_op, before_op=before_op)
    return Swap(gap=gap, fetch_op=fetch_op, **fields)  # type: ignore[arg-type]


def run(
    *swaps: Swap, problem: Problem = PROBLEM, recomputes: tuple[Recompute, ...] = (), **options: object
) -> Timeline:
    plan = Plan(policy="test", budget_bytes=problem.budget_bytes, swaps=swaps, recomputes=recomputes)
    return simulate(problem, plan, strict=True, **options)  # type: ignore[arg-type]


def lane(timeline: Timeline, which: Lane) -> list[tuple[int | None, float, float]]:
    return [(span.storage, span.start_s, span.end_s) for span in timeline.spans if span.lane is which]


def test_a_step_without_decisions_takes_the_time_of_the_trace() -> None:
    timeline = run()
    assert timeline.step_s == TRACE.duration_s == timeline.compute_s
    assert (timeline.stall_s, timeline.moved_out_bytes, timeline.peak_bytes) == (0.0, 0, TRACE.peak_bytes)
    assert [span.op for span in timeline.spans] == list(range(8))
    assert timeline.memory[0] == (0.0, 100)


def test_memory_falls_when_a_write_lands_and_rises_when_its_read_starts() -> None:
    timeline = run(swap(0, 2, 7, 6))
    assert lane(timeline, Lane.OUT) == [(0, 2.0, 2.5)]
    assert lane(timeline, Lane.IN) == [(0, 8.0, 8.5)]
    moments = dict(timeline.memory)
    assert (moments[2.0], moments[2.5], moments[3.0]) == (300, 200, 300)
    # Beside operator 6, where 100 bytes of storage 1 are alive, its own return takes 100 more.
    assert timeline.stall_s == 0


def idling(link: Link, speedup: float) -> Problem:
    return replace(PROBLEM, machine=machine_of(replace(link, idle_speedup=speedup)))


def test_a_wait_lasts_less_on_a_link_that_is_faster_while_the_program_waits() -> None:
    # Storage 0 is read on demand at 10.0: half a second beside operators, a fifth of that while the program waits.
    slow, fast = (run(swap(0, 2, 7, 7), problem=idling(LINK, speedup)) for speedup in (1.0, 5.0))
    assert (slow.stall_s, fast.stall_s) == (pytest.approx(0.5), pytest.approx(0.1))
    assert (slow.step_s, fast.step_s) == (pytest.approx(12.5), pytest.approx(12.1))
    assert lane(fast, Lane.STALL) == lane(fast, Lane.IN) == [(0, pytest.approx(10.0), pytest.approx(10.1))]
    assert lane(fast, Lane.OUT) == lane(slow, Lane.OUT) == [(0, 2.0, 2.5)]
    assert fast.spans[-1].end_s == pytest.approx(12.1)
    assert [live for _, live in fast.memory] == [live for _, live in slow.memory]
    assert fast.peak_bytes == slow.peak_bytes


def test_where_a_codec_or_another_link_takes_part_waits_last_as_beside_operators() -> None:
    both = Machine(name="two", links={"spill": replace(LINK, idle_speedup=5.0), "disk": LINK})
    trip = swap(0, 2, 7, 7)
    slow = run(trip, replace(swap(1, 3, 6, 6), tier="disk"), problem=replace(PROBLEM, machine=both))
    assert slow.stall_s == pytest.approx(1.0)
    codec = CodecCost(name="half", encode_bytes_per_s=100.0, decode_bytes_per_s=100.0, ratio=0.5)
    coded = run(replace(trip, codec="half"), problem=replace(idling(LINK, 5.0), codecs=(codec,)))
    assert coded.stall_s == pytest.approx(0.25 + 1.0)


def test_what_began_beside_an_operator_ends_sooner_in_the_wait_for_it() -> None:
    # A read of 2.8 s, asked for two seconds before it is needed: the rest goes at the faster rate.
    link = Link(write_bytes_per_s=200.0, read_bytes_per_s=100 / 2.8)
    timeline = run(swap(0, 2, 7, 6), problem=idling(link, 4.0))
    assert lane(timeline, Lane.IN) == [(0, 8.0, pytest.approx(10.2))]
    assert timeline.stall_s == pytest.approx(0.2)


def test_a_barrier_holds_an_operator_until_the_write_has_landed() -> None:
    slow = replace(PROBLEM, machine=machine_of(Link(write_bytes_per_s=25.0, read_bytes_per_s=200.0)))
    # The write takes 4 s from 2 s on; operator 3 wants to begin at 3 s.
    assert run(swap(0, 2, 7, 6), problem=slow).stall_s == 0
    held = run(swap(0, 2, 7, 6, landed_op=3), problem=slow)
    assert held.stall_s == pytest.approx(3.0)
    stalls = [(span.op, span.cause, span.storage) for span in held.spans if span.lane is Lane.STALL]
    assert stalls == [(3, "landing", 0)]


def test_a_barrier_holds_an_operator_until_the_read_has_arrived() -> None:
    slow = replace(PROBLEM, machine=machine_of(Link(write_bytes_per_s=200.0, read_bytes_per_s=25.0)))
    # The read takes 4 s from 4 s on; operator 5 begins at 6 s, operator 7 at 10 s.
    assert run(swap(0, 2, 7, 4), problem=slow).stall_s == 0
    held = run(swap(0, 2, 7, 4, arrived_op=5), problem=slow)
    assert held.stall_s == pytest.approx(2.0)
    assert [(span.op, span.cause) for span in held.spans if span.lane is Lane.STALL] == [(5, "arrival")]


def test_operators_run_again_before_the_one_that_needs_what_was_discarded() -> None:
    gaps = [Gap(storage=0, after_op=2, before_op=7), Gap(storage=1, after_op=3, before_op=6)]
    # Storage 1 is made from storage 0, which is made for that, and made once more when it is needed itself.
    timeline = run(
        recomputes=(Recompute(gap=gaps[0], ops=(0,)), Recompute(gap=gaps[1], ops=(0, 1))),
        problem=replace(PROBLEM, budget_bytes=300, can_recompute=True),
    )
    assert timeline.recompute_s == pytest.approx(3.0)
    assert timeline.step_s == pytest.approx(12.0 + 3.0)
    again = [(span.op, span.start_s) for span in timeline.spans if span.lane is Lane.RECOMPUTE]
    assert again == [(0, pytest.approx(8.0)), (1, pytest.approx(9.0)), (0, pytest.approx(12.0))]
    assert timeline.moved_out_bytes == 0


def test_a_step_that_runs_operators_again_is_watched_and_others_are_not() -> None:
    watched = replace(PROBLEM, budget_bytes=400, can_recompute=True, watch_s=0.8)
    again = run(recomputes=(Recompute(gap=Gap(storage=0, after_op=2, before_op=7), ops=(0,)),), problem=watched)
    assert again.step_s == pytest.approx(12.0 + 1.0 + 0.8)
    assert again.compute_s == pytest.approx(12.8)
    assert again.stall_s == pytest.approx(0.0)
    assert run(problem=replace(watched, budget_bytes=1 << 20)).step_s == pytest.approx(12.0)


def test_a_storage_that_cannot_be_made_again_is_named() -> None:
    ops = (replace(TRACE.ops[0], name="aten::native_dropout"), *TRACE.ops[1:])
    problem = replace(PROBLEM, trace=replace(TRACE, ops=ops), can_recompute=True)
    gap = Gap(storage=0, after_op=2, before_op=7)
    with pytest.raises(PlanError, match=r"storages \[0\] cannot be made again before operator 7"):
        run(recomputes=(Recompute(gap=gap, ops=()),), problem=problem)


def test_a_plan_that_names_no_gap_of_the_trace_is_refused() -> None:
    with pytest.raises(PlanError, match=r"storage 3 .* has no gap"):
        run(swap(3, 4, 5, 5))
    with pytest.raises(PlanError, match=r"storage 0 .* operators 1 to 7"):
        run(swap(0, 1, 7, 5))


def test_an_operator_that_does_not_fit_is_named_with_numbers() -> None:
    with pytest.raises(BudgetTooSmall, match=r"'layer3'.*\(400 bytes\).*operator 3"):
        run(problem=replace(PROBLEM, budget_bytes=300))


# ---- resources ----


def test_a_codec_takes_the_engines_time_and_shrinks_what_travels() -> None:
    codec = CodecCost(name="half", encode_bytes_per_s=100.0, decode_bytes_per_s=400.0, ratio=0.5)
    timeline = run(swap(0, 2, 7, 6, codec="half"), problem=replace(PROBLEM, codecs=(codec,)))
    # Encoded from 2 to 3 s, 50 bytes travel in 0.25 s; read from 8 to 8.25 s and decoded in another 0.25 s.
    assert lane(timeline, Lane.OUT) == [(0, 3.0, 3.25)]
    assert lane(timeline, Lane.IN) == [(0, 8.0, 8.5)]
    assert (timeline.moved_out_bytes, timeline.moved_in_bytes) == (50, 50)


def test_the_codec_engine_serves_one_storage_at_a_time() -> None:
    codec = CodecCost(name="slow", encode_bytes_per_s=25.0, decode_bytes_per_s=1e9)
    both = (swap(0, 2, 7, 7, codec="slow"), swap(1, 3, 6, 6, codec="slow"))
    timeline = run(*both, problem=replace(PROBLEM, codecs=(codec,)))
    # Storage 0 is encoded from 2 to 6 s, storage 1 from 6 to 10 s: operator 6, which wants it at 8 s, waits for that.
    assert [start_s for _, start_s, _ in lane(timeline, Lane.OUT)] == [6.0, 10.0]


def test_an_unknown_codec_and_impossible_resources_are_refused() -> None:
    with pytest.raises(BadArgument, match=r"codec 'zstd' is not known: give it in Problem.*known: identity"):
        run(swap(0, 2, 7, 6, codec="zstd"))
    with pytest.raises(BadArgument, match="0 mover threads"):
        Resources(movers=0)
    with pytest.raises(BadArgument, match="codec 'x' needs rates above 0"):
        CodecCost(name="x", encode_bytes_per_s=0.0, decode_bytes_per_s=1.0)


def test_one_mover_thread_makes_a_duplex_link_serve_one_direction_at_a_time() -> None:
    duplex = Link(write_bytes_per_s=50.0, read_bytes_per_s=50.0, duplex=True)
    problem = replace(PROBLEM, machine=machine_of(duplex))
    # Storage 0 is read from 4.5 s (asked for at 4 s) while storage 1 is written from 4 to 6 s.
    swaps = (swap(0, 2, 7, 4), swap(1, 4, 6, 6))
    free = run(*swaps, problem=problem)
    assert lane(free, Lane.IN)[0] == (0, 4.0, 6.0)
    one = run(*swaps, problem=problem, resources=Resources(movers=1))
    assert lane(one, Lane.OUT) == [(0, 2.0, 4.0), (1, 4.0, 6.0)]
    assert lane(one, Lane.IN)[0] == (0, 6.0, 8.0)
    assert run(*swaps, problem=problem, resources=Resources(movers=2)) == free


def test_every_tier_has_a_link_of_its_own() -> None:
    machine = Machine(name="two", links={"spill": LINK, "cpu": replace(LINK, write_bytes_per_s=100.0)})
    timeline = run(swap(0, 3, 7, 6), swap(1, 3, 6, 5, tier="cpu"), problem=replace(PROBLEM, machine=machine))
    assert [(span.tier, span.start_s, span.end_s) for span in timeline.spans if span.lane is Lane.OUT] == [
        ("spill", 3.0, 3.5),
        ("cpu", 3.0, 4.0),
    ]


def test_a_tier_that_the_machine_lacks_is_named() -> None:
    with pytest.raises(BadArgument, match=r"machine 'test' has no tier 'tape': its tiers are spill"):
        run(swap(0, 2, 7, 6, tier="tape"))


# ---- allocators ----


@pytest.mark.parametrize("model", ["exact", "arena", "pytorch", "bfc"])
def test_an_allocator_reserves_at_least_what_is_alive(model: str) -> None:
    trace = chain_trace(8, nbytes=3 << 20, static_bytes=5 << 20, scratch_bytes=1 << 20)
    link = Link(write_bytes_per_s=2e9, read_bytes_per_s=2e9)
    problem = Problem(trace=trace, machine=machine_of(link), budget_bytes=trace.peak_bytes)
    timeline = simulate(problem, SwapAll().plan(problem), allocator=model)
    assert timeline.reserved_peak_bytes >= timeline.peak_bytes
    if model == "exact":
        assert timeline.reserved_peak_bytes == timeline.peak_bytes
    else:
        assert timeline.reserved_peak_bytes < 3 * timeline.peak_bytes


def test_a_reservation_above_the_budget_is_noted() -> None:
    problem = replace(PROBLEM, budget_bytes=400)
    timeline = run(problem=problem, allocator="pytorch")
    assert timeline.reserved_peak_bytes == 2 << 20
    assert any("the pytorch allocator reserves 2.00 MiB" in note for note in timeline.notes)


def test_swapping_and_an_allocator_without_rounding_agree_on_the_peak() -> None:
    problem = replace(PROBLEM, budget_bytes=300)
    timeline = run(swap(0, 2, 7, 6), problem=problem, allocator="exact")
    assert timeline.reserved_peak_bytes == timeline.peak_bytes == 300

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from lowtide import registry
from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Recompute
from lowtide.core.timeline import Lane, Span, Timeline
from lowtide.core.trace import Gap, Phase
from lowtide.report import Focus, Way, journeys, problem_of, settle, summarize
from lowtide.report.compare import Setting, comparison_of
from lowtide.report.explain import module_of
from lowtide.report.page import page_of
from lowtide.report.summary import rows
from lowtide.report.thin import MOST, thin_memory, thin_spans
from lowtide.testing.traces import chain_trace, machine_of, training_trace
from tests.report.samples import MACHINE, POLICIES, share, vgg

CHAIN = chain_trace(4)


def timeline_of(*spans: Span, step_s: float = 0.02) -> Timeline:
    return Timeline(
        policy="p",
        machine="m",
        model="chain",
        budget_bytes=1 << 20,
        step_s=step_s,
        compute_s=step_s,
        recompute_s=0.0,
        stall_s=0.0,
        peak_bytes=1 << 20,
        reserved_peak_bytes=1 << 20,
        moved_out_bytes=0,
        moved_in_bytes=0,
        spans=spans,
    )


def out(storage: int, start_s: float, end_s: float, *, op: int = 2, cause: str = "plan") -> Span:
    return Span(
        lane=Lane.OUT, start_s=start_s, end_s=end_s, op=op, storage=storage, nbytes=5, tier="spill", cause=cause
    )


def back(storage: int, start_s: float, end_s: float, *, op: int = 6, cause: str = "prefetch") -> Span:
    return Span(lane=Lane.IN, start_s=start_s, end_s=end_s, op=op, storage=storage, nbytes=5, tier="spill", cause=cause)


def wait(storage: int | None, start_s: float, end_s: float, cause: str) -> Span:
    return Span(lane=Lane.STALL, start_s=start_s, end_s=end_s, op=7, storage=storage, cause=cause)


def test_a_write_and_the_read_that_follows_are_one_absence_with_the_waits_for_it() -> None:
    spans = (out(0, 1.0, 2.0), wait(0, 4.5, 5.0, "arrival"), wait(1, 4.0, 4.5, "arrival"), back(0, 3.0, 5.0))
    (found,) = journeys(CHAIN, None, timeline_of(*spans))
    assert (found.way, found.out_s, found.landed_s, found.back_s, found.ready_s) == (Way.SWAPPED, 1.0, 2.0, 3.0, 5.0)
    assert found.stall_s == 0.5
    assert found.nbytes == 1 << 20
    assert (found.cause_out, found.cause_back) == ("plan", "prefetch")


def test_several_absences_of_one_storage_are_told_apart() -> None:
    spans = (
        out(0, 1.0, 2.0),
        wait(0, 3.5, 4.0, "arrival"),
        back(0, 3.0, 4.0),
        wait(0, 8.0, 9.0, "arrival"),
        back(0, 7.5, 9.0),
    )
    first, second = journeys(CHAIN, None, timeline_of(*spans))
    assert (first.way, first.stall_s) == (Way.SWAPPED, 0.5)
    assert (second.way, second.out_s, second.stall_s) == (Way.RELEASED, None, 1.0)


def test_what_never_came_back_was_unused_or_stayed() -> None:
    # Storage 0 of the chain is used by operator 7.
    (kept,) = journeys(CHAIN, None, timeline_of(out(0, 1.0, 2.0, op=2)))
    (unused,) = journeys(CHAIN, None, timeline_of(out(0, 1.0, 2.0, op=8)))
    assert (kept.way, unused.way) == (Way.KEPT, Way.UNUSED)


# Operators: two layers forward, backward and updated. Storages: parameters, moments, gradients, outputs.
TRAINING = training_trace(2, moments=1)
PARAMETER, MOMENT, GRADIENT, OUTPUT = 0, 2, 4, 6


def test_state_that_is_away_over_the_end_of_a_step_is_carried_over() -> None:
    # The moment of layer 0 is used by operator 4 alone, so that it is away from the end of a step to that operator.
    came, went = journeys(TRAINING, None, timeline_of(back(MOMENT, 3.0, 4.0, op=3), out(MOMENT, 5.0, 6.0, op=5)))
    assert (came.way, came.out_s, came.ready_s) == (Way.CARRIED, None, 4.0)
    assert (went.way, went.out_s, went.ready_s) == (Way.CARRIED, 5.0, None)


def test_where_pages_move_every_touch_is_a_need() -> None:
    (kept,) = journeys(TRAINING, None, timeline_of(out(PARAMETER, 1.0, 2.0, op=1)))
    (unused,) = journeys(TRAINING, None, timeline_of(out(OUTPUT, 4.0, 5.0, op=4)))
    (released,) = journeys(TRAINING, None, timeline_of(back(PARAMETER, 2.0, 3.0, op=2)))
    assert (kept.way, unused.way, released.way) == (Way.KEPT, Way.UNUSED, Way.RELEASED)


def test_state_is_told_by_its_layer() -> None:
    named = replace(
        TRAINING,
        ops=tuple(replace(op, module=op.name) if op.phase is Phase.FORWARD else op for op in TRAINING.ops),
    )
    found = module_of(named)
    for layer in (0, 1):
        names = {found[storage + layer] for storage in (PARAMETER, MOMENT, GRADIENT, OUTPUT)}
        assert names == {f"layer{layer}"}
    at_once = training_trace(2, moments=1, updates_at_once=True)
    named = replace(at_once, ops=tuple(replace(op, module=op.name) for op in at_once.ops[:2]) + at_once.ops[2:])
    assert MOMENT not in module_of(named), "it updates both layers, and does not tell which moment is whose"


def test_the_page_says_how_long_state_is_not_needed() -> None:
    machine = machine_of(Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9))
    problem = problem_of(TRAINING, machine, budget_bytes=(TRAINING.floor_bytes() + TRAINING.peak_bytes) // 2)
    comparison = comparison_of(Setting(trace=TRAINING, machines=(machine,)), [], trace_path="")
    page = page_of(comparison, Focus(problem=problem, steps=(settle(problem, registry.policy("auto")),)))
    why = [journey["why"] for journey in page["focus"]["steps"][0]["journeys"]]
    assert any("not needed for" in text or "not needed until the next step" in text for text in why)
    assert "planned" not in why, "a reason without figures"


def test_a_recomputation_ends_with_the_runs_before_its_operator() -> None:
    compute = [
        Span(lane=Lane.COMPUTE, start_s=start_s, end_s=start_s + 1, op=op)
        for op, start_s in enumerate((0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 9.0))
    ]
    again = [Span(lane=Lane.RECOMPUTE, start_s=7.0 + op, end_s=8.0 + op, op=op) for op in (0, 1)]
    plan = Plan(
        policy="p",
        budget_bytes=1,
        recomputes=(
            Recompute(gap=Gap(storage=0, after_op=2, before_op=7), ops=(0,)),
            Recompute(gap=Gap(storage=1, after_op=3, before_op=7), ops=(0, 1)),
        ),
    )
    first, second = journeys(CHAIN, plan, timeline_of(*compute, *again))
    assert (first.way, first.out_s, first.back_s, first.ready_s, first.remade_ops) == (Way.REMADE, 2.0, 7.0, 8.0, 1)
    assert (second.storage, second.out_s, second.ready_s, second.remade_ops) == (1, 3.0, 9.0, 2)
    # Without a plan they were discarded when memory ran out, which the timeline does not date.
    found = journeys(CHAIN, None, timeline_of(*compute, *again))
    assert [(each.storage, each.way, each.out_s, each.cause_out) for each in found] == [
        (0, Way.REMADE, None, "pressure"),
        (1, Way.REMADE, None, "pressure"),
    ]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "keep_all"])
def test_absences_account_for_every_byte_moved_and_every_wait_for_a_storage(policy: str) -> None:
    problem = problem_of(vgg(), MACHINE, budget_bytes=share(vgg(), "70%"))
    settled = settle(problem, registry.policy(policy))
    timeline = settled.timeline
    found = journeys(problem.trace, settled.plan, timeline)
    moved = [each for each in found if each.way is not Way.REMADE]
    assert sum(each.nbytes for each in moved if each.out_s is not None) == timeline.moved_out_bytes
    assert sum(each.nbytes for each in moved if each.back_s is not None) == timeline.moved_in_bytes
    waited_s = sum(
        span.end_s - span.start_s for span in timeline.spans if span.lane is Lane.STALL and span.storage is not None
    )
    assert sum(each.stall_s for each in found) == pytest.approx(waited_s)
    summary = summarize(timeline, infinite_s=problem.trace.duration_s)
    assert sum(summary.waits_s.values()) == pytest.approx(timeline.stall_s, abs=1e-9)
    assert policy in ("infinite_memory", "lru", "dtr") or moved
    assert policy != "dtr" or summary.remade


def test_a_link_that_is_busy_twice_at_once_is_busy_once() -> None:
    summary = summarize(timeline_of(out(0, 1.0, 3.0), out(1, 2.0, 4.0), back(0, 6.0, 7.0)), infinite_s=0.01)
    assert (summary.out_busy_s, summary.in_busy_s) == (3.0, 1.0)
    assert summary.slowdown(timeline_of()) == 2.0


def test_a_summary_says_everything_in_words() -> None:
    timeline = timeline_of(out(0, 0.001, 0.003), wait(None, 0.004, 0.006, "room"))
    told = dict(rows(timeline, summarize(timeline, infinite_s=0.01)))
    assert told["step"] == "20.0 ms, 2.00x of infinite memory"
    assert told["peak"] == "1.00 MiB, 100% of 1.00 MiB"
    assert told["stall"] == "0 us: 2.0 ms for memory"
    assert told["moved in"] == "nothing"
    assert "link busy 10% of the step" in told["moved out"]


# ---- very long steps ----


def test_short_steps_are_left_as_they_are() -> None:
    spans, memory = (out(0, 1.0, 2.0),), ((0.0, 5), (1.0, 7))
    assert thin_spans(spans, step_s=3.0) == spans
    assert thin_memory(memory, step_s=3.0) == memory


def test_of_a_long_step_only_what_nobody_could_see_is_merged() -> None:
    count = 10 * MOST
    spans = [Span(lane=Lane.COMPUTE, start_s=float(op), end_s=op + 1.0, op=op) for op in range(count)]
    moved = [out(0, 5.0, 6.0), back(0, 7.0, 8.0)]
    found = thin_spans(sorted([*spans, *moved], key=lambda span: span.start_s), step_s=float(count))
    assert len(found) < MOST
    assert [span for span in found if span.lane is not Lane.COMPUTE] == moved
    compute = [span for span in found if span.lane is Lane.COMPUTE]
    assert (compute[0].start_s, compute[-1].end_s) == (0.0, count)
    assert all(one.end_s == two.start_s for one, two in pairwise(compute))


def test_the_peak_and_the_valley_of_a_long_curve_are_kept() -> None:
    count = 5 * MOST
    memory = [(float(at), 100) for at in range(count)]
    memory[777], memory[4242] = (777.0, 999), (4242.0, 1)
    found = thin_memory(memory, step_s=float(count))
    assert len(found) < count / 2
    assert {(777.0, 999), (4242.0, 1), memory[0], memory[-1]} <= set(found)
    assert list(found) == sorted(found)

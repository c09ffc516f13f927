"""What holds for a simulated step of any policy: planned, reactive, or a plan that victims have to help.

    timeline = assert_simulated(problem, policy, policy.plan(problem))   # None for the plan: a reactive step

The verifier and `testing.policies` judge plans; systems that decide when memory runs out have none to judge. Here every
step is simulated, with the survey's equations checked after every event, and its timeline is held against the laws that
no system can break.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem
from lowtide.core.timeline import Lane, Span, Timeline
from lowtide.errors import BudgetTooSmall
from lowtide.plan.policy import Policy
from lowtide.simulate import simulate

# Times are sums of many floats.
ROUNDING = 1e-9


def assert_simulated(problem: Problem, policy: Policy, plan: Plan | None) -> Timeline:
    """Simulate a step strictly, assert safety, conservation and bounds, and return it.

    Raises `BudgetTooSmall` as the simulator does, where a policy gives up too little for the budget.
    """
    timeline = simulate(problem, plan, policy=policy, strict=True)
    lanes = {lane: [span for span in timeline.spans if span.lane is lane] for lane in Lane}
    _assert_time(problem, timeline, lanes)
    _assert_conservation(problem, timeline, lanes)
    _assert_bounds(problem, timeline, lanes)
    return timeline


def simulated_steps(problem: Problem, policy: Policy, plan: Plan, *, may_refuse: bool) -> list[Timeline]:
    """Return the step without a plan and the one with it, each asserted to be sound.

    A step may be missing where the budget is refused to it: if the policy says that it gives up nothing (`may_refuse`),
    or discards what it gives up, since making that again takes memory. Policies that swap run from the floor on.
    """
    discards = problem.can_recompute and policy.about.discards_victims
    found = []
    for one in (None, plan):
        try:
            found.append(assert_simulated(problem, policy, one))
        except BudgetTooSmall:
            if not may_refuse and not discards and problem.budget_bytes >= problem.trace.floor_bytes():
                raise
    return found


def _assert_time(problem: Problem, timeline: Timeline, lanes: dict[Lane, list[Span]]) -> None:
    """Assert that every operator runs once, in order, and that nothing else takes the step's time unnamed."""
    assert [span.op for span in lanes[Lane.COMPUTE]] == list(range(len(problem.trace.ops)))
    lost_s = 1e-12 * timeline.step_s  # what a moment late in a long step says of a short operator
    for lane, total_s in (
        (Lane.COMPUTE, timeline.compute_s),
        (Lane.RECOMPUTE, timeline.recompute_s),
        (Lane.STALL, timeline.stall_s),
    ):
        assert _seconds(lanes[lane]) == pytest.approx(total_s, rel=ROUNDING, abs=lost_s)
    assert timeline.compute_s + timeline.recompute_s + timeline.stall_s == pytest.approx(timeline.step_s, rel=ROUNDING)
    assert problem.can_recompute or not lanes[Lane.RECOMPUTE], "the executor cannot run operators again"
    busy = sorted(
        (span for lane in (Lane.COMPUTE, Lane.RECOMPUTE, Lane.STALL) for span in lanes[lane]),
        key=lambda span: (span.start_s, span.end_s),
    )
    _assert_one_at_a_time(busy, "the program")


def _assert_conservation(problem: Problem, timeline: Timeline, lanes: dict[Lane, list[Span]]) -> None:
    """Assert that whole storages move, that what comes back had left before, and that all traffic is counted."""
    sizes = problem.trace.storages
    for span in (*lanes[Lane.OUT], *lanes[Lane.IN]):
        assert span.storage is not None
        assert span.nbytes == sizes[span.storage].nbytes
    assert sum(span.nbytes for span in lanes[Lane.OUT]) == timeline.moved_out_bytes
    assert sum(span.nbytes for span in lanes[Lane.IN]) == timeline.moved_in_bytes
    landed_s: dict[int | None, list[float]] = {}
    for span in lanes[Lane.OUT]:
        landed_s.setdefault(span.storage, []).append(span.end_s)
    for span in lanes[Lane.IN]:
        assert any(moment_s <= span.start_s for moment_s in landed_s.get(span.storage, ())), (
            f"storage {span.storage} comes back at {span.start_s} s and has not left before"
        )


def _assert_bounds(problem: Problem, timeline: Timeline, lanes: dict[Lane, list[Span]]) -> None:
    """Assert that the step is no faster than its compute and its traffic, nor smaller than its largest working set."""
    link = problem.machine.links[problem.tier]
    for span in lanes[Lane.OUT]:
        assert span.end_s - span.start_s >= link.wait_s(link.write_s(span.nbytes)) * (1 - ROUNDING) - 1e-12
    for span in lanes[Lane.IN]:
        assert span.end_s - span.start_s >= link.wait_s(link.read_s(span.nbytes)) * (1 - ROUNDING) - 1e-12
        assert span.end_s <= timeline.step_s * (1 + ROUNDING), "nobody reads what the step does not need"
    _assert_lanes(link, lanes)
    assert timeline.step_s >= (problem.trace.duration_s + timeline.recompute_s) * (1 - ROUNDING)
    work_s = link.work_s(step_s=timeline.step_s, stall_s=timeline.stall_s)
    assert work_s >= least_traffic_s(link, timeline) * (1 - ROUNDING)
    assert timeline.peak_bytes <= problem.budget_bytes
    if problem.trace.ops:
        assert timeline.peak_bytes >= problem.trace.floor_bytes()


def _assert_lanes(link: Link, lanes: dict[Lane, list[Span]]) -> None:
    if link.duplex:
        _assert_one_at_a_time(lanes[Lane.OUT], "the link outwards")
        _assert_one_at_a_time(lanes[Lane.IN], "the link inwards")
        return
    both = sorted((*lanes[Lane.OUT], *lanes[Lane.IN]), key=lambda span: (span.start_s, span.end_s))
    _assert_one_at_a_time(both, "the link")


def _assert_one_at_a_time(spans: Sequence[Span], who: str) -> None:
    for first, second in pairwise(spans):
        assert second.start_s >= first.end_s * (1 - ROUNDING), f"{who} does two things at {second.start_s} s"


def least_traffic_s(link: Link, timeline: Timeline) -> float:
    """Return what a step's transfers take of its link: all reads, and the writes that landed before its end."""
    ended = [span for span in timeline.spans if span.end_s <= timeline.step_s]
    out_s = sum(link.write_s(span.nbytes) for span in ended if span.lane is Lane.OUT)
    in_s = sum(link.read_s(span.nbytes) for span in ended if span.lane is Lane.IN)
    return max(out_s, in_s) if link.duplex else out_s + in_s


def _seconds(spans: Sequence[Span]) -> float:
    return sum(span.end_s - span.start_s for span in spans)

"""What the tests of recomputation systems share: problems, and what a plan runs again."""

from __future__ import annotations

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem
from lowtide.core.trace import Trace
from lowtide.plan.verify import check
from lowtide.testing.traces import machine_of

LINK = Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9)


def problem_of(trace: Trace, share: float) -> Problem:
    """Return a problem whose budget lies `share` of the way from the floor to the peak, less a byte."""
    budget_bytes = int(trace.floor_bytes() + share * (trace.peak_bytes - trace.floor_bytes())) - 1
    return Problem(trace=trace, machine=machine_of(LINK), budget_bytes=budget_bytes, can_recompute=True)


def reruns(plan: Plan) -> int:
    """Return how many operators a plan runs again."""
    groups: dict[int, set[int]] = {}
    for one in plan.recomputes:
        groups.setdefault(one.gap.before_op, set()).update(one.ops)
    return sum(map(len, groups.values()))


def peak_of(plan: Plan, problem: Problem) -> int:
    """Return the verified peak of a plan that keeps its budget."""
    check(plan, problem)
    assert plan.prediction is not None
    assert plan.recomputes, "nothing is discarded: this shows nothing"
    assert not plan.swaps
    return plan.prediction.peak_bytes

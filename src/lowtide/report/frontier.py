"""Memory against time: one policy from the floor to the full peak, with what it decides at each budget.

A plan for a smaller budget runs in a larger one as well: where a larger budget's own plan is slower, it gets that one.
A limit on what is written counts bytes that planners do not: they see a slower link instead, so that they recompute
more, and what comes of it is simulated on the link as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lowtide.core.machine import Machine
from lowtide.core.plan import Problem
from lowtide.errors import BudgetTooSmall
from lowtide.plan.policy import Policy
from lowtide.report.case import Settled, settle
from lowtide.simulate import simulate

# Where between the floor and the peak: small budgets are where steps differ.
SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)
# The smallest budget is looked for to this share of what lies between floor and peak.
RESOLUTION = 0.01
# How much slower a link planners are shown so that they write less.
SLOWER = (4.0, 16.0, 64.0, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A step within a budget. Bytes by decision are those of the storages that a plan names; all others are kept."""

    budget_bytes: int
    peak_bytes: int
    step_s: float
    slowdown: float
    stall_s: float
    recompute_s: float
    written_bytes: int
    read_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    placed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a step may cost at most (None: anything)."""

    slowdown: float | None = None
    written_bytes: int | None = None

    def met(self, point: Point) -> bool:
        """Tell whether a step is within the limits."""
        slow = self.slowdown is not None and point.slowdown > self.slowdown
        return not slow and (self.written_bytes is None or point.written_bytes <= self.written_bytes)


def frontier(
    problem: Problem, policy: Policy, *, on_done: Callable[[int, int], None] | None = None
) -> tuple[Point, ...]:
    """Return a point for each budget that the policy can meet, ascending; none is slower than one with less memory."""
    trace = problem.trace
    floor_bytes, peak_bytes = trace.floor_bytes(), trace.peak_bytes
    budgets = sorted({floor_bytes + int(share * max(0, peak_bytes - floor_bytes)) for share in SHARES})
    found: list[Point] = []
    for done, budget_bytes in enumerate(budgets, start=1):
        point = point_at(problem, policy, budget_bytes)
        if point is not None:
            if found and found[-1].step_s < point.step_s:
                point = replace(found[-1], budget_bytes=budget_bytes)
            found.append(point)
        if on_done is not None:
            on_done(done, len(budgets))
    return tuple(found)


def smallest(problem: Problem, policy: Policy, wanted: Wanted) -> Point | None:
    """Return the smallest budget with which a step is within the limits, by halving (None: none is)."""
    trace = problem.trace
    low, high = trace.floor_bytes(), trace.peak_bytes
    best = _within(problem, policy, high, wanted)
    if best is None:
        return None
    least = _within(problem, policy, low, wanted)
    if least is not None:
        return least
    step_bytes = max(1, int(RESOLUTION * (high - low)))
    while high - low > step_bytes:
        middle = (low + high) // 2
        point = _within(problem, policy, middle, wanted)
        if point is not None:
            best, high = point, middle
        else:
            low = middle
    return best


def _within(problem: Problem, policy: Policy, budget_bytes: int, wanted: Wanted) -> Point | None:
    """Return a step in a budget that meets the limits (None: none was found)."""
    point = point_at(problem, policy, budget_bytes)
    if point is not None and wanted.met(point):
        return point
    for factor in SLOWER if wanted.written_bytes is not None else ():
        within = replace(problem, trace=problem.trace.under(budget_bytes), budget_bytes=budget_bytes)
        plan = policy.plan(replace(within, machine=_slower(problem.machine, factor)))
        try:
            settled = Settled(plan=plan, timeline=simulate(within, plan, policy=policy))
        except BudgetTooSmall:
            continue
        if wanted.met(point := _point(within, settled)):
            return point
    return None


def _slower(machine: Machine, factor: float) -> Machine:
    links = {
        tier: replace(
            link,
            write_bytes_per_s=link.write_bytes_per_s / factor,
            read_bytes_per_s=link.read_bytes_per_s / factor,
        )
        for tier, link in machine.links.items()
    }
    return replace(machine, links=links)


def point_at(problem: Problem, policy: Policy, budget_bytes: int) -> Point | None:
    """Return the step within a budget (None: the policy cannot meet it)."""
    within = replace(problem, budget_bytes=budget_bytes)
    try:
        return _point(within, settle(within, policy))
    except BudgetTooSmall:
        return None


def _point(problem: Problem, settled: Settled) -> Point:
    trace, plan, timeline = problem.trace, settled.plan, settled.timeline

    def bytes_of(storages: set[int]) -> int:
        return sum(trace.storages[storage].nbytes for storage in storages)

    return Point(
        budget_bytes=problem.budget_bytes,
        peak_bytes=timeline.peak_bytes,
        step_s=timeline.step_s,
        slowdown=timeline.step_s / trace.duration_s if trace.duration_s else 1.0,
        stall_s=timeline.stall_s,
        recompute_s=timeline.recompute_s,
        written_bytes=timeline.moved_out_bytes,
        read_bytes=timeline.moved_in_bytes,
        swapped_bytes=bytes_of({swap.gap.storage for swap in plan.swaps}),
        recomputed_bytes=bytes_of({one.gap.storage for one in plan.recomputes}),
        placed_bytes=bytes_of({place.storage for place in plan.places}),
    )
